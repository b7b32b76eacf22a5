// Randomness from counters: any place of any stream can be computed alone.
#pragma once

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
HC_INLINE float uniform(std::uint32_t bits) {  // in [0, 1), a multiple of 2^-24
    return static_cast<float>(static_cast<std::int32_t>(bits >> 8)) * (1.0f / 16777216.0f);
}

}  // namespace hc
