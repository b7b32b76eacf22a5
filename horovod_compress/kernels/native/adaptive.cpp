// Strom's threshold, variance-based compression and AdaComp: each element, or each bin of them,
// decides by itself whether it is sent.
//
// All three make one pass over the gradient and the residual (variance over its v, and the samples'
// squares, too), block by block:
// 1. the block is advanced: residual += gradient, the gradient is set to zero, and a byte an
// element says whether it is sent; an element that would become too large or not finite keeps its
// residual;
// 2. the bytes become words of bits, the bits become indices, appended to thread-local lists with
// the residual's value there;
// 3. while the block is in the cache, what is sent is subtracted from the residual (not in AdaComp,
// see below). Then the lists are written as a sparse body. If any element was not finite, the lists
// put back what step 3 subtracted.
//
// Variance without tau sends powers of two within 2^7 of the largest, which is known only after the
// pass: entries that turn out too small are put back by keep_values, which also copies what a
// rollback needs.
//
// AdaComp's block is a number of whole bins: their maxima are found between steps 1 and 2. Its
// scale is the mean of all maxima, so what is sent stays in the residual, and the pass of the next
// call subtracts it just before it reaches it.
#include <algorithm>
#include <cmath>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "bits.hpp"
#include "lists.hpp"

namespace hc::adaptive {
namespace {

using tuning::kBinBlock;
using tuning::kHitBlock;
using tuning::kScatterAhead;

constexpr std::size_t kGroup = 64;  // elements whose hits make one word

// Which of 64 bytes are 255 and not 0, as bits.
HC_INLINE std::uint64_t bits_of_bytes(const std::uint8_t* bytes) {
#ifdef __SSE2__
    std::uint64_t bits = 0;
    for (int i = 0; i < 4; ++i)
        bits |= static_cast<std::uint64_t>(_mm_movemask_epi8(
                    _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + 16 * i))))
                << 16 * i;
    return bits;
#else
    std::uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) {
        std::uint64_t eight;
        std::memcpy(&eight, bytes + 8 * i, 8);
        // The product moves each byte's bit to the top.
        bits |= ((eight & 0x0101010101010101u) * 0x0102040810204080u >> 56) << 8 * i;
    }
    return bits;
#endif
}

// What fired, in the order of arrival: indices, and r (and v) there as they were before anything
// was taken; reused between calls.
struct Fired {
    std::vector<std::uint32_t> indices;
    std::vector<float> r, v;
    std::size_t count = 0;

    // The elements of a block from `first` on that `hits`, bytes of 0 or 255 up to a whole group,
    // says.
    HC_INLINE void push(const std::uint8_t* hits, std::size_t n, std::size_t first) {
        std::uint32_t* out = indices.data() + count;
        for (std::size_t i = 0; i < n; i += kGroup) {
            out += put_places(bits_of_bytes(hits + i), static_cast<std::uint32_t>(first + i), out);
        }
        count = static_cast<std::size_t>(out - indices.data());
    }
    // Room for `n` more, and for what push writes behind them.
    void reserve(std::size_t n) {
        if (indices.size() >= count + n + kPlacesAtOnce) return;
        for (auto* rows : {&r, &v}) rows->resize(2 * (count + n) + kPlacesAtOnce);
        indices.resize(2 * (count + n) + kPlacesAtOnce);
    }
    // Nothing is sent: puts back what was taken.
    void undo(float* to_r, float* to_v) {
        for (std::size_t i = 0; i < count; ++i) {
            to_r[indices[i]] = r[i];
            if (to_v) to_v[indices[i]] = v[i];
        }
        count = 0;
    }
    // A body of signs needs the signs of r only.
    Bytes signs(float scale) const {
        return sparse::body_of(indices.data(), r.data(), count, Values::sign, &scale);
    }
};
thread_local Fired fired;
thread_local std::vector<float> scratch;

// Goes through n elements by blocks: advance(begin, count, hits) advances a block and says which
// are to be sent. While it is still in the cache, take(i) works on each entry i that fired in it.
template <class Advance, class Take>
HC_INLINE void collect(std::size_t n, Fired& out, Advance advance, Take take) {
    out.count = 0;
    std::uint8_t hits[kHitBlock + kGroup];
    for (std::size_t block = 0; block < n; block += kHitBlock) {
        const std::size_t count = std::min(kHitBlock, n - block), before = out.count;
        out.reserve(count);
        advance(block, count, hits);
        std::memset(hits + count, 0, kGroup);
        out.push(hits, count, block);
        for (std::size_t entry = before; entry < out.count; ++entry) take(entry);
    }
}

HC_INLINE bool encode_strom_pass(float* g, float* r, std::size_t n, float tau, Fired& out) {
    std::uint32_t worst = 0;
    collect(
        n, out,
        [&](std::size_t begin, std::size_t count, std::uint8_t* hits) HC_HOT {
            float *added = g + begin, *kept = r + begin;
            std::uint32_t peak = 0;
            prefetch_ahead(added, count);
            prefetch_ahead(kept, count);
            HC_APART
            for (std::size_t i = 0; i < count; ++i) {
                const float moved = kept[i] + added[i];
                const std::uint32_t b = magnitude(moved);
                peak = peak > b ? peak : b;
                const float now = b < kTooLarge ? moved : kept[i];
                kept[i] = now;
                added[i] = 0;
                hits[i] = std::fabs(now) > tau ? 255 : 0;
            }
            worst = std::max(worst, peak);
        },
        [&](std::size_t entry) HC_HOT {
            float& kept = r[out.indices[entry]];
            out.r[entry] = kept;
            kept -= std::copysign(tau, kept);
        });
    return worst < kTooLarge;
}

py::object encode_strom(Floats& grad, Floats& residual, float tau) {
    const std::size_t n = length(grad, "grad");
    same_length(n, length(residual, "residual"), "grad and residual");
    float* g = grad.mutable_data();
    float* r = residual.mutable_data();
    Fired& f = fired;
    bool finite;
    {
        py::gil_scoped_release release;
        finite = dispatch<encode_strom_pass>(g, r, n, tau, f);
        if (!finite) f.undo(r, nullptr);
    }
    return encoded(f.signs(tau), f.count, finite);
}

// The squares; else they are the gradient's own.
template <bool kGiven>
HC_INLINE bool encode_variance_pass(float* g, const float* squares, float* r, float* v,
                                    std::size_t n, float alpha, float zeta, float tau, Fired& out) {
    bool finite = true;
    // That was taken so far, where powers are sent: what has none beside it has none in the end.
    std::uint32_t largest = 0;
    collect(
        n, out,
        [&](std::size_t begin, std::size_t count, std::uint8_t* hits) HC_HOT {
            const std::uint32_t least = least_power(largest);
            float *added = g + begin, *to_r = r + begin, *to_v = v + begin;
            const float* given = squares + (kGiven ? begin : 0);
            std::uint32_t peak_r = 0, peak_v = 0;
            for (const float* row : {added, to_r, to_v}) prefetch_ahead(row, count);
            if (kGiven) prefetch_ahead(given, count);
            HC_APART
            for (std::size_t i = 0; i < count; ++i) {
                const float old_r = to_r[i], old_v = to_v[i];
                float new_r = old_r + added[i],
                      new_v = old_v + (kGiven ? given[i] : added[i] * added[i]);
                const std::uint32_t a = magnitude(new_r), b = magnitude(new_v);
                peak_r = peak_r > a ? peak_r : a;
                peak_v = peak_v > b ? peak_v : b;
                const bool good = (a < kTooLarge) & (b < kInfinity);
                new_r = good ? new_r : old_r;
                new_v = good ? new_v : old_v;
                const bool fires = (new_r * new_r > alpha * new_v) & (std::fabs(new_r) > tau);
                to_r[i] = new_r;
                to_v[i] = fires ? new_v : zeta * new_v;
                added[i] = 0;
                hits[i] = (fires & (magnitude(new_r) + kHalfPower >= least)) ? 255 : 0;
            }
            finite &= peak_r < kTooLarge && peak_v < kInfinity;
        },
        [&](std::size_t entry) HC_HOT {
            float &to_r = r[out.indices[entry]], &to_v = v[out.indices[entry]];
            out.r[entry] = to_r;
            out.v[entry] = to_v;
            if (tau == 0) largest = std::max(largest, magnitude(to_r));
            to_v = tau > 0 ? std::max(to_v - 2 * std::fabs(to_r) * tau + tau * tau, 0.0f) : 0;
            to_r = tau > 0 ? to_r - std::copysign(tau, to_r) : 0;
        });
    return finite;
}

// The places of what fired: first of what has a value, then, from kept + 1 to the last, of what has
// none; reused between calls.
struct Parts {
    std::vector<std::uint32_t> places;
    std::size_t kept = 0;

    void sort(const float* values, std::size_t count) {
        if (places.size() < count + 1) places.resize(2 * count + 1);
        std::uint32_t *first = places.data(), *last = first + count;
        // Without a branch, which nobody could predict.
        for (std::size_t i = 0; i < count; ++i) {
            const bool none = values[i] == 0;
            *first = *last = static_cast<std::uint32_t>(i);
            first += !none;
            last -= none;
        }
        kept = static_cast<std::size_t>(first - places.data());
    }
};
thread_local Parts parts;

// Copies what has a value, and its value to the first ones; puts back the others. What rounding
// took from r stays there, or is forgotten.
void keep_values(const Fired& f, const Parts& split, float* values, float* r, float* v,
                 bool error_feedback, std::uint32_t* indices, float* r_before, float* v_before) {
    const std::uint32_t* places = split.places.data();
    for (std::size_t i = 0; i < split.kept; ++i) {
        const std::uint32_t place = places[i];
        indices[i] = f.indices[place];
        r_before[i] = f.r[place];
        v_before[i] = f.v[place];
        values[i] = values[place];
    }
    for (std::size_t i = 0; error_feedback && i < split.kept; ++i) {
        if (i + kScatterAhead < split.kept) HC_PREFETCH(r + indices[i + kScatterAhead]);
        r[indices[i]] = r_before[i] - values[i];
    }
    for (std::size_t i = split.kept + 1; i <= f.count; ++i) {
        if (i + kScatterAhead <= f.count) {
            HC_PREFETCH(r + f.indices[places[i + kScatterAhead]]);
            HC_PREFETCH(v + f.indices[places[i + kScatterAhead]]);
        }
        const std::uint32_t place = places[i], at = f.indices[place];
        r[at] = f.r[place];
        v[at] = f.v[place];
    }
}

py::object encode_variance(Floats& grad, std::optional<Floats> squares, Floats& r, Floats& v,
                           std::optional<Indices> spare, float alpha, float zeta, float tau,
                           bool error_feedback) {
    const std::size_t n = length(grad, "grad");
    same_length(n, length(r, "r"), "grad and r");
    same_length(n, length(v, "v"), "grad and v");
    if (squares) same_length(n, length(*squares, "squares"), "grad and squares");
    float *pg = grad.mutable_data(), *pr = r.mutable_data(), *pv = v.mutable_data();
    Fired& f = fired;
    const bool rounds = tau == 0;
    float scale = tau;
    bool finite;
    {
        py::gil_scoped_release release;
        finite = squares ? dispatch<encode_variance_pass<true>>(pg, squares->data(), pr, pv, n,
                                                                alpha, zeta, tau, f)
                         : dispatch<encode_variance_pass<false>>(pg, nullptr, pr, pv, n, alpha,
                                                                 zeta, tau, f);
        if (!finite) f.undo(pr, pv);
        if (scratch.size() < f.count) scratch.resize(f.indices.size());
        float* values = scratch.data();
        if (rounds) scale = float_of(dispatch<powers_of>(f.r.data(), f.count, values));
        else std::copy_n(f.r.data(), f.count, values);  // of which the signs are sent
        parts.sort(values, f.count);
    }
    const std::size_t count = parts.kept;
    // What an earlier step has let go of, where that is enough: pages that are new in each step
    // cost more than writing them.
    const auto entries = static_cast<py::ssize_t>(count);
    const py::object base = spare && spare->base() ? spare->base() : py::none();
    const bool fits = py::isinstance<Indices>(base) && py::array(base).size() >= 3 * entries &&
                      py::array(base).writeable();
    Indices memory = fits ? Indices(base) : Indices(3 * (entries + entries / 4));
    std::uint32_t* at = memory.mutable_data();
    float* r_before = reinterpret_cast<float*>(at + count);
    const Indices indices(entries, at, memory);
    const Floats before({py::ssize_t{2}, entries}, r_before, memory);
    {
        py::gil_scoped_release release;
        keep_values(f, parts, scratch.data(), pr, pv, rounds && error_feedback, at, r_before,
                    r_before + count);
    }
    Bytes body =
        sparse::body_of(at, scratch.data(), count, rounds ? Values::power : Values::sign, &scale);
    return encoded(body, count, finite, py::make_tuple(indices, before));
}

struct Bins {
    bool finite;
    double sum;  // of the bins' maxima
};

// The largest magnitudes of a bin, lane by lane. It has kLanes elements at least.
HC_INLINE void peaks_of_bin(const float* x, std::size_t n, WordLanes& peaks) {
    const auto look_at = [&](std::size_t i) HC_HOT {
        WordLanes b;
        std::memcpy(&b, x + i, sizeof b);
        b &= 0x7fffffffu;
        peaks = peaks > b ? peaks : b;
    };
    for (std::size_t i = 0; i + kLanes < n; i += kLanes) look_at(i);
    // What is looked at twice does no harm.
    look_at(n - kLanes);
}

// The largest magnitude of each of `bins` bins, kLanes of them at a time: one by one, folding the
// lanes would take longer than all the rest.
HC_INLINE void peaks_of_bins(const float* x, std::size_t bins, std::size_t length, float* peaks) {
    if (length < kLanes) {
        for (std::size_t bin = 0; bin < bins; ++bin)
            peaks[bin] = float_of(peak_of(x + bin * length, length));
        return;
    }
    for (std::size_t first = 0; first < bins; first += kLanes) {
        const std::size_t some = std::min(kLanes, bins - first);
        WordLanes rows[kLanes] = {};
        for (std::size_t bin = 0; bin < some; ++bin)
            peaks_of_bin(x + (first + bin) * length, length, rows[bin]);
        fold_rows(rows);
        std::memcpy(peaks + first, rows, 4 * some);
    }
}

// What encode_adacomp_pass needs of a block: the bins' maxima, each element's floor, and whether it
// is to be sent.
struct Block {
    std::vector<float> peaks, floors;
    std::vector<std::uint8_t> hits;
};
thread_local Block block_of_bins;

// What the step before has sent and is still in the residual: sign(residual)·scale at ascending
// places.
struct Pending {
    const std::uint32_t* indices;
    std::size_t count;
    float scale;
    HC_INLINE void subtract_below(std::size_t end, float* residual) {
        for (; count && *indices < end; ++indices, --count)
            residual[*indices] -= std::copysign(scale, residual[*indices]);
    }
};

// By blocks of whole bins, so that all but the maxima goes by whole lines, whatever the bins'
// length is.
HC_INLINE Bins encode_adacomp_pass(float* g, float* residual, std::size_t n, Pending pending,
                                   std::size_t bin_length, float more, Block& scratch, Fired& out) {
    std::size_t bins = std::max<std::size_t>(kBinBlock / bin_length, 1);
    if (bins > kLanes) bins -= bins % kLanes;
    const std::size_t block = bins * bin_length;
    if (scratch.hits.size() < block + kGroup) {
        scratch.peaks.resize(kBinBlock);
        scratch.floors.resize(block + kLanes);
        scratch.hits.resize(block + kGroup);
    }
    float *peaks = scratch.peaks.data(), *floors = scratch.floors.data();
    std::uint8_t* hits = scratch.hits.data();
    std::uint32_t worst = 0;
    double sum = 0;
    out.count = 0;
    for (std::size_t begin = 0; begin < n; begin += block) {
        const std::size_t count = std::min(block, n - begin), whole = count / bin_length;
        float *newest = g + begin, *total = residual + begin;
        pending.subtract_below(begin + count, residual);
        by_stretches(count, [&](std::size_t first, std::size_t some) HC_HOT {
            prefetch_ahead(newest + first, some);
            prefetch_ahead(total + first, some);
            HC_APART
            for (std::size_t i = first; i < first + some; ++i) {
                const float old = total[i], moved = old + newest[i];
                const std::uint32_t b = magnitude(moved);
                worst = worst > b ? worst : b;
                total[i] = b < kTooLarge ? moved : old;
            }
        });
        peaks_of_bins(total, whole, bin_length, peaks);
        const std::size_t rest = count - whole * bin_length;
        if (rest) peaks[whole] = float_of(peak_of(total + whole * bin_length, rest));
        for (std::size_t bin = 0, i = 0; i < count; ++bin) {
            const float floor = peaks[bin] > 0 ? peaks[bin] : INFINITY;
            sum += peaks[bin];
            const std::size_t end = std::min(count, i + bin_length);
            // The last line runs into the next bin, which comes next.
            for (std::size_t at = i; at < end; at += kLanes)
                for (std::size_t j = 0; j < kLanes; ++j) floors[at + j] = floor;
            i = end;
        }
        HC_APART
        for (std::size_t i = 0; i < count; ++i) {
            const float kept = total[i];
            // H = G + (factor − 1)·g.
            const bool sent = (std::fabs(kept + more * newest[i]) >= floors[i]) & (kept != 0);
            hits[i] = sent ? 255 : 0;
            newest[i] = 0;
        }
        std::memset(hits + count, 0, kGroup);
        out.reserve(count);
        const std::size_t before = out.count;
        out.push(hits, count, begin);
        for (std::size_t entry = before; entry < out.count; ++entry)
            out.r[entry] = residual[out.indices[entry]];
    }
    return {worst < kTooLarge, sum};
}

py::object encode_adacomp(Floats& grad, Floats& residual, const Indices& sent, float sent_scale,
                          std::size_t bin_length, float scale_factor) {
    const std::size_t n = length(grad, "grad"), count = length(sent, "sent");
    same_length(n, length(residual, "residual"), "grad and residual");
    inside(sent.data(), count, n);
    if (bin_length == 0) throw std::invalid_argument("bin_length must be at least 1");
    bin_length = std::min(bin_length, std::max<std::size_t>(n, 1));
    float *g = grad.mutable_data(), *r = residual.mutable_data();
    const Pending pending{sent.data(), count, sent_scale};
    Fired& f = fired;
    Bins bins;
    float scale;
    {
        py::gil_scoped_release release;
        bins = dispatch<encode_adacomp_pass>(g, r, n, pending, bin_length, scale_factor - 1,
                                             block_of_bins, f);
        scale = n ? static_cast<float>(bins.sum /
                                       static_cast<double>((n + bin_length - 1) / bin_length))
                  : 0;
        if (!bins.finite || scale == 0) f.count = 0;
    }
    const Indices indices(static_cast<py::ssize_t>(f.count), f.indices.data());
    return encoded(f.signs(scale), f.count, bins.finite, py::make_tuple(indices, scale));
}

}  // namespace

void bind(py::module_& m) {
    m.def("encode_strom", for_lists(&encode_strom), arg("grad"), arg("residual"), py::kw_only(),
          arg("tau"));
    m.def("encode_variance", for_lists(&encode_variance), arg("grad"), arg("squares"), arg("r"),
          arg("v"), arg("spare") = py::none(), py::kw_only(), arg("alpha"), arg("zeta"), arg("tau"),
          arg("error_feedback"));
    m.def("encode_adacomp", for_lists(&encode_adacomp), arg("grad"), arg("residual"), arg("sent"),
          py::kw_only(), arg("sent_scale"), arg("bin_length"), arg("scale_factor"));
}

}  // namespace hc::adaptive
