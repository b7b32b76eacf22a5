// Frames of payloads: made, opened, and put in another order.
//
// The checksum is of 16 streams of 32-bit words. One pass over the bytes, 64 at a time, one word
// for each stream; a step of a stream is one addition, one rotation and two multiplications. The
// rest is padded with zeros to one more such line. In the end the streams and the length are mixed
// into 32 bits.
#include "arrays.hpp"

namespace hc::frames {
namespace {

constexpr std::uint32_t kFirst = 0x9e3779b1u, kSecondFactor = 0x85ebca77u, kThird = 0xc2b2ae3du;

HC_INLINE std::uint32_t rotated(std::uint32_t x, int bits) { return x << bits | x >> (32 - bits); }
HC_INLINE void advance(WordLanes& lanes, const WordLanes& words) {
    const WordLanes moved = lanes + words * kSecondFactor;
    lanes = (moved << 13 | moved >> 19) * kFirst;
}

HC_INLINE std::uint32_t checksum_of(const std::uint8_t* bytes, std::size_t size) {
    WordLanes lanes, words;
    for (std::uint32_t j = 0; j < kLanes; ++j) lanes[j] = (j + 1) * kThird;
    std::size_t at = 0;
    for (; at + sizeof words <= size; at += sizeof words) {
        std::memcpy(&words, bytes + at, sizeof words);
        advance(lanes, words);
    }
    words = WordLanes{};
    std::memcpy(&words, bytes + at, size - at);
    advance(lanes, words);
    std::uint32_t sum = static_cast<std::uint32_t>(size) * kThird;
    for (std::size_t j = 0; j < kLanes; ++j) sum = rotated(sum ^ lanes[j], 17) * kSecondFactor;
    sum ^= sum >> 15;
    sum *= kThird;
    return sum ^ sum >> 16;
}

// Without Python's lock.
std::uint32_t checksum_without_lock(const std::uint8_t* bytes, std::size_t size) {
    py::gil_scoped_release release;
    return dispatch<checksum_of>(bytes, size);
}

// As it is in memory, which is little-endian.
struct Header {
    char magic[2];
    std::uint8_t version, number;
    std::uint32_t checksum, digest, step, length, flags;
};
static_assert(sizeof(Header) == kHeadroom);
constexpr char kMagic[2] = {'h', 'C'};
constexpr int kVersion = 3;
// The checksum covers the frame from this byte on; the fields before are compared as they are.
constexpr std::size_t kChecked = 8;
constexpr std::uint32_t kNotFinite = 1;

// A part of an array, in the same memory.
Bytes part_of(const Bytes& data, std::size_t at, std::size_t size) {
    return Bytes(static_cast<py::ssize_t>(size), data.data() + at, data);
}

Bytes seal_frame(Bytes& buffer, std::size_t size, std::uint8_t number, std::uint32_t digest,
                 std::uint32_t step, bool finite) {
    const std::size_t room = length(buffer, "buffer");
    const std::size_t needed = room - 1;
    if (room <= kHeadroom || size < needed || needed - kHeadroom > 0xffffffffu ||
        size - needed > 0x7fffffffu)
        throw std::invalid_argument("a buffer is a header, a body and a byte, and fits its frame");
    Bytes frame = part_of(buffer, 0, std::min(size, room));
    if (size > room) {
        frame = Bytes(static_cast<py::ssize_t>(size));
        std::memcpy(frame.mutable_data(), buffer.data(), needed);
        std::memset(frame.mutable_data() + needed, 0, size - needed);
    }
    const auto padding = static_cast<std::uint32_t>(size - needed) << 1;
    Header header{{kMagic[0], kMagic[1]},
                  kVersion,
                  number,
                  0,
                  digest,
                  step,
                  static_cast<std::uint32_t>(needed - kHeadroom),
                  padding | (finite ? 0 : kNotFinite)};
    std::uint8_t* bytes = frame.mutable_data();
    std::memcpy(bytes, &header, kHeadroom);
    header.checksum = checksum_without_lock(bytes + kChecked, size - kChecked);
    std::memcpy(bytes, &header, kHeadroom);
    return frame;
}

// The end of the frame that begins at a place, and its header.
std::size_t end_of(const std::uint8_t* bytes, std::size_t size, std::size_t at, Header& header) {
    if (size - at < kHeadroom) throw std::invalid_argument("cut off in its header");
    std::memcpy(&header, bytes + at, kHeadroom);
    if (std::memcmp(header.magic, kMagic, 2))
        throw std::invalid_argument("not a horovod_compress payload");
    if (header.version != kVersion)
        throw std::invalid_argument("wire version " + std::to_string(header.version) +
                                    ", this rank has " + std::to_string(kVersion) +
                                    "; install the same horovod-compress everywhere");
    const std::uint64_t length = std::uint64_t{header.length} + (header.flags >> 1);
    if (length > size - at - kHeadroom) throw std::invalid_argument("cut off in its body");
    return at + kHeadroom + static_cast<std::size_t>(length);
}

py::tuple open_frames(const Bytes& data, std::size_t frames, std::uint8_t number,
                      std::uint32_t digest, std::uint32_t step) {
    const std::size_t size = length(data, "data");
    const std::uint8_t* bytes = data.data();
    py::list bodies;
    Header header;
    std::size_t at = 0;
    bool finite = true;
    try {
        while (bodies.size() < frames && at < size) {
            const std::size_t end = end_of(bytes, size, at, header);
            if (checksum_without_lock(bytes + at + kChecked, end - at - kChecked) !=
                header.checksum)
                throw std::invalid_argument("its checksum does not fit: it was changed on the way");
            const std::uint32_t maker = header.digest - digest;
            if (header.number != number || maker >= frames)
                throw std::invalid_argument("made for another compressor, configuration or tensor");
            if (maker != bodies.size())
                throw std::invalid_argument("made by rank " + std::to_string(maker) +
                                            ": it was put in another's place on the way");
            if (header.step != step)
                throw std::invalid_argument("of step " + std::to_string(header.step) +
                                            ", this rank is at step " + std::to_string(step) +
                                            "; was a state loaded on some ranks only?");
            bodies.append(part_of(data, at + kHeadroom, header.length));
            finite = finite && !(header.flags & kNotFinite);
            at = end;
        }
    } catch (const std::invalid_argument& error) {
        throw std::invalid_argument("payload of rank " + std::to_string(bodies.size()) + ": " +
                                    error.what());
    }
    if (bodies.size() < frames)
        throw std::invalid_argument("payloads of " + std::to_string(bodies.size()) +
                                    " ranks came, " + std::to_string(frames) +
                                    " were expected: were ranks lost, or is another number of "
                                    "them running now?");
    if (at != size)
        throw std::invalid_argument(std::to_string(size - at) +
                                    " bytes follow the payload of the last of " +
                                    std::to_string(frames) + " ranks");
    return py::make_tuple(bodies, finite);
}

std::vector<Bytes> frames_by_tensor(const Bytes& data, std::size_t ranks, std::size_t tensors) {
    const std::size_t size = length(data, "data");
    std::vector<std::size_t> ends{0}, sizes(tensors);
    Header header;
    for (std::size_t i = 0; i < ranks * tensors; ++i) {
        try {
            ends.push_back(end_of(data.data(), size, ends.back(), header));
        } catch (const std::invalid_argument& error) {
            throw std::invalid_argument("payload of rank " + std::to_string(i / tensors) + ": " +
                                        error.what());
        }
        sizes[i % tensors] += ends[i + 1] - ends[i];
    }
    if (ends.back() != size) throw std::invalid_argument("bytes follow the last frame");
    std::vector<Bytes> joined;
    for (std::size_t tensor = 0; tensor < tensors; ++tensor) {
        Bytes frames(static_cast<py::ssize_t>(sizes[tensor]));
        std::uint8_t* out = frames.mutable_data();
        for (std::size_t i = tensor; i < ranks * tensors; i += tensors) {
            std::memcpy(out, data.data() + ends[i], ends[i + 1] - ends[i]);
            out += ends[i + 1] - ends[i];
        }
        joined.push_back(std::move(frames));
    }
    return joined;
}

}  // namespace

void bind(py::module_& m) {
    m.def("seal_frame", &seal_frame, arg("buffer").noconvert(), py::kw_only(), arg("size"),
          arg("number"), arg("digest"), arg("step"), arg("finite"));
    m.def("open_frames", &open_frames, arg("data").noconvert(), py::kw_only(), arg("frames"),
          arg("number"), arg("digest"), arg("step"));
    m.def("frames_by_tensor", &frames_by_tensor, arg("data").noconvert(), py::kw_only(),
          arg("ranks"), arg("tensors"));
}

}  // namespace hc::frames
