// What is done to whole tensors: norms, finiteness, momentum after averaging, adding entries,
// moving and adding up; how threads treat denormal numbers.
//
// max_abs and squared_norm read x once, and norms does as one of them. max_abs works on 16
// stretches of 64 elements at a time and folds their maxima together, one for each stretch, which
// the `peaks` of norms get. max_abs_and_deviation sums y and y² by blocks of y = x scaled by a
// power of two, so that squares stay in range, and reads x again only to see whether all elements
// are equal.
//
// apply_momentum reads `out` for finiteness, then out and u, writes new_u and out, and reads both
// for finiteness. scatter_add writes the places that indices name, with prefetching. move reads x,
// writes `out` past the caches and x while it is in them; add_up reads each part once and writes
// `out` once.
#include <cmath>
#include <cstdlib>

#include "lists.hpp"

namespace hc::dense {
namespace {

// The largest magnitude, and that of each kStretch elements into `peaks`, where that is given.
HC_INLINE std::uint32_t max_abs_pass(const float* x, std::size_t n, std::uint32_t* peaks) {
    WordLanes all{};
    std::size_t i = 0;
    for (; i + kLanes * kStretch <= n; i += kLanes * kStretch) {
        WordLanes rows[kLanes];
        for (std::size_t row = 0; row < kLanes; ++row) {
            const float* from = x + i + row * kStretch;
            prefetch_ahead(from, kStretch);
            rows[row] = WordLanes{};
            for (std::size_t j = 0; j < kStretch; j += kLanes) {
                WordLanes b;
                std::memcpy(&b, from + j, sizeof b);
                b &= 0x7fffffffu;
                rows[row] = rows[row] > b ? rows[row] : b;
            }
        }
        fold_rows(rows);
        if (peaks) std::memcpy(peaks + i / kStretch, rows, sizeof *rows);
        all = all > rows[0] ? all : rows[0];
    }
    std::uint32_t peak = largest_of(all);
    for (; i < n; i += kStretch) {
        const std::uint32_t part = peak_of(x + i, std::min(kStretch, n - i));
        if (peaks) peaks[i / kStretch] = part;
        peak = std::max(peak, part);
    }
    return peak;
}

float max_abs(const Floats& x) {
    const std::size_t n = length(x, "x");
    const float* p = x.data();
    py::gil_scoped_release release;
    return float_of(std::min(dispatch<max_abs_pass>(p, n, nullptr), kInfinity));
}

HC_INLINE void apply_momentum_pass(float* __restrict out, const float* __restrict u,
                                   float* __restrict new_u, std::size_t n, float m, bool nesterov) {
    for (std::size_t i = 0; i < n; ++i) {
        const float g = out[i], moved = m * u[i] + g;
        new_u[i] = moved;
        out[i] = nesterov ? g + m * moved : moved;
    }
}

bool apply_momentum(Floats& out, const Floats& u, Floats& new_u, float momentum, bool nesterov) {
    const std::size_t n = length(out, "out");
    same_length(n, length(u, "u"), "out and u");
    same_length(n, length(new_u, "new_u"), "out and new_u");
    float* to = out.mutable_data();
    float* moved = new_u.mutable_data();
    const float* from = u.data();
    py::gil_scoped_release release;
    if (dispatch<max_abs_pass>(to, n, nullptr) >= kInfinity) return false;
    dispatch<apply_momentum_pass>(to, from, moved, n, momentum, nesterov);
    return dispatch<max_abs_pass>(moved, n, nullptr) < kInfinity &&
           dispatch<max_abs_pass>(to, n, nullptr) < kInfinity;
}

// The largest magnitude and the standard deviation, exactly 0 where all elements are equal. A
// block's sums are scaled, so that squares stay in range: as those of the block before were, and if
// that does not do by its own largest.
struct PeakAndDeviation {
    std::uint32_t peak;
    double deviation;
};
HC_INLINE PeakAndDeviation max_abs_and_deviation_pass(const float* x, std::size_t n) {
    constexpr std::size_t block = tuning::kMomentBlock;
    PeakAndDeviation all{};
    double sum = 0, squares = 0;
    int exponent = 0;
    for (std::size_t begin = 0; begin < n; begin += block) {
        const std::size_t count = std::min(block, n - begin);
        Sums sums = scaled_sums(x + begin, count, power_of_two(-exponent));
        all.peak = std::max(all.peak, sums.peak);
        if (sums.peak == 0 || sums.peak >= kInfinity) continue;
        if (const int here = exponent_of(sums.peak);
            std::abs(here - exponent) > tuning::kFarOrders) {
            exponent = here;
            sums = scaled_sums(x + begin, count, power_of_two(-exponent));
        }
        sum += std::ldexp(sums.one, exponent);
        squares += std::ldexp(sums.two, 2 * exponent);
    }
    const double count = static_cast<double>(n), mean = n ? sum / count : 0;
    const bool equal = n < 2 || std::memcmp(x, x + 1, 4 * (n - 1)) == 0;
    all.deviation = equal ? 0 : std::sqrt(std::max(squares / count - mean * mean, 0.0));
    return all;
}

py::tuple max_abs_and_deviation(const Floats& x) {
    const std::size_t n = length(x, "x");
    const float* p = x.data();
    PeakAndDeviation all;
    {
        py::gil_scoped_release release;
        all = dispatch<max_abs_and_deviation_pass>(p, n);
    }
    return py::make_tuple(float_of(std::min(all.peak, kInfinity)), all.deviation);
}

HC_INLINE double squared_norm_pass(const float* x, std::size_t n) {
    double lanes[kLanes] = {};
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (std::size_t j = 0; j < kLanes; ++j)
            lanes[j] += static_cast<double>(x[i + j]) * x[i + j];
    for (; i < n; ++i) lanes[0] += static_cast<double>(x[i]) * x[i];
    double sum = 0;
    for (double lane : lanes) sum += lane;
    return sum;
}

double squared_norm(const Floats& x) {
    const std::size_t n = length(x, "x");
    const float* p = x.data();
    py::gil_scoped_release release;
    return dispatch<squared_norm_pass>(p, n);
}

Floats norms(const Floats& x, std::optional<Indices> peaks, bool l2) {
    const std::size_t n = length(x, "x");
    if (peaks)
        same_length((n + kStretch - 1) / kStretch, length(*peaks, "peaks"),
                    "peaks, one for 64 elements, and x");
    const float* p = x.data();
    std::uint32_t* parts = peaks ? peaks->mutable_data() : nullptr;
    Floats found(1);
    float* to = found.mutable_data();
    py::gil_scoped_release release;
    double norm = 0;
    if (parts || !l2) norm = float_of(dispatch<max_abs_pass>(p, n, parts));
    if (l2) norm = std::sqrt(dispatch<squared_norm_pass>(p, n));
    *to = std::isfinite(norm) ? static_cast<float>(norm) : float_of(kInfinity);
    return found;
}

bool scatter_add(Floats& out, const Indices& indices, const Floats& values, float scale) {
    const std::size_t n = length(indices, "indices"), numel = length(out, "out");
    same_length(n, length(values, "values"), "indices and values");
    inside(indices.data(), n, numel);
    const std::uint32_t* at = indices.data();
    const float* value = values.data();
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    return add_entries(to, at, value, n, scale);
}

HC_INLINE void move_pass(float* __restrict x, float* to, std::size_t n, float scale) {
    Output out(to, n);
    for (std::size_t i = 0; i < n; i += kStretch) {
        const std::size_t count = std::min(kStretch, n - i);
        float* __restrict from = x + i;
        out.append(count, [&](std::size_t j) { return scale * from[j]; });
        std::memset(from, 0, 4 * count);
    }
}

void move(Floats& x, Floats& out, float scale) {
    const std::size_t n = length(x, "x");
    same_length(n, length(out, "out"), "x and out");
    float* from = x.mutable_data();
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    dispatch<move_pass>(from, to, n, scale);
}

HC_INLINE void add_up_pass(float* __restrict out, const float* const* parts, std::size_t count,
                           std::size_t n) {
    for (std::size_t i = 0; i < n; i += kStretch) {
        float sums[kStretch];
        const std::size_t here = std::min(kStretch, n - i);
        prefetch_ahead(out + i, here);
        std::memcpy(sums, parts[0] + i, 4 * here);
        for (std::size_t part = 1; part < count; ++part) {
            const float* __restrict from = parts[part] + i;
            if (here == kStretch)
                for (std::size_t j = 0; j < kStretch; ++j) sums[j] += from[j];
            else
                for (std::size_t j = 0; j < here; ++j) sums[j] += from[j];
        }
        std::memcpy(out + i, sums, 4 * here);
    }
}

void add_up(Floats& out, const std::vector<Floats>& parts) {
    const std::size_t n = length(out, "out");
    if (parts.empty()) throw std::invalid_argument("there must be one part at least");
    std::vector<const float*> from;
    for (const Floats& part : parts) {
        same_length(n, length(part, "a part"), "out and every part");
        from.push_back(part.data());
    }
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    dispatch<add_up_pass>(to, from.data(), from.size(), n);
}

// x86-64: flush to zero and denormals are zero, of MXCSR. AArch64: flush to zero, of FPCR.
std::uint64_t flush_denormals(std::uint64_t mode) {
#if defined(__x86_64__) && defined(__GNUC__)
    constexpr std::uint32_t kMask = 0x8040;
    const std::uint32_t before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr((before & ~kMask) | (static_cast<std::uint32_t>(mode) & kMask));
    return before & kMask;
#elif defined(__aarch64__) && defined(__GNUC__)
    constexpr std::uint64_t kMask = 1u << 24;
    std::uint64_t before;
    asm volatile("mrs %0, fpcr" : "=r"(before));
    const std::uint64_t after = (before & ~kMask) | (mode & kMask);
    asm volatile("msr fpcr, %0" : : "r"(after));
    return before & kMask;
#else
    return mode;
#endif
}

}  // namespace

void bind(py::module_& m) {
    m.def("max_abs", for_lists(&max_abs), arg("x"));
    m.def("norms", for_lists(&norms), arg("x"), arg("peaks") = py::none(), py::kw_only(),
          arg("l2"));
    m.def("max_abs_and_deviation", for_lists(&max_abs_and_deviation), arg("x"));
    m.def("squared_norm", for_lists(&squared_norm), arg("x"));
    m.def("apply_momentum", for_lists(&apply_momentum), arg("out"), arg("u"), arg("new_u"),
          py::kw_only(), arg("momentum"), arg("nesterov"));
    m.def("move", for_lists(&move), arg("x"), arg("out"), py::kw_only(), arg("scale"));
    m.def("add_up", for_lists(&add_up), arg("out"), arg("parts"));
    m.def("flush_denormals", &flush_denormals, py::kw_only(), arg("mode"));
    m.def("scatter_add", for_lists(&scatter_add), arg("out"), arg("indices"), arg("values"),
          py::kw_only(), arg("scale"));
}

}  // namespace hc::dense
