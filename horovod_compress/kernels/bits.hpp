// Streams of bits, which fill bytes from the lowest up. Reading trusts nothing: every read is inside the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace hc {

class BitWriter {
  public:
    explicit BitWriter(std::uint8_t* out) : out_(out) {}
    void put(std::uint64_t value, int bits) {  // bits ≤ 32
        word_ |= value << filled_;
        filled_ += bits;
        while (filled_ >= 8) {
            *out_++ = static_cast<std::uint8_t>(word_);
            word_ >>= 8;
            filled_ -= 8;
        }
    }
    void put_ones(std::uint64_t n) {
        for (; n >= 32; n -= 32) put(0xffffffffu, 32);
        if (n) put((1ull << n) - 1, static_cast<int>(n));
    }
    void finish() {
        if (filled_) *out_++ = static_cast<std::uint8_t>(word_);
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
            if (run < filled_) {
                count += run;
                if (count > limit) throw std::invalid_argument("a number out of range");
                drop(run + 1);
                return count;
            }
            if (filled_ == 0 || in_ == end_) throw std::invalid_argument("bits end too early");
            count += filled_;
            if (count > limit) throw std::invalid_argument("a number out of range");
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
        if (filled_ > 32) return;
        if (end_ - in_ >= 4) {
            std::uint32_t more;
            std::memcpy(&more, in_, 4);
            word_ |= static_cast<std::uint64_t>(more) << filled_;
            in_ += 4;
            filled_ += 32;
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
