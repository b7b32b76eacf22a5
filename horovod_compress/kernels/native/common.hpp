// What all kernels share: variants for CPUs, floats as bits, prefetching, and sums and maxima of
// vectors.
//
// dispatch<pass> compiles a pass once for each set of instructions and calls the one in force.
// Vectors are 16 floats wide for all of them: so sums are added up in one order, and all give the
// same bits. Magnitudes are compared as integers: the bits of a float without the sign order as
// absolute values do, and infinity and NaN are the largest.
//
// Output writes decoded gradients in plain order, large ones past the caches, through a ring of a
// few stretches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tuning.hpp"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

// Before a loop whose arrays do not overlap, where a lambda hides from the compiler that they are
// __restrict.
#if defined(__clang__)
#define HC_APART _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define HC_APART _Pragma("GCC ivdep")
#else
#define HC_APART
#endif
// The elements of two WordLanes, one after the other, that have these numbers.
#if defined(__clang__)
#define HC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define HC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, WordLanes{__VA_ARGS__})
#endif
#if defined(__GNUC__)
#define HC_INLINE inline __attribute__((always_inline))
// Behind a lambda's parameters: outside a variant it would be compiled for any CPU.
#define HC_HOT __attribute__((always_inline))
#define HC_PREFETCH(address) __builtin_prefetch(address)
// To the second-level cache: more of these can be under way.
#define HC_FETCH(address) __builtin_prefetch(address, 0, 2)
#define HC_UNROLL _Pragma("GCC unroll 32")
#else
#define HC_HOT
#define HC_INLINE inline
#define HC_PREFETCH(address)
#define HC_FETCH(address)
#define HC_UNROLL
#endif
// HC_STREAM writes four numbers to memory past the caches; other threads may read them after
// HC_FENCE only.
#if defined(__SSE__)
#define HC_STREAM(to, from) _mm_stream_ps(to, _mm_load_ps(from))
#define HC_FENCE() _mm_sfence()
#else
#define HC_STREAM(to, from) std::memcpy(to, from, 16)
#define HC_FENCE()
#endif

namespace hc {

// Bits of +inf: anything from here on is not finite.
constexpr std::uint32_t kInfinity = 0x7f800000;
// Bits of 2^110: no residual goes there, or the sum of many would be infinite for ever.
constexpr std::uint32_t kTooLarge = 0x76800000;

// The instructions that a kernel is compiled for: on x86-64 also AVX2 and AVX-512. Other CPUs, and
// sanitizer builds, have the baseline only.
enum class Instructions { baseline, avx2, avx512 };

// dispatch<kernel>(arguments …) calls the variant of a kernel for `instructions`. A kernel is
// HC_INLINE, and so is what it calls in its loops: what is not inlined into a variant is compiled
// for any CPU.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(HC_PORTABLE)
inline Instructions best_instructions() {
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
          __builtin_cpu_supports("bmi2")))
        return Instructions::baseline;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
    return wide ? Instructions::avx512 : Instructions::avx2;
}
inline Instructions instructions = best_instructions();

template <auto kernel>
struct Variants;
template <class Result, class... Arguments, Result (*kernel)(Arguments...)>
struct Variants<kernel> {
    static Result baseline(Arguments... arguments) { return kernel(arguments...); }
    __attribute__((target("avx2,bmi,bmi2"))) static Result avx2(Arguments... arguments) {
        return kernel(arguments...);
    }
    __attribute__((
        target("avx2,bmi,bmi2,avx512f,avx512bw,avx512cd,avx512dq,avx512vl"))) static Result
    avx512(Arguments... arguments) {
        return kernel(arguments...);
    }
    static Result best(Arguments... arguments) {
        if (instructions == Instructions::avx512) return avx512(arguments...);
        if (instructions == Instructions::avx2) return avx2(arguments...);
        return baseline(arguments...);
    }
};
template <auto kernel>
constexpr auto dispatch = Variants<kernel>::best;
#else
inline Instructions best_instructions() { return Instructions::baseline; }
inline Instructions instructions = best_instructions();

template <auto kernel>
constexpr auto dispatch = kernel;
#endif

HC_INLINE std::uint32_t bits_of(float x) {
    std::uint32_t b;
    std::memcpy(&b, &x, sizeof b);
    return b;
}
HC_INLINE float float_of(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
// A pass in plain order that does more than add up, or that writes without reading, fetches memory
// ahead: what comes some time after x[0] … x[count-1]. Processors' own guesses end at pages; and
// some are twice as slow to write lines that nobody has read.
template <class T>
constexpr std::size_t kLead = tuning::kPrefetchBytes / sizeof(T);
template <class T>
HC_INLINE void prefetch_ahead(const T* x, std::size_t count) {
    for (std::size_t i = 0; i < count; i += 64 / sizeof(T)) HC_FETCH(x + kLead<T> + i);
}
// work(first, count) for all of n elements, by as many as compilers know.
using tuning::kStretch;
template <class Work>
HC_INLINE void by_stretches(std::size_t n, Work work) {
    std::size_t i = 0;
    for (; i + kStretch <= n; i += kStretch) work(i, kStretch);
    work(i, n - i);
}
// Takes n numbers, in plain order, to memory from `to` on: append(count, value) the next `count`,
// value(j) each. Arrays larger than a processor's own caches go past them: they would leave them
// before anybody reads them, and a line that is written as a whole need not be read first. A
// stretch waits until two more are there: what was just written in vectors is slow to read in
// smaller ones.
class Output {
  public:
    Output(float* to, std::size_t n) : to_(to), past_caches_(n >= tuning::kPastCaches) {}
    Output(const Output&) = delete;
    HC_INLINE ~Output() {
        stream_until(appended_);
        if (past_caches_) HC_FENCE();
    }
    template <class Value>
    HC_INLINE void append(std::size_t count, Value value) {
        if (past_caches_ && count == kStretch && reinterpret_cast<std::uintptr_t>(to_) % 16 == 0) {
            float* to = waiting_[appended_ % kWaiting];
            HC_APART
            for (std::size_t j = 0; j < kStretch; ++j) to[j] = value(j);
            if (++appended_ >= kWaiting) stream_until(appended_ - kWaiting + 1);
        } else {
            stream_until(appended_);
            prefetch_ahead(to_, count);
            HC_APART
            for (std::size_t j = 0; j < count; ++j) to_[j] = value(j);
            to_ += count;
        }
    }

  private:
    HC_INLINE void stream_until(std::size_t end) {
        for (; streamed_ < end; ++streamed_, to_ += kStretch) {
            const float* from = waiting_[streamed_ % kWaiting];
            for (std::size_t j = 0; j < kStretch; j += 4) HC_STREAM(to_ + j, from + j);
        }
    }

    static constexpr std::size_t kWaiting = tuning::kWaitingStretches;
    float* to_;
    const bool past_caches_;
    std::size_t appended_ = 0, streamed_ = 0;  // stretches
    alignas(64) float waiting_[kWaiting][kStretch];
};
HC_INLINE std::uint32_t magnitude(float x) { return bits_of(x) & 0x7fffffffu; }
HC_INLINE std::uint32_t peak_of(const float* x, std::size_t n) {
    std::uint32_t peak = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t b = magnitude(x[i]);
        peak = peak > b ? peak : b;
    }
    return peak;
}
// The exponent of a magnitude's bits, but -120 to 120: 2 to it, and to its negative, are normal
// numbers.
HC_INLINE int exponent_of(std::uint32_t bits) {
    const int exponent = static_cast<int>(bits >> 23) - 127;
    return exponent < -120 ? -120 : exponent > 120 ? 120 : exponent;
}
HC_INLINE float power_of_two(int exponent) {
    return float_of(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// 16 numbers that are worked on together: compilers split them up for narrower CPUs. A loop over as
// many separate sums would be left as it is by some.
constexpr std::size_t kLanes = 16;
using Lanes = float __attribute__((vector_size(4 * kLanes)));
using WordLanes = std::uint32_t __attribute__((vector_size(4 * kLanes)));

HC_INLINE std::uint32_t largest_of(const WordLanes& lanes) {
    using Half = std::uint32_t __attribute__((vector_size(2 * kLanes)));
    using Quarter = std::uint32_t __attribute__((vector_size(kLanes)));
    Half halves[2];
    std::memcpy(halves, &lanes, sizeof halves);
    halves[0] = halves[0] > halves[1] ? halves[0] : halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, halves, sizeof quarters);
    const Quarter four = quarters[0] > quarters[1] ? quarters[0] : quarters[1];
    const std::uint32_t one = four[0] > four[2] ? four[0] : four[2],
                        other = four[1] > four[3] ? four[1] : four[3];
    return one > other ? one : other;
}
// Leaves in rows[0] the largest of each of kLanes rows: half as many rows of twice as many halves,
// until there is one.
HC_INLINE void fold_rows(WordLanes* rows) {
    const auto fold = [rows](std::size_t count, auto halves) HC_HOT {
        for (std::size_t row = 0; row < count; ++row) {
            WordLanes low, high;
            halves(rows[2 * row], rows[2 * row + 1], low, high);
            rows[row] = low > high ? low : high;
        }
    };
    fold(8, [](const WordLanes& a, const WordLanes& b, WordLanes& low, WordLanes& high) HC_HOT {
        low = HC_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        high = HC_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    });
    fold(4, [](const WordLanes& a, const WordLanes& b, WordLanes& low, WordLanes& high) HC_HOT {
        low = HC_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        high = HC_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    });
    fold(2, [](const WordLanes& a, const WordLanes& b, WordLanes& low, WordLanes& high) HC_HOT {
        low = HC_SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
        high = HC_SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    });
    fold(1, [](const WordLanes& a, const WordLanes& b, WordLanes& low, WordLanes& high) HC_HOT {
        low = HC_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        high = HC_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    });
}
HC_INLINE double total(const Lanes& lanes) {
    using Half = float __attribute__((vector_size(2 * kLanes)));
    using Wide = double __attribute__((vector_size(4 * kLanes)));
    Half halves[2];
    std::memcpy(halves, &lanes, sizeof halves);
    const Wide sums =
        __builtin_convertvector(halves[0], Wide) + __builtin_convertvector(halves[1], Wide);
    return ((sums[0] + sums[4]) + (sums[1] + sums[5])) +
           ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

// Of n elements Σ y and Σ y², y = x·down, and the largest magnitude of x. Several sums at once,
// because an addition waits for the one before.
struct Sums {
    double one, two;
    std::uint32_t peak;
};
HC_INLINE Sums scaled_sums(const float* x, std::size_t n, float down) {
    constexpr std::size_t chains = 4;
    Lanes sums[chains] = {}, squares[chains] = {};
    WordLanes peaks[chains] = {};
    std::size_t i = 0;
    for (; i + chains * kLanes <= n; i += chains * kLanes)
        for (std::size_t chain = 0; chain < chains; ++chain) {
            Lanes y;
            WordLanes b;
            std::memcpy(&y, x + i + chain * kLanes, sizeof y);
            std::memcpy(&b, &y, sizeof b);
            b &= 0x7fffffffu;
            peaks[chain] = peaks[chain] > b ? peaks[chain] : b;
            y *= down;
            sums[chain] += y;
            squares[chain] += y * y;
        }
    const std::uint32_t rest = peak_of(x + i, n - i);
    for (; i < n; ++i) {
        const float y = x[i] * down;
        sums[0][0] += y;
        squares[0][0] += y * y;
    }
    std::uint32_t peak = rest;
    for (const WordLanes& each : peaks) peak = peak > largest_of(each) ? peak : largest_of(each);
    return {total((sums[0] + sums[1]) + (sums[2] + sums[3])),
            total((squares[0] + squares[1]) + (squares[2] + squares[3])), peak};
}

}  // namespace hc
