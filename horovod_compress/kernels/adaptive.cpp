// Passes that decide element by element, or bin by bin, whether enough has gathered to be sent.
#include <cmath>

#include "arrays.hpp"

namespace hc {
namespace {

constexpr std::size_t kLine = 16;  // floats in a cache line

// Indices in the order of arrival, and the values to send for them; reused between calls.
struct Fired {
    std::vector<std::uint32_t> indices;
    std::vector<float> values;
    std::size_t count = 0;

    // hits: 1 or 0 for each of `n` elements from `first` on. No branch depends on data.
    HC_INLINE void push(const std::uint32_t* hits, std::size_t n, std::size_t first) {
        if (indices.size() < count + n) indices.resize(2 * (count + n));
        std::uint32_t* out = indices.data() + count;
        for (std::size_t j = 0; j < n; ++j) {
            *out = static_cast<std::uint32_t>(first + j);
            out += hits[j];
        }
        count = static_cast<std::size_t>(out - indices.data());
    }
    float* room() {
        if (values.size() < count) values.resize(indices.size());
        return values.data();
    }
    // Scattered reads of what fired: fetches early what comes next.
    HC_INLINE void fetch(const float* array, std::size_t i) const {
        constexpr std::size_t ahead = 16;
        if (i + ahead < count) HC_PREFETCH(array + indices[i + ahead]);
    }
    // Takes ±unit out of `array` wherever something fired, with the sign of what is there.
    void take(float* array, float unit) {
        float* out = room();
        for (std::size_t i = 0; i < count; ++i) {
            fetch(array, i);
            float& kept = array[indices[i]];
            out[i] = std::copysign(unit, kept);
            kept -= out[i];
        }
    }
    Bytes body(Values kind, float scale) { return sparse_body(indices.data(), room(), count, kind, scale); }
};
thread_local Fired fired;
thread_local std::vector<float> floors;

// Goes through n elements line by line; advance(begin, n, hits) advances them, says of each whether it is to be sent, and
// returns whether any is.
template <class Advance>
HC_INLINE void collect(std::size_t n, Fired& out, Advance advance) {
    out.count = 0;
    std::uint32_t hits[kLine];
    std::size_t i = 0;
    for (; i + kLine <= n; i += kLine)
        if (advance(i, kLine, hits)) out.push(hits, kLine, i);
    if (i < n && advance(i, n - i, hits)) out.push(hits, n - i, i);
}

HC_CLONES bool strom_pass(float* __restrict g, float* __restrict r, std::size_t n, float tau, Fired& out) {
    std::uint32_t worst = 0;
    collect(n, out, [&](std::size_t begin, std::size_t count, std::uint32_t* hits) {
        std::uint32_t any = 0;
        for (std::size_t j = 0; j < count; ++j) {
            const float moved = r[begin + j] + g[begin + j];
            const std::uint32_t b = magnitude(moved);
            worst = worst > b ? worst : b;
            const float kept = b < kTooLarge ? moved : r[begin + j];
            r[begin + j] = kept;
            g[begin + j] = 0;
            hits[j] = std::fabs(kept) > tau;
            any |= hits[j];
        }
        return any;
    });
    return worst < kTooLarge;
}

py::tuple strom(Floats& grad, Floats& residual, float tau) {
    const std::size_t n = length(grad, "grad");
    same_length(n, length(residual, "residual"), "grad and residual");
    float* g = grad.mutable_data();
    float* r = residual.mutable_data();
    bool finite;
    {
        py::gil_scoped_release release;
        finite = strom_pass(g, r, n, tau, fired);
        if (!finite) fired.count = 0;
        fired.take(r, tau);
    }
    return py::make_tuple(fired.body(Values::sign, tau), fired.count, finite);
}

template <bool kGiven>  // the squares; else they are the gradient's own
HC_INLINE bool variance_body(float* __restrict g, const float* __restrict squares, float* __restrict r, float* __restrict v,
                             std::size_t n, float alpha, float zeta, float tau, Fired& out) {
    std::uint32_t worst = 0;
    collect(n, out, [&](std::size_t begin, std::size_t count, std::uint32_t* hits) {
        std::uint32_t any = 0;
        for (std::size_t j = 0; j < count; ++j) {
            const std::size_t i = begin + j;
            const float old_r = r[i], old_v = v[i];
            float new_r = old_r + g[i], new_v = old_v + (kGiven ? squares[i] : g[i] * g[i]);
            const std::uint32_t a = magnitude(new_r), c = magnitude(new_v), b = c < kInfinity ? a : kInfinity;
            worst = worst > b ? worst : b;
            new_r = b < kTooLarge ? new_r : old_r;
            new_v = b < kTooLarge ? new_v : old_v;
            const std::uint32_t fires = (new_r * new_r > alpha * new_v) & (std::fabs(new_r) > tau);
            r[i] = new_r;
            v[i] = fires ? new_v : zeta * new_v;
            g[i] = 0;
            hits[j] = fires;
            any |= fires;
        }
        return any;
    });
    return worst < kTooLarge;
}
HC_CLONES bool variance_own(float* g, float* r, float* v, std::size_t n, float alpha, float zeta, float tau, Fired& out) {
    return variance_body<false>(g, nullptr, r, v, n, alpha, zeta, tau, out);
}
HC_CLONES bool variance_given(float* g, const float* squares, float* r, float* v, std::size_t n, float alpha, float zeta,
                              float tau, Fired& out) {
    return variance_body<true>(g, squares, r, v, n, alpha, zeta, tau, out);
}

// Rounds what fired to powers of two within 2^7 of the largest, and drops what is smaller. Returns the largest power.
float round_to_powers(const float* r, Fired& f) {
    std::uint32_t peak = 0;
    for (std::size_t i = 0; i < f.count; ++i) {
        f.fetch(r, i);
        peak = std::max(peak, magnitude(r[f.indices[i]]));
    }
    const std::uint32_t top = peak >> 23;
    if (top == 0) {  // nothing fired, or denormal numbers only, which no power can stand for
        f.count = 0;
        return 0;
    }
    float* values = f.room();
    std::uint32_t* indices = f.indices.data();
    std::uint32_t dropped = 0;
    for (std::size_t i = 0; i < f.count; ++i) {
        const std::uint32_t b = bits_of(r[indices[i]]);
        // Adding half a mantissa carries into the exponent from 1.5 on; truncation at the top is the minimum.
        const std::uint32_t exponent = std::min(((b & 0x7fffffffu) + 0x400000u) >> 23, top);
        const bool fits = exponent > 0 && exponent + 7 >= top;
        const std::uint32_t power = fits ? (b & 0x80000000u) | exponent << 23 : 0;
        std::memcpy(values + i, &power, 4);
        dropped += !fits;
    }
    if (dropped) {  // by itself: storing where depends on reading r would hold up the loop above
        std::size_t kept = 0;
        for (std::size_t i = 0; i < f.count; ++i) {
            const float value = values[i];
            indices[kept] = indices[i];
            values[kept] = value;
            kept += value != 0;
        }
        f.count = kept;
    }
    const std::uint32_t scale = top << 23;
    float value;
    std::memcpy(&value, &scale, 4);
    return value;
}

// Takes what is sent out of r and v; rows of both as they were go to `before`.
void take_variance(const std::uint32_t* indices, const float* values, std::size_t count, float* r, float* v, float tau,
                   bool error_feedback, float* before) {
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t at = indices[i];
        const float old_r = r[at], old_v = v[at];
        before[i] = old_r;
        before[count + i] = old_v;
        v[at] = tau > 0 ? std::max(old_v - 2 * std::fabs(old_r) * tau + tau * tau, 0.0f) : 0;
        r[at] = tau > 0 || error_feedback ? old_r - values[i] : 0;
    }
}

py::tuple variance(Floats& grad, std::optional<Floats> squares, Floats& r, Floats& v, float alpha, float zeta, float tau,
                   bool error_feedback) {
    const std::size_t n = length(grad, "grad");
    same_length(n, length(r, "r"), "grad and r");
    same_length(n, length(v, "v"), "grad and v");
    if (squares) same_length(n, length(*squares, "squares"), "grad and squares");
    float *pg = grad.mutable_data(), *pr = r.mutable_data(), *pv = v.mutable_data();
    bool finite;
    {
        py::gil_scoped_release release;
        finite = squares ? variance_given(pg, squares->data(), pr, pv, n, alpha, zeta, tau, fired)
                         : variance_own(pg, pr, pv, n, alpha, zeta, tau, fired);
        if (!finite) fired.count = 0;
    }
    float scale = tau;
    if (tau > 0) {
        float* values = fired.room();
        for (std::size_t i = 0; i < fired.count; ++i) values[i] = std::copysign(tau, pr[fired.indices[i]]);
    } else {
        scale = round_to_powers(pr, fired);
    }
    const std::size_t count = fired.count;
    Floats before(std::vector<py::ssize_t>{2, static_cast<py::ssize_t>(count)});
    Indices indices(static_cast<py::ssize_t>(count), fired.indices.data());
    take_variance(indices.data(), fired.room(), count, pr, pv, tau, error_feedback, before.mutable_data());
    return py::make_tuple(fired.body(tau > 0 ? Values::sign : Values::power, scale), indices, before, finite);
}

struct Bins {
    bool finite;
    double sum;  // of the bins' maxima
};

// By blocks of whole bins, so that all but the maxima goes by whole lines, whatever the bins' length is.
HC_CLONES Bins adacomp_pass(float* __restrict g, float* __restrict residue, std::size_t n, std::size_t bin_length, float more,
                            std::vector<float>& scratch, Fired& out) {
    constexpr std::size_t typical = 4096;
    const std::size_t block = bin_length < typical ? typical / bin_length * bin_length : bin_length;
    if (scratch.size() < block + kLine) scratch.resize(block + kLine);
    float* floors = scratch.data();
    std::uint32_t worst = 0, hits[kLine];
    double sum = 0;
    out.count = 0;
    for (std::size_t begin = 0; begin < n; begin += block) {
        const std::size_t count = std::min(block, n - begin);
        float *newest = g + begin, *total = residue + begin;
        fetch_ahead(newest + block, std::min(count, typical));
        fetch_ahead(total + block, std::min(count, typical));
        for (std::size_t i = 0; i < count; ++i) {
            const float moved = total[i] + newest[i];
            const std::uint32_t b = magnitude(moved);
            worst = worst > b ? worst : b;
            total[i] = b < kTooLarge ? moved : total[i];
            newest[i] = b < kTooLarge ? more * newest[i] : 0;  // H = G + (factor − 1)·g
        }
        for (std::size_t bin = 0; bin < count; bin += bin_length) {
            const std::size_t end = std::min(count, bin + bin_length);
            float lanes[kLine] = {};
            const auto larger = [&](std::size_t i) {
                for (std::size_t j = 0; j < kLine; ++j) {
                    const float a = std::fabs(total[i + j]);
                    lanes[j] = lanes[j] > a ? lanes[j] : a;
                }
            };
            std::size_t i = bin;
            for (; i + kLine <= end; i += kLine) larger(i);
            if (i < end && end - bin >= kLine) larger(end - kLine);  // a maximum may be taken twice
            else
                for (; i < end; ++i) lanes[0] = std::max(lanes[0], std::fabs(total[i]));
            float gmax = 0;
            for (float lane : lanes) gmax = gmax > lane ? gmax : lane;
            sum += gmax;
            const float floor = gmax > 0 ? gmax : INFINITY;
            for (i = bin; i < end; i += kLine)  // the last line runs into the next bin, which comes next
                for (std::size_t j = 0; j < kLine; ++j) floors[i + j] = floor;
        }
        const auto line = [&](std::size_t i, std::size_t many) {
            std::uint32_t any = 0;
            for (std::size_t j = 0; j < many; ++j) {
                const float kept = total[i + j];
                hits[j] = (std::fabs(kept + newest[i + j]) >= floors[i + j]) & (kept != 0);
                any |= hits[j];
                newest[i + j] = 0;
            }
            if (any) out.push(hits, many, begin + i);
        };
        std::size_t i = 0;
        for (; i + kLine <= count; i += kLine) line(i, kLine);
        if (i < count) line(i, count - i);
    }
    return {worst < kTooLarge, sum};
}

py::tuple adacomp(Floats& grad, Floats& residue, std::size_t bin_length, float scale_factor) {
    const std::size_t n = length(grad, "grad");
    same_length(n, length(residue, "residue"), "grad and residue");
    if (bin_length == 0) throw std::invalid_argument("bin_length must be at least 1");
    bin_length = std::min(bin_length, std::max<std::size_t>(n, 1));
    float *g = grad.mutable_data(), *r = residue.mutable_data();
    Bins bins;
    float scale;
    {
        py::gil_scoped_release release;
        bins = adacomp_pass(g, r, n, bin_length, scale_factor - 1, floors, fired);
        scale = n ? static_cast<float>(bins.sum / static_cast<double>((n + bin_length - 1) / bin_length)) : 0;
        if (!bins.finite || scale == 0) fired.count = 0;
        fired.take(r, scale);
    }
    return py::make_tuple(fired.body(Values::sign, scale), fired.count, bins.finite);
}

}  // namespace

void bind_adaptive(py::module_& m) {
    m.def("strom", &strom, arg("grad").noconvert(), arg("residual").noconvert(), arg("tau"));
    m.def("variance", &variance, arg("grad").noconvert(), arg("squares").noconvert().none(true), arg("r").noconvert(),
          arg("v").noconvert(), arg("alpha"), arg("zeta"), arg("tau"), arg("error_feedback"));
    m.def("adacomp", &adacomp, arg("grad").noconvert(), arg("residue").noconvert(), arg("bin_length"), arg("scale_factor"));
}

}  // namespace hc
