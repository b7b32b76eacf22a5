// Streams of bits, which fill bytes from the lowest up. Reading trusts nothing: every read is inside the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace hc {

// Writes whole words of 32 bits while it goes, and the rest at the end.
class BitWriter {
  public:
    explicit BitWriter(std::uint8_t* out) : out_(out) {}
    void put(std::uint64_t value, int bits) {  // at most 32
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

class BitReader {
  public:
    BitReader(const std::uint8_t* in, const std::uint8_t* end) : in_(in), size_(static_cast<std::uint64_t>(end - in)) {}

    // Reads ones up to a zero, and that: how many they are, at most `limit`.
    std::uint64_t ones(std::uint64_t limit) {
        std::uint64_t count = 0;
        for (;;) {
            const std::uint64_t rest = ~next();
            const int run = rest == 0 ? 64 : __builtin_ctzll(rest);
            const bool ended = run < kAtOnce;
            count += ended ? run : kAtOnce;
            skip(ended ? run + 1 : kAtOnce);
            if (count > limit) throw std::invalid_argument("a number out of range");
            if (ended) return count;
        }
    }
    std::uint64_t take(int bits) {  // at most 32
        const std::uint64_t value = next() & ((1ull << bits) - 1);
        skip(bits);
        return value;
    }
    // What put_run wrote: ones << bits | value.
    std::uint64_t run(int bits, std::uint64_t limit) {
        const std::uint64_t word = next();
        const int ones_here = ~word == 0 ? 64 : __builtin_ctzll(~word), length = ones_here + 1 + bits;
        if (length <= kAtOnce) {
            skip(length);
            return static_cast<std::uint64_t>(ones_here) << bits | (word >> ones_here >> 1 & ((1ull << bits) - 1));
        }
        const std::uint64_t count = ones(limit);
        return count << bits | take(bits);
    }
    // Nothing may be left but the zeros that fill the last byte.
    void finish() const {
        if (8 * size_ - at_ >= 8 || next() != 0) throw std::invalid_argument("longer than its entries");
    }

  private:
    static constexpr int kAtOnce = 57;  // bits that are there wherever in a byte they begin
    // The bits from here on, zeros behind the last.
    std::uint64_t next() const {
        const std::uint64_t byte = at_ >> 3;
        std::uint64_t word = 0;
        if (byte + 8 <= size_) std::memcpy(&word, in_ + byte, 8);
        else if (byte < size_) std::memcpy(&word, in_ + byte, size_ - byte);
        return word >> (at_ & 7);
    }
    void skip(int bits) {
        at_ += bits;
        if (at_ > 8 * size_) throw std::invalid_argument("bits end too early");
    }

    const std::uint8_t* in_;
    std::uint64_t size_, at_ = 0;  // in bytes, in bits
};

}  // namespace hc
