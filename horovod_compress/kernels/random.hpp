// Randomness from counters: any place of any stream can be computed alone.
#pragma once

#include <cmath>
#include <stdexcept>

#include "common.hpp"

namespace hc {

struct Key {
    std::uint32_t low, high;
    explicit Key(std::uint64_t key) : low(static_cast<std::uint32_t>(key)), high(static_cast<std::uint32_t>(key >> 32)) {}
};

// 32 random bits of place i: two multiplications and the key at two places, so that streams of different keys have nothing in
// common and any place can be computed alone.
HC_INLINE std::uint32_t random_bits(std::uint32_t i, Key key) {
    std::uint32_t x = i * 0x9e3779b9u + key.low;  // a compiler makes the product a running sum
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= (x >> 13) ^ key.high;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 16);
}
constexpr std::uint32_t kSecond = 0x2c1b3c6du;  // random bits times this are nearly as good as others, and cheaper

// Rounding at random to one of the two integers around a number, in fixed point: an addition and a shift. What is finer than 2^-30 of
// the largest number is cut off.
struct Rounding {
    int fraction;  // bits
    float one, most;
    explicit Rounding(float largest) {
        if (!(largest >= 1 && largest < 536870912.0f)) throw std::invalid_argument("1 to 2^29 steps");
        fraction = 29 - std::ilogb(largest);
        one = std::ldexp(1.0f, fraction);
        most = largest * one;
    }
    // y is in units of 1/one.
    HC_INLINE std::int32_t operator()(float y, std::uint32_t bits) const {
        y = y < most ? y : most;
        y = y > -most ? y : -most;
        return (static_cast<std::int32_t>(y) + static_cast<std::int32_t>(bits >> (32 - fraction))) >> fraction;
    }
};

}  // namespace hc
