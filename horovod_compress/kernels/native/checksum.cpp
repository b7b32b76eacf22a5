// The checksum of frames: 16 streams of 32-bit words.
//
// One pass over the bytes, 64 at a time, one word for each stream; a step of a stream is one addition, one rotation and two multiplications.
// The rest is padded with zeros to one more such line. In the end the streams and the length are mixed into 32 bits.
#include "arrays.hpp"

namespace hc::checksum {
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

std::uint32_t checksum(const Bytes& data) {
    const std::size_t size = length(data, "data");
    const std::uint8_t* bytes = data.data();
    py::gil_scoped_release release;
    return dispatch<checksum_of>(bytes, size);
}

}  // namespace

void bind(py::module_& m) { m.def("checksum", &checksum, arg("data").noconvert()); }

}  // namespace hc::checksum
