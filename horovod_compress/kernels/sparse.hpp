// The sparse body of the wire format (docs/wire-format.md): values at 32, 16, 4 bits or 1, then the gaps between ascending
// indices in Rice code. Decoding trusts nothing: every read is inside the body, every index inside the tensor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "bits.hpp"
#include "common.hpp"

namespace hc {

// How values are coded. sign: 1 bit, ±scale. power: a sign and 3 bits, ±scale/2^d; scale is a power of two.
enum class Values : std::uint8_t { fp32 = 0, fp16 = 1, bf16 = 2, sign = 3, power = 4 };
constexpr int kKinds = 5;

inline Values values_of(const std::string& name) {
    constexpr const char* names[kKinds] = {"fp32", "fp16", "bf16", "sign", "power"};
    for (int i = 0; i < kKinds; ++i)
        if (name == names[i]) return static_cast<Values>(i);
    throw std::invalid_argument("values must be fp32, fp16, bf16, sign or power, not " + name);
}
inline bool has_scale(Values kind) { return kind >= Values::sign; }
inline std::uint64_t values_size(std::uint64_t n, Values kind) {
    constexpr int bits[kKinds] = {32, 16, 16, 1, 4};
    return (n * bits[static_cast<int>(kind)] + 7) / 8;
}

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
    if (n == 0) return 0;
    std::uint32_t ones = indices[0] >> r;  // all of them are at most as many as the tensor has elements
    for (std::size_t i = 1; i < n; ++i) ones += (indices[i] - indices[i - 1] - 1) >> r;
    return static_cast<std::uint64_t>(n) * (r + 1) + ones;
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

struct Sparse {
    Values kind;
    float scale;
    std::vector<std::uint32_t> indices;
    std::vector<float> values;
};

constexpr std::size_t kSparseHead = 6;  // count, kind, Rice parameter

inline std::size_t sparse_size(std::size_t n, Values kind, std::uint64_t gap_bits) {
    return kSparseHead + 4 * has_scale(kind) + values_size(n, kind) + static_cast<std::size_t>((gap_bits + 7) / 8);
}

// The d of a value that is exactly ±scale/2^d.
inline std::uint32_t power_code(float value, float scale) {
    return (bits_of(value) >> 28 & 8u) | (((magnitude(scale) >> 23) - (magnitude(value) >> 23)) & 7u);
}
inline float power_value(std::uint32_t code, float scale) {
    const std::uint32_t step = (code & 8u) << 28 | (127 - (code & 7u)) << 23;  // ±2^-d
    float factor;
    std::memcpy(&factor, &step, 4);
    return scale * factor;
}

inline void encode_sparse(const std::uint32_t* indices, const float* values, std::size_t n, Values kind, float scale, int r,
                          std::uint8_t* out) {
    const std::uint32_t count = static_cast<std::uint32_t>(n);
    std::memcpy(out, &count, 4);
    out[4] = static_cast<std::uint8_t>(kind);
    out[5] = static_cast<std::uint8_t>(r);
    out += kSparseHead;
    if (has_scale(kind)) {
        std::memcpy(out, &scale, 4);
        out += 4;
    }
    if (kind == Values::fp32) {
        if (n) std::memcpy(out, values, 4 * n);
    } else if (kind == Values::sign) {
        for (std::size_t i = 0; i < n; i += 8) {
            std::uint32_t byte = 0;
            for (std::size_t j = 0; j < 8 && i + j < n; ++j) byte |= bits_of(values[i + j]) >> 31 << j;
            out[i / 8] = static_cast<std::uint8_t>(byte);
        }
    } else if (kind == Values::power) {
        for (std::size_t i = 0; i < n; i += 2) {
            const std::uint32_t high = i + 1 < n ? power_code(values[i + 1], scale) << 4 : 0;
            out[i / 2] = static_cast<std::uint8_t>(power_code(values[i], scale) | high);
        }
    } else {
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint16_t h = kind == Values::fp16 ? to_half(values[i]) : to_bfloat(values[i]);
            std::memcpy(out + 2 * i, &h, 2);
        }
    }
    BitWriter writer(out + values_size(n, kind));
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t gap = indices[i] - next;
        writer.put_run(gap >> r, gap & ((1ull << r) - 1), r);
        next = indices[i] + 1;
    }
    writer.finish();
}

// Reads a body into `to`. The body must be used up exactly, its padding zero.
inline void decode_sparse(const std::uint8_t* body, std::size_t size, std::uint64_t numel, Sparse& to) {
    if (size < kSparseHead) throw std::invalid_argument("cut off in the head of its entries");
    std::uint32_t n;
    std::memcpy(&n, body, 4);
    if (n > numel) throw std::invalid_argument("more entries than the tensor has elements");
    if (body[4] >= kKinds) throw std::invalid_argument("unknown kind of values");
    const int r = body[5];
    if (r > kMaxRice) throw std::invalid_argument("Rice parameter out of range");
    const Values kind = to.kind = static_cast<Values>(body[4]);
    const std::uint8_t *in = body + kSparseHead, *end = body + size;
    if (static_cast<std::uint64_t>(size - kSparseHead) < 4u * has_scale(kind) + values_size(n, kind))
        throw std::invalid_argument("shorter than its values");
    to.scale = 0;
    if (has_scale(kind)) {
        std::memcpy(&to.scale, in, 4);
        if (!(magnitude(to.scale) < kInfinity)) throw std::invalid_argument("scale not finite");
        in += 4;
    }
    to.indices.resize(n);  // only now: n entries are really there
    to.values.resize(n);
    float* values = to.values.data();
    std::uint32_t* indices = to.indices.data();
    if (kind == Values::fp32) {
        if (n) std::memcpy(values, in, 4 * std::size_t{n});
    } else if (kind == Values::sign) {
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint32_t b = bits_of(to.scale) ^ static_cast<std::uint32_t>(in[i >> 3] >> (i & 7) & 1) << 31;
            std::memcpy(values + i, &b, 4);
        }
    } else if (kind == Values::power) {
        for (std::size_t i = 0; i < n; ++i) values[i] = power_value(in[i >> 1] >> 4 * (i & 1), to.scale);
    } else {
        for (std::size_t i = 0; i < n; ++i) {
            std::uint16_t h;
            std::memcpy(&h, in + 2 * i, 2);
            values[i] = kind == Values::fp16 ? from_half(h) : from_bfloat(h);
        }
    }
    in += values_size(n, kind);

    BitReader bits(in, end);
    std::uint64_t next = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint64_t index = next + bits.run(r, numel);
        if (index >= numel) throw std::invalid_argument("index outside the tensor");
        indices[i] = static_cast<std::uint32_t>(index);
        next = index + 1;
    }
    bits.finish();
}

}  // namespace hc
