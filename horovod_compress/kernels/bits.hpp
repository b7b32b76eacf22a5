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
    BitReader(const std::uint8_t* in, const std::uint8_t* end) : in_(in), end_(end) {}

    // Reads ones up to a zero, and that: how many they are, at most `limit`.
    std::uint64_t ones(std::uint64_t limit) {
        std::uint64_t count = 0;
        for (;;) {
            refill();
            const int run = ~word_ == 0 ? 64 : __builtin_ctzll(~word_);
            const bool ended = run < filled_;
            count += ended ? run : filled_;
            if (count > limit) throw std::invalid_argument("a number out of range");
            if (ended) {
                drop(run + 1);
                return count;
            }
            if (in_ == end_) throw std::invalid_argument("bits end too early");
            word_ = 0;
            filled_ = 0;
        }
    }
    std::uint64_t take(int bits) {  // at most 32
        refill();
        if (filled_ < bits) throw std::invalid_argument("bits end too early");
        const std::uint64_t value = word_ & ((1ull << bits) - 1);
        drop(bits);
        return value;
    }
    // What put_run wrote: ones << bits | value.
    std::uint64_t run(int bits, std::uint64_t limit) {
        refill();
        const int ones_here = ~word_ == 0 ? 64 : __builtin_ctzll(~word_), length = ones_here + 1 + bits;
        if (length <= filled_) {
            const std::uint64_t value = static_cast<std::uint64_t>(ones_here) << bits | (word_ >> ones_here >> 1 & ((1ull << bits) - 1));
            drop(length);
            return value;
        }
        const std::uint64_t count = ones(limit);
        return count << bits | take(bits);
    }
    // Nothing may be left but the zeros that fill the last byte.
    void finish() {
        refill();
        if (in_ != end_ || filled_ >= 8 || word_ != 0) throw std::invalid_argument("longer than its entries");
    }

  private:
    void drop(int bits) {  // at most 64
        word_ = bits < 64 ? word_ >> bits : 0;
        filled_ -= bits;
    }
    void refill() {
        if (filled_ > 56) return;
        if (end_ - in_ >= 8) {
            std::uint64_t more;
            std::memcpy(&more, in_, 8);
            const int bytes = (64 - filled_) / 8;  // as many as fit whole
            word_ |= (bytes < 8 ? more & ((1ull << 8 * bytes) - 1) : more) << filled_;
            in_ += bytes;
            filled_ += 8 * bytes;
            return;
        }
        while (filled_ <= 56 && in_ < end_) {
            word_ |= static_cast<std::uint64_t>(*in_++) << filled_;
            filled_ += 8;
        }
    }

    const std::uint8_t *in_, *end_;
    std::uint64_t word_ = 0;
    int filled_ = 0;
};

}  // namespace hc
