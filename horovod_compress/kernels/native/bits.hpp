// Streams of bits, which fill bytes from the lowest up.
//
// BitWriter and UnaryWriter collect bits in one register and store it when it is full; the caller
// has made room. BitReader keeps only its place, and loads the 8 bytes from there anew for each
// number. read_places and put_places turn the ones of words into indices without a branch for each.
// Reading trusts nothing: every load is inside the bytes, and what does not fit is an exception.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "common.hpp"

namespace hc {

using tuning::kPlacesAtOnce;

// Writes first + the place of each one of `word`, ascending, and up to kPlacesAtOnce − 1
// meaningless numbers behind. A branch for each of them would cost more. Returns how many there
// are.
HC_INLINE int put_places(std::uint64_t word, std::uint32_t first, std::uint32_t* out) {
    const int count = __builtin_popcountll(word);
    for (int i = 0; i < count; i += kPlacesAtOnce)
        for (int j = 0; j < kPlacesAtOnce; ++j, word &= word - 1)
            out[i + j] = first + __builtin_ctzll(word | 1ull << 63);
    return count;
}

// Writes whole words of 32 bits while it goes, and the rest at the end.
class BitWriter {
  public:
    explicit BitWriter(std::uint8_t* out) : out_(out) {}
    HC_INLINE void put(std::uint64_t value, int bits) {  // at most 32
        word_ |= value << filled_;
        filled_ += bits;
        if (filled_ >= 32) {
            std::memcpy(out_, &word_, 4);
            out_ += 4;
            word_ >>= 32;
            filled_ -= 32;
        }
    }
    // `ones` ones, a zero, the `bits` low bits of value.
    void put_run(std::uint64_t ones, std::uint64_t value, int bits) {
        for (; ones + 1 + bits > 32; ones -= ones < 32 ? ones : 32) {
            if (ones == 0) {
                put(0, 1);
                return put(value, bits);
            }
            const int some = ones < 32 ? static_cast<int>(ones) : 32;
            put((1ull << some) - 1, some);
        }
        put(((1ull << ones) - 1) | value << (ones + 1), static_cast<int>(ones) + 1 + bits);
    }
    void finish() {
        for (; filled_ > 0; filled_ -= 8) {
            *out_++ = static_cast<std::uint8_t>(word_);
            word_ >>= 8;
        }
    }

  private:
    std::uint8_t* out_;
    std::uint64_t word_ = 0;
    int filled_ = 0;
};

// Writes numbers, each as so many zeros and a one.
class UnaryWriter {
  public:
    explicit UnaryWriter(std::uint8_t* out) : out_(out) {}
    HC_INLINE void put(std::uint32_t zeros) {
        for (filled_ += zeros; filled_ >= 64; filled_ -= 64) {
            std::memcpy(out_, &word_, 8);
            out_ += 8;
            word_ = 0;
        }
        word_ |= 1ull << filled_++;
    }
    void finish() { std::memcpy(out_, &word_, static_cast<std::size_t>(filled_ + 7) / 8); }

  private:
    std::uint8_t* out_;
    std::uint64_t word_ = 0, filled_ = 0;
};

// The places of the ones in the bits from `in` to `end`, fewer than 2^32: exactly `count`, the last
// one in the last byte. There is room for kPlacesAtOnce more places.
HC_INLINE void read_places(const std::uint8_t* in, const std::uint8_t* end, std::size_t count,
                           std::uint32_t* places) {
    const auto size = static_cast<std::size_t>(end - in);
    std::size_t found = 0;
    for (std::size_t at = 0; at < size; at += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, in + at, size - at < 8 ? size - at : 8);
        if (static_cast<std::size_t>(__builtin_popcountll(word)) > count - found)
            throw std::invalid_argument("longer than its entries");
        found += put_places(word, static_cast<std::uint32_t>(8 * at), places + found);
    }
    if (found < count) throw std::invalid_argument("bits end too early");
    if (size && end[-1] == 0) throw std::invalid_argument("longer than its entries");
}

class BitReader {
  public:
    BitReader(const std::uint8_t* in, const std::uint8_t* end)
        : in_(in), size_(static_cast<std::uint64_t>(end - in)) {}

    // Reads ones up to a zero, and that: how many they are, at most `limit`.
    std::uint64_t ones(std::uint64_t limit) {
        std::uint64_t count = 0;
        for (;;) {
            const std::uint64_t rest = ~peek();
            const int run = rest == 0 ? 64 : __builtin_ctzll(rest);
            const bool ended = run < kWhole;
            count += ended ? run : kWhole;
            skip(ended ? run + 1 : kWhole);
            if (count > limit) throw std::invalid_argument("a number out of range");
            if (ended) return count;
        }
    }
    HC_INLINE std::uint64_t take(int bits) {  // at most 32
        const std::uint64_t value = peek() & ((1ull << bits) - 1);
        skip(bits);
        return value;
    }
    // What put_run wrote: ones << bits | value.
    std::uint64_t run(int bits, std::uint64_t limit) {
        const std::uint64_t word = peek();
        const int ones_here = ~word == 0 ? 64 : __builtin_ctzll(~word),
                  length = ones_here + 1 + bits;
        if (length <= kWhole) {
            skip(length);
            return static_cast<std::uint64_t>(ones_here) << bits |
                   (word >> ones_here >> 1 & ((1ull << bits) - 1));
        }
        const std::uint64_t count = ones(limit);
        return count << bits | take(bits);
    }
    // Nothing may be left but the zeros that fill the last byte.
    void finish() const {
        if (8 * size_ - at_ >= 8 || peek() != 0)
            throw std::invalid_argument("longer than its entries");
    }

    // The bits from place `at` on, 57 at least, zeros behind the last.
    HC_INLINE std::uint64_t from(std::uint64_t at) const {
        const std::uint64_t byte = at >> 3;
        std::uint64_t word = 0;
        if (byte + 8 <= size_) std::memcpy(&word, in_ + byte, 8);
        else if (byte < size_) std::memcpy(&word, in_ + byte, size_ - byte);
        return word >> (at & 7);
    }

    // The next bits, kWhole at least, zeros behind the last; and to go past some of them.
    HC_INLINE std::uint64_t peek() const { return from(at_); }
    HC_INLINE void skip(int bits) {
        at_ += bits;
        if (at_ > 8 * size_) throw std::invalid_argument("bits end too early");
    }

  private:
    // Bits that are there wherever in a byte they begin.
    static constexpr int kWhole = 57;
    const std::uint8_t* in_;
    std::uint64_t size_, at_ = 0;  // in bytes, in bits
};

}  // namespace hc
