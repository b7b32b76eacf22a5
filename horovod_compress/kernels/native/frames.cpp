// Frames of the payloads of a group of tensors: made and opened.
//
// The checksum is of 16 streams of 32-bit words. One pass over the bytes, 64 at a time, one word
// for each stream; a step of a stream is one addition, one rotation and two multiplications. The
// rest is padded with zeros to one more such line. In the end the streams and the length are mixed
// into 32 bits.
#include "lists.hpp"

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
constexpr int kVersion = 4;
// The checksum covers the frame from this byte on; the fields before are compared as they are.
constexpr std::size_t kChecked = 8;
constexpr std::uint32_t kNotFinite = 1;

// Of each of several tensors, before their bodies: its body's bytes times 2, and 1 if its gradient
// was not finite.
using Entry = std::uint32_t;
std::size_t table_of(std::size_t tensors) { return tensors > 1 ? tensors * sizeof(Entry) : 0; }

// A part of an array, in the same memory.
Bytes part_of(const Bytes& data, std::size_t at, std::size_t size) {
    return Bytes(static_cast<py::ssize_t>(size), data.data() + at, data);
}

// What is before and behind a body in its buffer.
constexpr std::size_t kAround = kHeadroom + 1;

// Writes the bodies, and before them their table.
void put_bodies(Many<Bytes>& buffers, Many<bool>& finite, std::uint8_t* out) {
    const std::size_t tensors = buffers.size(), table = table_of(tensors);
    std::uint8_t* body = out + table;
    for (std::size_t i = 0; i < tensors; ++i) {
        const std::size_t size = static_cast<std::size_t>(buffers[i].size()) - kAround;
        const auto entry = static_cast<Entry>(size << 1 | (finite[i] ? 0 : kNotFinite));
        if (table) std::memcpy(out + i * sizeof entry, &entry, sizeof entry);
        std::memcpy(body, buffers[i].data() + kHeadroom, size);
        body += size;
    }
}

Bytes seal_frame(Many<Bytes> buffers, std::size_t size, std::uint8_t number, std::uint32_t digest,
                 std::uint32_t step, Many<bool> finite) {
    const std::size_t tensors = buffers.size();
    if (tensors == 0 || finite.size() != tensors)
        throw std::invalid_argument("a frame has one tensor at least, and a flag for each");
    std::size_t content = table_of(tensors);
    std::uint32_t flags = 0;
    for (std::size_t i = 0; i < tensors; ++i) {
        const std::size_t room = length(buffers[i], "buffer");
        if (room < kAround || (tensors > 1 && room - kAround > 0x7fffffffu))
            throw std::invalid_argument("a buffer is a header, a body and a byte");
        content += room - kAround;
        if (!finite[i]) flags = kNotFinite;
    }
    const std::size_t needed = kHeadroom + content;
    if (size < needed || content > 0xffffffffu || size - needed > 0x7fffffffu)
        throw std::invalid_argument("bodies must fit their frame");
    const bool in_buffer = tensors == 1 && size <= needed + 1;
    Bytes frame = in_buffer ? part_of(buffers[0], 0, size) : aligned<std::uint8_t>(size);
    Header header{{kMagic[0], kMagic[1]},
                  kVersion,
                  number,
                  0,
                  digest,
                  step,
                  static_cast<std::uint32_t>(content),
                  static_cast<std::uint32_t>(size - needed) << 1 | flags};
    std::uint8_t* bytes = frame.mutable_data();
    {
        py::gil_scoped_release release;
        if (!in_buffer) {
            put_bodies(buffers, finite, bytes + kHeadroom);
            std::memset(bytes + needed, 0, size - needed);
        }
        std::memcpy(bytes, &header, kHeadroom);
        header.checksum = dispatch<checksum_of>(bytes + kChecked, size - kChecked);
        std::memcpy(bytes, &header, kHeadroom);
    }
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

// The bodies in the content of a frame, which begins at a place. Marks the tensors whose gradient
// was not finite.
py::list bodies_of(const Bytes& data, std::size_t at, const Header& header,
                   std::vector<bool>& finite) {
    const std::size_t tensors = finite.size(), table = table_of(tensors);
    // A frame of one tensor says the same in its header.
    std::vector<Entry> entries(tensors, header.flags & kNotFinite);
    std::uint64_t size = table ? table : header.length;
    if (header.length < table) throw std::invalid_argument("shorter than the table of its tensors");
    std::memcpy(entries.data(), data.data() + at, table);
    for (const Entry entry : entries) size += entry >> 1;
    if (size != header.length)
        throw std::invalid_argument("not of the length that the table of its tensors says");
    py::list bodies(tensors);
    at += table;
    for (std::size_t i = 0; i < tensors; ++i) {
        const std::size_t bytes = table ? entries[i] >> 1 : header.length;
        bodies[i] = part_of(data, at, bytes);
        finite[i] = finite[i] && !(entries[i] & kNotFinite);
        at += bytes;
    }
    return bodies;
}

py::tuple open_frames(const Bytes& data, std::size_t frames, std::size_t tensors,
                      std::uint8_t number, std::uint32_t digest, std::uint32_t step) {
    const std::size_t size = length(data, "data");
    const std::uint8_t* bytes = data.data();
    if (tensors == 0) throw std::invalid_argument("a frame has one tensor at least");
    py::list bodies;
    std::vector<bool> finite(tensors, true);
    Header header;
    std::size_t at = 0;
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
            bodies.append(bodies_of(data, at + kHeadroom, header, finite));
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

}  // namespace

void bind(py::module_& m) {
    m.def("seal_frame", &seal_frame, arg("buffers"), py::kw_only(), arg("size"), arg("number"),
          arg("digest"), arg("step"), arg("finite"));
    m.def("open_frames", &open_frames, arg("data").noconvert(), py::kw_only(), arg("frames"),
          arg("tensors"), arg("number"), arg("digest"), arg("step"));
}

}  // namespace hc::frames
