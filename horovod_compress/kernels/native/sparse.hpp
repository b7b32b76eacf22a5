// The values of sparse bodies (docs/wire-format.md): 32, 16, 4 bits or 1, and how a float is rounded to 16 bits.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

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
    if (b >= 0x477fe000u) return sign | 0x7bffu;  // from 65504 on
    if (b >= 0x38800000u) return sign | static_cast<std::uint16_t>((b - 0x38000000u + 0xfffu + ((b >> 13) & 1u)) >> 13);
    float magnitude;  // subnormal half: a multiple of 2^-24
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

}  // namespace hc
