// Accumulation and selection: Deep Gradient Compression's one pass over gradient, momentum u and
// velocity v, which also collects the largest |v|.
//
// 1. sampled_floor advances copies of some chunks of 64 elements and takes a magnitude from them
// that somewhat more than k are above.
// 2. The pass advances one chunk after the other: u and v are updated, the gradient is set to zero,
// the largest new magnitude is kept.
//    After 32 chunks, those whose maximum reaches the floor are searched, in the cache; what
//    reaches it becomes a candidate.
// 3. When the buffer of candidates is full it is trimmed to the k largest, which raises the floor.
// 4. If fewer than k have passed, v is read again from lower floors, until k have. A last trim
// leaves the k largest, of equal ones the first.
//
// add_by_chunks_pass chooses the same of each chunk of the tensor that a user has asked for. Its
// floor comes from the chunk before, and is lowered, while the chunk is in the cache, until k have
// passed.
//
// Magnitudes are compared as integers: for finite floats the bits without the sign order as the
// absolute values do, one unsigned maximum then answers both "is anything here above the floor" and
// "is anything here not finite".
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common.hpp"

namespace hc::selection {

using tuning::kChunk;

constexpr std::size_t kLine = 16;  // floats in a cache line
constexpr std::size_t kBlock = tuning::kChunksOfBlock * kChunk;

enum class Momentum { none, vanilla, nesterov };

// The operands of one tensor's update; u is null where there is no momentum, base where the
// gradient is g itself and not g - base.
struct Update {
    float* g;
    const float* base;
    float* u;
    float* v;
    float momentum;
    float scale;  // of g: local gradient clipping
};

// The new u and v of one element, Deep Gradient Compression (arXiv 1712.01887) section 3.2.
template <Momentum M>
HC_INLINE void advance(float g, float momentum, float& u, float& v) {
    if (M == Momentum::none) {
        v = v + g;
    } else if (M == Momentum::vanilla) {
        u = momentum * u + g;
        v = v + u;
    } else {
        u = momentum * (u + g);
        v = v + (u + g);
    }
}

struct Candidate {
    std::uint32_t bits;
    std::uint32_t index;
};

// The k largest magnitudes of a stream, in the order of arrival. `floor` is the smallest magnitude
// that is still wanted; it rises each time the buffer fills. A magnitude equal to the k-th,
// arriving after k are there, is not taken.
class TopK {
  public:
    TopK(std::vector<Candidate>& buffer, std::vector<std::uint32_t>& scratch)
        : buffer_(buffer), scratch_(scratch) {}

    // `stream` values will come, at most `batch` of them in one search.
    void start(std::size_t k, std::uint32_t floor, std::size_t stream, std::size_t batch) {
        k_ = k;
        count_ = 0;
        floor_ = k == 0 ? kNothing : std::max(floor, 1u);
        capacity_ = std::min(tuning::kTrimAt * k + kChunk, stream) + std::min(batch, stream);
        if (buffer_.size() < capacity_) buffer_.resize(capacity_);
    }
    std::uint32_t floor() const { return floor_; }
    std::size_t count() const { return count_; }
    const Candidate& operator[](std::size_t i) const { return buffer_[i]; }

    // Searches the chunks of one block of `n` values, the first of which has index `first` in its
    // tensor; `hits` are the chunks' offsets. Nothing here branches on data: a mispredicted branch
    // costs more than a line's search.
    HC_INLINE void search(const float* values, std::size_t n, const std::uint32_t* hits,
                          std::size_t count, std::size_t first) {
        std::uint32_t lines[kBlock / kLine];
        std::size_t found = 0;
        const std::uint32_t floor = floor_;
        for (std::size_t h = 0; h < count; ++h) {
            if (hits[h] + kChunk > n) {  // the ragged end of a tensor
                for (std::size_t at = hits[h]; at < n; at += kLine)
                    lines[found++] = static_cast<std::uint32_t>(at);
                continue;
            }
            for (std::size_t at = hits[h]; at < hits[h] + kChunk; at += kLine) {
                lines[found] = static_cast<std::uint32_t>(at);
                found += peak_of(values + at, kLine) >= floor;
            }
        }
        if (count_ + std::min(n, found * kLine) > capacity_) trim();
        Candidate* out = buffer_.data() + count_;
        for (std::size_t l = 0; l < found; ++l) {
            const std::size_t end = std::min(n, lines[l] + kLine);
            for (std::size_t j = lines[l]; j < end; ++j) {
                const std::uint32_t b = magnitude(values[j]);
                *out = {b, static_cast<std::uint32_t>(first + j)};
                out += b >= floor;
            }
        }
        count_ = static_cast<std::size_t>(out - buffer_.data());
    }

    void trim() {
        if (count_ <= k_) return;
        scratch_.resize(count_);
        for (std::size_t i = 0; i < count_; ++i) scratch_[i] = buffer_[i].bits;
        std::nth_element(scratch_.begin(), scratch_.begin() + (k_ - 1), scratch_.end(),
                         std::greater<std::uint32_t>());
        const std::uint32_t kth = scratch_[k_ - 1];
        std::size_t ties = k_;
        for (std::size_t i = 0; i < k_; ++i) ties -= scratch_[i] > kth;
        std::size_t kept = 0;
        for (std::size_t i = 0; i < count_; ++i) {
            const std::uint32_t b = buffer_[i].bits;
            const bool tie = b == kth && ties > 0;
            if (b > kth || tie) buffer_[kept++] = buffer_[i];
            ties -= tie;
        }
        count_ = kept;
        floor_ = kth + 1;
    }

  private:
    // A floor above every magnitude, those of infinities and NaN too.
    static constexpr std::uint32_t kNothing = 0x80000000;

    std::vector<Candidate>& buffer_;
    std::vector<std::uint32_t>& scratch_;
    std::size_t k_ = 0, count_ = 0, capacity_ = 0;
    std::uint32_t floor_ = 1;
};

// Advances `count` elements in place and returns the largest new magnitude. An element whose new v
// would be too large or not finite keeps its old v, and the return value then is at least
// kTooLarge. It keeps its u too, unless that itself would soon be too large again. The gradient's
// memory is left zero, or what its base is, while it is in the cache: the decoded sum will be added
// there.
template <Momentum M, bool kBase>
HC_INLINE std::uint32_t advance_elements(const Update& t, std::size_t begin, std::size_t count) {
    float* __restrict g = t.g + begin, * __restrict v = t.v + begin, * __restrict u = M == Momentum::none ? nullptr : t.u + begin;
    const float* __restrict base = kBase ? t.base + begin : nullptr;
    const float momentum = t.momentum, scale = t.scale;
    std::uint32_t peak = 0;
    for (std::size_t j = 0; j < count; ++j) {
        const float old_u = M == Momentum::none ? 0 : u[j], old_v = v[j];
        float new_u = old_u, new_v = old_v;
        advance<M>(scale * (kBase ? g[j] - base[j] : g[j]), momentum, new_u, new_v);
        const std::uint32_t b = magnitude(new_v);
        peak = peak > b ? peak : b;
        if (M != Momentum::none) u[j] = b < kTooLarge ? new_u : b < kInfinity ? 0 : old_u;
        v[j] = b < kTooLarge ? new_v : old_v;
        g[j] = kBase ? base[j] : 0;
    }
    return peak;
}
template <Momentum M>
HC_INLINE std::uint32_t advance_chunk(const Update& t, std::size_t begin, std::size_t count) {
    return t.base ? advance_elements<M, true>(t, begin, count)
                  : advance_elements<M, false>(t, begin, count);
}

// Goes through n values in blocks: `peak(begin, count)` makes and returns the largest magnitude of
// a chunk, then the chunks at or above the floor are searched, while the block is in the cache.
template <class Peak>
HC_INLINE void pass(const float* values, std::size_t n, TopK& top, Peak peak) {
    for (std::size_t block = 0; block < n; block += kBlock) {
        const std::size_t end = std::min(n, block + kBlock);
        std::uint32_t hits[kBlock / kChunk + 1];
        std::size_t count = 0, i = block;
        const std::uint32_t floor = top.floor();
        for (; i + kChunk <= end; i += kChunk) {
            hits[count] = static_cast<std::uint32_t>(i - block);
            count += peak(i, kChunk) >= floor;
        }
        if (i < end) {
            hits[count] = static_cast<std::uint32_t>(i - block);
            count += peak(i, end - i) >= floor;
        }
        if (count) top.search(values + block, end - block, hits, count, block);
    }
}

// The floor to start with: from a sample, of what v is about to become, of whole chunks evenly
// spaced from `offset` on. The rank in the sample is the wanted one plus two standard deviations,
// so too few candidates are rare.
template <Momentum M>
HC_INLINE std::uint32_t sampled_floor(const Update& t, std::size_t n, std::size_t k,
                                      std::size_t samples, std::size_t offset, TopK& top) {
    const std::size_t chunks = n / kChunk,
                      wanted = std::min(chunks, (samples + kChunk - 1) / kChunk);
    if (wanted == 0) return 1;
    const double expected =
        static_cast<double>(k) * static_cast<double>(wanted * kChunk) / static_cast<double>(n);
    const std::size_t rank =
        static_cast<std::size_t>(expected + tuning::kSampleMargin * std::sqrt(expected) + 2);
    if (rank >= wanted * kChunk) return 1;
    const std::size_t stride = chunks / wanted, shift = offset % stride;
    top.start(rank, 1, wanted * kChunk, kChunk);
    for (std::size_t s = 0; s < wanted; ++s) {
        const std::size_t begin = (s * stride + shift) * kChunk,
                          next = std::min(begin + stride * kChunk, n - kChunk);
        // Scattered reads: fetch early what comes next.
        for (std::size_t line = next; line < next + kChunk; line += kLine) {
            HC_PREFETCH(t.g + line);
            if (t.base) HC_PREFETCH(t.base + line);
            HC_PREFETCH(t.v + line);
            if (M != Momentum::none) HC_PREFETCH(t.u + line);
        }
        float values[kChunk];
        for (std::size_t j = 0; j < kChunk; ++j) {
            float u = M == Momentum::none ? 0 : t.u[begin + j], v = t.v[begin + j];
            const float g = t.base ? t.g[begin + j] - t.base[begin + j] : t.g[begin + j];
            advance<M>(t.scale * g, t.momentum, u, v);
            values[j] = magnitude(v) < kTooLarge ? v : 0;
        }
        const std::uint32_t here = 0;
        if (peak_of(values, kChunk) >= top.floor()) top.search(values, kChunk, &here, 1, 0);
    }
    if (top.count() < rank) return 1;
    top.trim();
    return top.floor() - (top.floor() > 1);
}

// The whole of it: floor, pass, and where the sample misled, so that fewer than k passed, further
// looks at v. Returns whether every new v was finite.
template <Momentum M>
HC_INLINE bool add_to_residual_pass(const Update& t, std::size_t n, std::size_t k,
                                    std::size_t samples, std::size_t offset, TopK& top) {
    std::uint32_t floor = k == 0 ? 1 : sampled_floor<M>(t, n, k, samples, offset, top);
    std::uint32_t worst = 0;
    top.start(k, floor, n, kBlock);
    pass(t.v, n, top, [&](std::size_t i, std::size_t count) {
        const std::uint32_t peak = advance_chunk<M>(t, i, count);
        worst = worst > peak ? worst : peak;
        return peak;
    });
    // Mostly a few are missing, just below.
    for (std::uint32_t drop = tuning::kFloorMargin; top.count() < k && floor > 1; drop *= 4) {
        floor = floor > drop ? floor - drop : 1;
        top.start(k, floor, n, kBlock);
        pass(t.v, n, top,
             [&](std::size_t i, std::size_t count) { return peak_of(t.v + i, count); });
    }
    top.trim();
    return worst < kTooLarge;
}

// Leaves in `top` the largest of a chunk, after `peak` was called for all of it, as by pass.
// Returns the floor for the chunk after it.
template <class Peak>
HC_INLINE std::uint32_t largest_of_chunk(const float* values, std::size_t count, std::size_t wanted,
                                         std::uint32_t floor, TopK& top, Peak peak) {
    top.start(wanted, floor, count, kBlock);
    pass(values, count, top, peak);
    while (top.count() < wanted && floor > 1) {
        floor = floor > tuning::kFloorDrop ? floor - tuning::kFloorDrop : 1;
        top.start(wanted, floor, count, kBlock);
        pass(values, count, top,
             [&](std::size_t i, std::size_t some) { return peak_of(values + i, some); });
    }
    top.trim();
    if (top.count() == 0) return floor;
    std::uint32_t least = kInfinity;
    for (std::size_t i = 0; i < top.count(); ++i) least = std::min(least, top[i].bits);
    return least > tuning::kFloorMargin ? least - tuning::kFloorMargin : 1;
}

// The k largest of each chunk of `length` elements, into `chosen`, ascending. Returns whether every
// new v was finite.
template <Momentum M>
HC_INLINE bool add_by_chunks_pass(const Update& t, std::size_t n, std::size_t k, std::size_t length,
                                  TopK& top, std::vector<std::uint32_t>& chosen) {
    std::uint32_t worst = 0, floor = 1;
    chosen.clear();
    for (std::size_t begin = 0; begin < n; begin += length) {
        const std::size_t count = std::min(length, n - begin), wanted = std::min(k, count);
        floor = largest_of_chunk(
            t.v + begin, count, wanted, floor, top, [&](std::size_t i, std::size_t some) {
                const std::uint32_t peak = advance_chunk<M>(t, begin + i, some);
                worst = worst > peak ? worst : peak;
                return peak;
            });
        for (std::size_t i = 0; i < top.count(); ++i)
            chosen.push_back(static_cast<std::uint32_t>(begin) + top[i].index);
    }
    return worst < kTooLarge;
}

}  // namespace hc::selection
