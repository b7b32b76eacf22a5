// The values of sparse bodies (docs/wire-format.md): 32, 16, 4, 2 bits or 1, how a float is rounded
// to 16 bits, and what values become in the kinds that have scales.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common.hpp"

namespace hc {

// How values are coded. sign: 1 bit, ±scale. power: a sign and 3 bits, ±scale/2^d; scale is a power
// of two. two_bits: one of four scales.
enum class Values : std::uint8_t {
    fp32 = 0,
    fp16 = 1,
    bf16 = 2,
    sign = 3,
    power = 4,
    two_bits = 5
};
constexpr int kKinds = 6, kMostScales = 4;
constexpr const char* kKindNames[kKinds] = {"fp32", "fp16", "bf16", "sign", "power", "2bit"};

inline Values values_of(const std::string& name) {
    for (int i = 0; i < kKinds; ++i)
        if (name == kKindNames[i]) return static_cast<Values>(i);
    throw std::invalid_argument("values must be fp32, fp16, bf16, sign, power or 2bit, not " +
                                name);
}
inline std::size_t scales_of(Values kind) {
    return kind == Values::two_bits ? kMostScales : kind >= Values::sign;
}
inline std::uint64_t bits_of_value(Values kind) {
    constexpr int bits[kKinds] = {32, 16, 16, 1, 4, 2};
    return bits[static_cast<int>(kind)];
}
inline std::uint64_t values_size(std::uint64_t n, Values kind) {
    return (n * bits_of_value(kind) + 7) / 8;
}

// float32 to the nearest 16-bit value, ties to even; what is too large becomes the largest finite
// value, not infinity, because the rounding error stays in the residual and will be sent later.
inline std::uint16_t to_half(float x) {
    std::uint32_t b;
    std::memcpy(&b, &x, 4);
    const std::uint16_t sign = static_cast<std::uint16_t>((b >> 16) & 0x8000u);
    b &= 0x7fffffffu;
    if (b >= 0x477fe000u) return sign | 0x7bffu;  // from 65504 on
    if (b >= 0x38800000u)
        return sign |
               static_cast<std::uint16_t>((b - 0x38000000u + 0xfffu + ((b >> 13) & 1u)) >> 13);
    // Subnormal half: a multiple of 2^-24.
    float magnitude;
    std::memcpy(&magnitude, &b, 4);
    return sign | static_cast<std::uint16_t>(std::nearbyintf(magnitude * 16777216.0f));
}
inline float from_half(std::uint16_t h) {
    const std::uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u,
                        mantissa = h & 0x3ffu;
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * (1.0f / 16777216.0f);
        return sign ? -magnitude : magnitude;
    }
    const std::uint32_t b =
        sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
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
    return kind == Values::fp32   ? x
           : kind == Values::fp16 ? from_half(to_half(x))
                                  : from_bfloat(to_bfloat(x));
}

// Numbers are sent as powers of two within 2^7 of the largest's. Adding half a mantissa carries
// into the exponent from 1.5 on.
constexpr std::uint32_t kHalfPower = 0x400000u, kPowers = 7;
// Of numbers of which one is `largest`, as bits, those have a power that are this at least once
// half a mantissa is added.
HC_INLINE std::uint32_t least_power(std::uint32_t largest) {
    const std::uint32_t top = largest >> 23;
    return (top > kPowers ? top - kPowers : 1) << 23;
}
// Numbers as powers of two, into `sent`; 0 for what has none. Returns the largest power, 0 where
// there is none: no numbers, or denormal ones only, which no power can stand for.
HC_INLINE std::uint32_t powers_of(const float* __restrict values, std::size_t count,
                                  float* __restrict sent) {
    const std::uint32_t peak = peak_of(values, count), top = peak >> 23, least = least_power(peak);
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t b = bits_of(values[i]), rounded = (b & 0x7fffffffu) + kHalfPower,
                            exponent = rounded >> 23;
        const std::uint32_t power =
            rounded >= least ? (b & 0x80000000u) | (exponent < top ? exponent : top) << 23 : 0;
        std::memcpy(sent + i, &power, 4);
    }
    return top << 23;
}
// Numbers as ± their mean magnitude, which is returned. Here and below sums are float64, in order:
// the reference has the same bits.
HC_INLINE float signs_of(const float* __restrict values, std::size_t count,
                         float* __restrict sent) {
    double sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += std::fabs(values[i]);
    const auto scale = static_cast<float>(sum / static_cast<double>(count ? count : 1));
    for (std::size_t i = 0; i < count; ++i) sent[i] = std::copysign(scale, values[i]);
    return scale;
}
// Numbers as the means of four bins of 1.5 standard deviations, the third around the mean of all,
// the outer ones open.
HC_INLINE void means_of_bins(const float* __restrict values, std::size_t count,
                             float* __restrict sent, float* __restrict means) {
    double sum = 0, squares = 0, sums[kMostScales] = {};
    for (std::size_t i = 0; i < count; ++i) sum += values[i];
    const double mean = sum / static_cast<double>(count ? count : 1);
    for (std::size_t i = 0; i < count; ++i) squares += (values[i] - mean) * (values[i] - mean);
    const double width = 1.5 * std::sqrt(squares / static_cast<double>(count > 1 ? count - 1 : 1));
    std::size_t counts[kMostScales] = {};
    const auto bin_of = [=](float value) HC_HOT {
        const double place = width > 0 ? std::nearbyint((value - mean) / width + 2) : 2;
        return static_cast<int>(place < 0 ? 0 : place > 3 ? 3 : place);
    };
    for (std::size_t i = 0; i < count; ++i) {
        const int bin = bin_of(values[i]);
        sums[bin] += values[i];
        ++counts[bin];
    }
    for (int bin = 0; bin < kMostScales; ++bin)
        means[bin] =
            static_cast<float>(sums[bin] / static_cast<double>(counts[bin] ? counts[bin] : 1));
    for (std::size_t i = 0; i < count; ++i) sent[i] = means[bin_of(values[i])];
}
// What values become, and the scales of their kind.
HC_INLINE void code_values(const float* values, std::size_t count, Values kind, float* sent,
                           float* scales) {
    if (scales_of(kind) == 0)
        for (std::size_t i = 0; i < count; ++i) sent[i] = rounded(values[i], kind);
    else if (kind == Values::sign) scales[0] = signs_of(values, count, sent);
    else if (kind == Values::power) scales[0] = float_of(powers_of(values, count, sent));
    else means_of_bins(values, count, sent, scales);
}

}  // namespace hc
