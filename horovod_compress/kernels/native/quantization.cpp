// Randomness from counters, and integer codes that many ranks can add up in one word.
//
// quantize reads x once, scales each element to fixed point, adds random bits below the point,
// shifts, and packs the integers into words (fields.hpp). dequantize reads the sums of words and
// writes the output once, past the caches where it is large. With several scales both also read the
// words of counts, which encode_scales makes: it compares each magnitude with the largest that fits
// a scale, and skips a stretch of 64 elements whose peak already fits. encode_signs and
// decode_signs are the same for the signs alone.
//
// draw_coordinates computes places of a permutation one by one, each from its number: it needs no
// memory but the result's.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "fields.hpp"
#include "lists.hpp"
#include "random.hpp"

namespace hc::quantization {
namespace {

HC_INLINE void fill_random(std::uint32_t* out, std::size_t n, Key key) {
    for (std::size_t i = 0; i < n; ++i) out[i] = random_bits(static_cast<std::uint32_t>(i), key);
}

Indices random(std::uint64_t key, std::size_t n) {
    Indices bits(static_cast<py::ssize_t>(n));
    dispatch<fill_random>(bits.mutable_data(), n, Key(key));
    return bits;
}

// A permutation of 0 … n-1 that needs no memory: a keyed mixing of the next power of two, repeated
// until it falls inside n.
class Permutation {
  public:
    Permutation(std::uint64_t n, std::uint64_t key) : n_(n) {
        int bits = 0;
        while (n > (1ull << bits)) ++bits;
        mask_ = static_cast<std::uint32_t>((1ull << bits) - 1);
        shift_ = (bits + 1) / 2;
        for (std::uint32_t round = 0; round < kRounds; ++round) {
            times_[round] = random_bits(2 * round, Key(key)) | 1u;
            plus_[round] = random_bits(2 * round + 1, Key(key));
        }
    }
    std::uint32_t operator()(std::uint32_t x) const {
        if (mask_ == 0) return 0;
        do {
            for (int round = 0; round < kRounds; ++round) {
                x = (x * times_[round] + plus_[round]) & mask_;
                x ^= x >> shift_;
            }
        } while (x >= n_);
        return x;
    }

  private:
    static constexpr int kRounds = 4;
    std::uint64_t n_;
    std::uint32_t mask_;
    int shift_;
    std::array<std::uint32_t, kRounds> times_, plus_;
};

Indices draw_coordinates(std::uint64_t key, std::uint64_t numel, std::uint64_t first,
                         std::uint64_t count) {
    if (numel > 0xffffffffu) throw std::invalid_argument("a tensor has at most 2^32 - 1 elements");
    if (count > numel || first > numel - count)
        throw std::invalid_argument("more coordinates than elements");
    Indices indices(static_cast<py::ssize_t>(count));
    std::uint32_t* out = indices.mutable_data();
    py::gil_scoped_release release;
    const Permutation permutation(numel, key);
    for (std::uint64_t i = 0; i < count; ++i)
        out[i] = permutation(static_cast<std::uint32_t>(first + i));
    return indices;
}

// An array of words as Python sees it, int32 or int64 by the layout, in an earlier step's memory
// where that is given and fits; and a way to work on it as such.
py::array new_words(const Layout& layout, const std::optional<py::array>& spare,
                    std::size_t count) {
    if (spare && spare->size() == static_cast<py::ssize_t>(count) &&
        spare->itemsize() == (layout.wide ? 8 : 4))
        return *spare;
    return layout.wide ? py::array(aligned<std::int64_t>(count))
                       : py::array(aligned<std::int32_t>(count));
}
template <class Work>
void on_words(py::array& words, const Layout& layout, std::size_t count, Work work) {
    same_length(count, length(words, "words"), "words, for as many elements,");
    if (!(words.flags() & py::array::c_style) || words.itemsize() != (layout.wide ? 8 : 4) ||
        words.dtype().kind() != 'i')
        throw std::invalid_argument(
            "words must be contiguous and of the width that holds most fields");
    auto* data = static_cast<std::uint8_t*>(words.mutable_data());
    py::gil_scoped_release release;
    if (layout.wide) work(data, std::int64_t{});
    else work(data, std::int32_t{});
}

constexpr int kMaxScales = 8;

// The number that is the norm of all ranks, infinite or NaN where something is not finite.
float norm_of(const Floats& w) {
    same_length(1, length(w, "w"), "w and one number");
    return *w.data();
}

// What turns a number into steps of each scale, in units of `rounding`: both factors are in range
// even where w is denormal or huge. A number up to w is at most rounding.most of the first scale's,
// and one that fits another scale, `largest_fit`, of that. Where w is not finite all count as 0.
struct Scales {
    int count;
    Rounding rounding;
    bool finite;
    float before = 1;
    float factor[kMaxScales] = {};
    Scales(float w, const std::vector<float>& steps)
        : count(static_cast<int>(steps.size())),
          rounding(steps.empty() ? 1 : steps[0]),
          finite(std::isfinite(w)) {
        if (count < 1 || count > kMaxScales) throw std::invalid_argument("1 to 8 scales");
        if (!finite) return;
        const int exponent = w > 0 ? std::clamp(std::ilogb(w), -120, 120) : 0;
        before = std::ldexp(1.0f, -exponent);
        if (!(w > 0)) return;
        factor[0] = rounding.factor_for(w * before);
        for (int l = 1; l < count; ++l) factor[l] = steps[l] / (w * before) * rounding.one;
    }
    HC_INLINE float in_steps(float x, float scale_factor) const {
        return x * before * scale_factor;
    }
    // With one scale, a larger magnitude counts as this one.
    void clip_at(float largest) {
        if (!(largest >= 0)) throw std::invalid_argument("clip must be at least 0");
        rounding.limit = std::min(rounding.limit, bits_of(in_steps(largest, factor[0])));
    }
    // Of the magnitudes that are no more steps of a scale than fit the first, which are those up to
    // one of them: that one, as bits.
    std::uint32_t largest_fit(int scale) const {
        if (!finite) return ~0u;
        std::uint32_t fits = 0;
        for (std::uint32_t more = 1u << 30; more; more >>= 1)
            if (fits + more < kInfinity &&
                in_steps(float_of(fits + more), factor[scale]) <= rounding.most)
                fits += more;
        return fits;
    }
};

template <class Word>
HC_INLINE void quantize_one(const float* __restrict x, std::uint8_t* words, const Layout& layout,
                            const Scales& scales, Key key) {
    const Scales s = scales;
    pack_random<Word>(
        words, layout, key, [=](std::size_t first, std::size_t count, auto each) HC_HOT {
            prefetch_ahead(x + first, count);
            each([=](std::size_t j, std::uint32_t bits)
                     HC_HOT { return s.rounding(s.in_steps(x[first + j], s.factor[0]), bits); });
        });
}
template <class Word>
HC_INLINE void quantize_several(const float* __restrict x, std::uint8_t* words,
                                const Layout& layout, const Scales& scales, Key key,
                                const Counts& counts) {
    const Scales s = scales;
    Chosen chosen(counts, scales.factor);
    pack_random<Word>(
        words, layout, key, [&](std::size_t first, std::size_t count, auto each) HC_HOT {
            prefetch_ahead(x + first, count);
            chosen.next(count, [&](auto factor) HC_HOT {
                each([=](std::size_t j, std::uint32_t bits) HC_HOT {
                    return s.rounding.within(s.in_steps(x[first + j], factor(j)), bits);
                });
            });
        });
}

// Fields for counts of up to `size`. They are not signed: the sign bit stays free.
Layout of_counts(std::size_t n, std::uint64_t size) {
    if (size == 0) throw std::invalid_argument("1 rank or more");
    return {n, 64 - __builtin_clzll(size), 1};
}
// What `encode_scales` has made and the ranks have summed up, where there are several scales.
std::optional<Counts> counts_of(std::optional<py::array>& words, std::size_t n, std::size_t scales,
                                std::uint64_t size) {
    const Layout layout = of_counts(n, size);
    if (words.has_value() != (scales > 1))
        throw std::invalid_argument("levels are of 2 scales and more");
    std::optional<Counts> counts;
    if (words)
        on_words(*words, layout, (scales - 1) * layout.words, [&](auto* data, auto) {
            counts = Counts{data, layout, size, static_cast<int>(scales)};
        });
    return counts;
}

py::array quantize(const Floats& x, std::optional<py::array> levels, std::optional<py::array> spare,
                   const Floats& w, float clip, const std::vector<float>& steps, int width,
                   std::uint64_t size, std::uint64_t key) {
    const std::size_t n = length(x, "x");
    const Layout layout(n, width, 0);
    Scales scales(norm_of(w), steps);
    scales.clip_at(clip);
    const std::optional<Counts> counts = counts_of(levels, n, steps.size(), size);
    const float* from = x.data();
    py::array words = new_words(layout, spare, layout.words);
    on_words(words, layout, layout.words, [&](auto* out, auto word) {
        if (!scales.finite) std::memset(out, 0, layout.words * sizeof word);
        else if (counts)
            dispatch<quantize_several<decltype(word)>>(from, out, layout, scales, Key(key),
                                                       *counts);
        else dispatch<quantize_one<decltype(word)>>(from, out, layout, scales, Key(key));
    });
    return words;
}

template <class Word>
HC_INLINE void dequantize_one(const std::uint8_t* words, float* to, const Layout& layout,
                              std::uint64_t offset, float unit) {
    Output out(to, layout.n);
    unpack<Word>(words, layout, offset, [&](std::size_t, std::size_t count, auto sum) HC_HOT {
        out.append(count, [=](std::size_t j) HC_HOT { return static_cast<float>(sum(j)) * unit; });
    });
}
template <class Word>
HC_INLINE void dequantize_several(const std::uint8_t* words, float* to, const Layout& layout,
                                  std::uint64_t offset, const Counts& counts, const float* units) {
    Output out(to, layout.n);
    Chosen chosen(counts, units);
    unpack<Word>(words, layout, offset, [&](std::size_t, std::size_t count, auto sum) HC_HOT {
        chosen.next(count, [&](auto unit) HC_HOT {
            out.append(count,
                       [=](std::size_t j) HC_HOT { return static_cast<float>(sum(j)) * unit(j); });
        });
    });
}

bool dequantize(py::array& words, std::optional<py::array> levels, Floats& out, const Floats& w,
                const std::vector<float>& steps, int width, std::uint64_t size, double scale) {
    const std::size_t n = length(out, "out");
    const Layout layout(n, width, 0);
    if (steps.empty() || steps.size() > kMaxScales) throw std::invalid_argument("1 to 8 scales");
    const std::optional<Counts> counts = counts_of(levels, n, steps.size(), size);
    const double largest = norm_of(w);
    float units[kMaxScales];
    for (std::size_t l = 0; l < steps.size(); ++l)
        units[l] = static_cast<float>(largest / steps[l] * scale);
    const std::uint64_t offset = size * static_cast<std::uint64_t>(steps[0]);
    // A field holds less than four times the largest sum.
    const double most = 4.0 * static_cast<double>(size) * largest * std::abs(scale);
    bool finite = std::isfinite(largest) && std::isfinite(scale);
    float* to = out.mutable_data();
    on_words(words, layout, layout.words, [&](auto* from, auto word) {
        if (!finite) std::fill_n(to, n, std::numeric_limits<float>::quiet_NaN());
        else if (counts)
            dispatch<dequantize_several<decltype(word)>>(from, to, layout, offset, *counts, units);
        else dispatch<dequantize_one<decltype(word)>>(from, to, layout, offset, units[0]);
        finite = finite && (most < std::numeric_limits<float>::max() || peak_of(to, n) < kInfinity);
    });
    return finite;
}

template <class Word>
HC_INLINE void encode_scales_pass(const float* x, const std::uint32_t* peaks, std::uint8_t* words,
                                  const Layout& layout, const Scales& scales, int scale) {
    const std::uint32_t largest = scales.largest_fit(scale);
    const std::size_t peaks_in_all = (layout.n + kStretch - 1) / kStretch;
    pack<Word>(words, layout, [=](std::size_t first, std::size_t count, auto put) HC_HOT {
        // Where the peak decides, elements need not be read.
        const std::size_t at = first / kStretch, then = at + kLead<float> / kStretch;
        if (then >= peaks_in_all || peaks[then] > largest) prefetch_ahead(x + first, count);
        if (count == kStretch && first % kStretch == 0 && peaks[at] <= largest) {
            for (std::size_t j = 0; j < count; ++j) put(j, 1);
            return;
        }
        HC_APART
        for (std::size_t j = 0; j < count; ++j) put(j, magnitude(x[first + j]) <= largest);
    });
}

py::array encode_scales(const Floats& x, const Indices& peaks, std::optional<py::array> spare,
                        const Floats& w, const std::vector<float>& steps, std::uint64_t size) {
    const Scales scales(norm_of(w), steps);
    const std::size_t n = length(x, "x");
    same_length((n + kStretch - 1) / kStretch, length(peaks, "peaks"),
                "peaks, one for 64 elements, and x");
    const Layout layout = of_counts(n, size);
    const std::size_t count = (steps.size() - 1) * layout.words;
    const float* from = x.data();
    const std::uint32_t* bounds = peaks.data();
    py::array words = new_words(layout, spare, count);
    on_words(words, layout, count, [&](auto* out, auto word) {
        for (int scale = 1; scale < scales.count; ++scale, out += layout.words * sizeof word)
            dispatch<encode_scales_pass<decltype(word)>>(from, bounds, out, layout, scales, scale);
    });
    return words;
}

template <class Word>
HC_INLINE void encode_signs_pass(const float* x, std::uint8_t* words, const Layout& layout) {
    pack<Word>(words, layout, [=](std::size_t first, std::size_t count, auto put) HC_HOT {
        prefetch_ahead(x + first, count);
        HC_APART
        for (std::size_t j = 0; j < count; ++j) put(j, (x[first + j] > 0) - (x[first + j] < 0));
    });
}
template <class Word>
HC_INLINE void decode_signs_pass(const std::uint8_t* words, float* to, const Layout& layout,
                                 std::uint64_t size, float unit) {
    Output out(to, layout.n);
    unpack<Word>(words, layout, size, [&](std::size_t, std::size_t count, auto sum) HC_HOT {
        out.append(count, [=](std::size_t j) HC_HOT {
            const std::int32_t votes = sum(j);
            return votes > 0 ? unit : votes < 0 ? -unit : 0;
        });
    });
}

py::array encode_signs(const Floats& x, std::optional<py::array> spare, int width) {
    const Layout layout(length(x, "x"), width, 0);
    const float* from = x.data();
    // And a word for what the compressor has to say.
    py::array words = new_words(layout, spare, layout.words + 1);
    on_words(words, layout, layout.words + 1, [&](auto* out, auto word) {
        dispatch<encode_signs_pass<decltype(word)>>(from, out, layout);
        std::memset(out + layout.words * sizeof word, 0, sizeof word);
    });
    return words;
}

void decode_signs(py::array& words, Floats& out, int width, std::uint64_t size, float unit) {
    const Layout layout(length(out, "out"), width, 0);
    float* to = out.mutable_data();
    on_words(words, layout, layout.words + 1, [&](auto* from, auto word) {
        dispatch<decode_signs_pass<decltype(word)>>(from, to, layout, size, unit);
    });
}

}  // namespace

void bind(py::module_& m) {
    m.def("random_bits", &random, py::kw_only(), arg("key"), arg("n"));
    m.def("draw_coordinates", &draw_coordinates, py::kw_only(), arg("key"), arg("numel"),
          arg("first"), arg("count"));
    m.def("quantize", for_lists(&quantize), arg("x"), arg("levels"), arg("spare") = py::none(),
          py::kw_only(), arg("w"), arg("clip"), arg("steps"), arg("width"), arg("size"),
          arg("key"));
    m.def("dequantize", for_lists(&dequantize), arg("words"), arg("levels"), arg("out"),
          py::kw_only(), arg("w"), arg("steps"), arg("width"), arg("size"), arg("scale"));
    m.def("encode_scales", for_lists(&encode_scales), arg("x"), arg("peaks"),
          arg("spare") = py::none(), py::kw_only(), arg("w"), arg("steps"), arg("size"));
    m.def("encode_signs", for_lists(&encode_signs), arg("x"), arg("spare") = py::none(),
          py::kw_only(), arg("width"));
    m.def("decode_signs", for_lists(&decode_signs), arg("words"), arg("out"), py::kw_only(),
          arg("width"), arg("size"), arg("unit"));
}

}  // namespace hc::quantization
