// Randomness from counters, and rounding at random.
//
// random_bits hashes a place and a key: any place of any stream can be computed alone, in any order
// and vector. Where several numbers share a draw, each multiplies the one before by a constant.
// Rounding turns a float into the integer below or above it, in fixed point: ⌊y + u⌋, one addition
// and one shift.
#pragma once

#include <cmath>
#include <stdexcept>

#include "common.hpp"

namespace hc {

struct Key {
    std::uint32_t low, high;
    explicit Key(std::uint64_t key)
        : low(static_cast<std::uint32_t>(key)), high(static_cast<std::uint32_t>(key >> 32)) {}
};

// 32 random bits of place i: two multiplications and the key at two places, so that streams of
// different keys have nothing in common and any place can be computed alone.
HC_INLINE std::uint32_t random_bits(std::uint32_t i, Key key) {
    // A compiler makes the product a running sum.
    std::uint32_t x = i * 0x9e3779b9u + key.low;
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= (x >> 13) ^ key.high;
    x *= 0xc2b2ae35u;
    return x ^ (x >> 16);
}
// Random bits times this are as good as others, and cheaper: where several numbers share a draw,
// each takes the product of the one before. Pairs of its powers below the 32nd lie in the plane
// more evenly than random points do (spectral test: 0.55 of the best).
constexpr std::uint32_t kNext = 0xfaf2bb1du;

// Rounding at random to one of the two integers around a number, in fixed point: an addition and a
// shift. What is finer than 2^-30 of the largest number is cut off.
struct Rounding {
    int fraction;  // bits
    float one, most;
    // most's bits, or those of what is clipped at.
    std::uint32_t limit;
    explicit Rounding(float largest) {
        if (!(largest >= 1 && largest < 536870912.0f))
            throw std::invalid_argument("1 to 2^29 steps");
        fraction = 29 - std::ilogb(largest);
        one = std::ldexp(1.0f, fraction);
        most = largest * one;
        limit = bits_of(most);
    }
    // What makes numbers up to w, 2^-90 at least, steps in units of 1/one, of which w itself has no
    // more than `largest`.
    float factor_for(float w) const {
        const float factor = most / w;
        return w * factor > most ? float_of(bits_of(factor) - 1) : factor;
    }
    // The largest code that a y can become.
    std::int32_t largest_of(float y) const {
        return (static_cast<std::int32_t>(y) + (1 << fraction) - 1) >> fraction;
    }
    // y is in units of 1/one, at most `most` in magnitude.
    HC_INLINE std::int32_t within(float y, std::uint32_t bits) const {
        return (static_cast<std::int32_t>(y) +
                static_cast<std::int32_t>(bits >> (32 - fraction))) >>
               fraction;
    }
    // The same of any y. Its limits are compared as integers, which takes compilers half as many
    // instructions.
    HC_INLINE std::int32_t operator()(float y, std::uint32_t bits) const {
        const std::uint32_t b = bits_of(y), a = b & 0x7fffffffu;
        return within(float_of((b & 0x80000000u) | (a < limit ? a : limit)), bits);
    }
};

}  // namespace hc
