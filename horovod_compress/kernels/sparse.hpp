// The sparse body of the wire format (docs/wire-format.md): values at 32 or 16 bits, then the gaps between ascending
// indices in Rice code. Decoding trusts nothing: every read is inside the body, every index inside the tensor.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace hc {

enum class Values : int { fp32 = 0, fp16 = 1, bf16 = 2 };

inline std::size_t width_of(Values kind) { return kind == Values::fp32 ? 4 : 2; }

// float32 to the nearest 16-bit value, ties to even; what is too large becomes the largest finite value, not infinity,
// because the rounding error stays in the residual and will be sent later.
inline std::uint16_t to_half(float x) {
    std::uint32_t b;
    std::memcpy(&b, &x, 4);
    const std::uint16_t sign = static_cast<std::uint16_t>((b >> 16) & 0x8000u);
    b &= 0x7fffffffu;
    if (b >= 0x477fe000u) return sign | 0x7bffu;                   // from 65504 on
    if (b >= 0x38800000u) return sign | static_cast<std::uint16_t>((b - 0x38000000u + 0xfffu + ((b >> 13) & 1u)) >> 13);
    float magnitude;                                               // subnormal half: a multiple of 2^-24
    std::memcpy(&magnitude, &b, 4);
    return sign | static_cast<std::uint16_t>(std::nearbyintf(magnitude * 16777216.0f));
}
inline float from_half(std::uint16_t h) {
    const std::uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * (1.0f / 16777216.0f);
        return sign ? -magnitude : magnitude;
    }
    const std::uint32_t b = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}
inline std::uint16_t to_bfloat(float x) {
    std::uint32_t b;
    std::memcpy(&b, &x, 4);
    const std::uint16_t sign = static_cast<std::uint16_t>((b >> 16) & 0x8000u);
    b &= 0x7fffffffu;
    const std::uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    return sign | static_cast<std::uint16_t>(rounded > 0x7f7fu ? 0x7f7fu : rounded);
}
inline float from_bfloat(std::uint16_t h) {
    const std::uint32_t b = static_cast<std::uint32_t>(h) << 16;
    float x;
    std::memcpy(&x, &b, 4);
    return x;
}

inline float rounded(float x, Values kind) {
    return kind == Values::fp32 ? x : kind == Values::fp16 ? from_half(to_half(x)) : from_bfloat(to_bfloat(x));
}

// Rice code with parameter r: a gap is (gap >> r) ones, a zero, then the r low bits; bits fill bytes from the lowest up.
constexpr int kMaxRice = 31;

inline std::uint64_t rice_bits(const std::uint32_t* indices, std::size_t n, int r) {
    std::uint64_t bits = static_cast<std::uint64_t>(n) * (r + 1);
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < n; ++i) {
        bits += (indices[i] - next) >> r;
        next = indices[i] + 1;
    }
    return bits;
}

// The cheapest parameter: cost is convex in r, so walk from the one that fits the mean gap.
inline int best_rice(const std::uint32_t* indices, std::size_t n) {
    if (n == 0) return 0;
    const double mean = (static_cast<double>(indices[n - 1]) + 1) / static_cast<double>(n);
    int r = mean > 1 ? static_cast<int>(std::log2(mean * 0.6931)) : 0;
    if (r < 0) r = 0;
    std::uint64_t best = rice_bits(indices, n, r);
    for (int step : {1, -1}) {
        while (r + step >= 0 && r + step <= kMaxRice) {
            const std::uint64_t cost = rice_bits(indices, n, r + step);
            if (cost >= best) break;
            best = cost;
            r += step;
        }
    }
    return r;
}

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

inline std::size_t sparse_size(std::size_t n, Values kind, std::uint64_t gap_bits) {
    return 1 + n * width_of(kind) + static_cast<std::size_t>((gap_bits + 7) / 8);
}

inline void encode_sparse(const std::uint32_t* indices, const float* values, std::size_t n, Values kind, int r,
                          std::uint8_t* out) {
    *out++ = static_cast<std::uint8_t>(r);
    if (kind == Values::fp32) {
        std::memcpy(out, values, 4 * n);
    } else {
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint16_t h = kind == Values::fp16 ? to_half(values[i]) : to_bfloat(values[i]);
            std::memcpy(out + 2 * i, &h, 2);
        }
    }
    BitWriter writer(out + n * width_of(kind));
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t gap = indices[i] - next;
        writer.put_ones(gap >> r);
        writer.put(0, 1);
        writer.put(gap & ((1ull << r) - 1), r);
        next = indices[i] + 1;
    }
    writer.finish();
}

// Fills indices and values, both with room for n. The body must be used up exactly, its padding zero.
inline void decode_sparse(const std::uint8_t* body, std::size_t size, std::size_t n, std::uint64_t numel, Values kind,
                          std::uint32_t* indices, float* values) {
    if (n > numel) throw std::invalid_argument("more entries than the tensor has elements");
    if (size < 1 || (size - 1) / width_of(kind) < n) throw std::invalid_argument("shorter than its values");
    const int r = *body;
    if (r > kMaxRice) throw std::invalid_argument("Rice parameter out of range");
    const std::uint8_t* in = body + 1;
    if (kind == Values::fp32) {
        if (n) std::memcpy(values, in, 4 * n);
    } else {
        for (std::size_t i = 0; i < n; ++i) {
            std::uint16_t h;
            std::memcpy(&h, in + 2 * i, 2);
            values[i] = kind == Values::fp16 ? from_half(h) : from_bfloat(h);
        }
    }
    in += n * width_of(kind);
    const std::uint8_t* end = body + size;

    std::uint64_t word = 0;
    int filled = 0;
    const auto refill = [&] {
        while (filled <= 56 && in < end) {
            word |= static_cast<std::uint64_t>(*in++) << filled;
            filled += 8;
        }
    };
    std::uint64_t next = 0;
    const std::uint64_t mask = (1ull << r) - 1;
    for (std::size_t i = 0; i < n; ++i) {
        std::uint64_t quotient = 0;
        for (;;) {
            refill();
            const int ones = ~word == 0 ? 64 : __builtin_ctzll(~word);
            if (ones < filled) {
                quotient += ones;
                word >>= ones;
                word >>= 1;
                filled -= ones + 1;
                break;
            }
            if (filled == 0 || in == end) throw std::invalid_argument("index bits end too early");
            quotient += filled;
            if (quotient > numel) throw std::invalid_argument("index outside the tensor");
            word = 0;
            filled = 0;
        }
        refill();
        if (filled < r) throw std::invalid_argument("index bits end too early");
        const std::uint64_t index = next + (quotient << r) + (word & mask);
        word >>= r;
        filled -= r;
        if (quotient > numel || index >= numel) throw std::invalid_argument("index outside the tensor");
        indices[i] = static_cast<std::uint32_t>(index);
        next = index + 1;
    }
    if (in != end || filled >= 8 || word != 0) throw std::invalid_argument("longer than its entries");
}

}  // namespace hc
