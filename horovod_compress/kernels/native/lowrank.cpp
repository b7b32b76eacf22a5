// PowerSGD's products of a matrix M of n rows and m columns with few vectors. Those lie one behind
// the other: P as rank × n, Q as rank × m.
//
// project makes one pass over the residual M and the gradient, four rows at a time: it subtracts
// the pending product P·Qᵀ of the last step, adds the gradient, and, while the rows are in the
// cache, multiplies them with the vectors of Q, scaled, into P. project_back reads M once, eight
// rows at a time, and adds their multiples to the vectors of Q. product and subtract_product go
// over their matrix once, four rows at a time, for which a load of Q's lines serves all.
// orthonormalize is Gram-Schmidt, each vector twice, in float64.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "lists.hpp"

namespace hc::lowrank {
namespace {

using tuning::kAddedRows;
using tuning::kHeight;
using tuning::kRowsAhead;
using tuning::kVectors;

// Of what is left of an element: rounding alone must not take it to kTooLarge.
constexpr float kMost = 0x1p109f;

HC_INLINE void load(Lanes& lanes, const float* x) { std::memcpy(&lanes, x, sizeof lanes); }

// p[k·n + row] = x[row] · q[k] for some rows and vectors of m elements.
template <std::size_t rows, std::size_t vectors>
HC_INLINE void dots(const float* x, const float* q, std::size_t m, float* p, std::size_t n) {
    Lanes sums[rows][vectors] = {};
    std::size_t j = 0;
    for (; j + kLanes <= m; j += kLanes) {
        Lanes lines[rows], factor;
        for (std::size_t row = 0; row < rows; ++row) load(lines[row], x + row * m + j);
        for (std::size_t k = 0; k < vectors; ++k) {
            load(factor, q + k * m + j);
            for (std::size_t row = 0; row < rows; ++row) sums[row][k] += lines[row] * factor;
        }
    }
    for (std::size_t row = 0; row < rows; ++row)
        for (std::size_t k = 0; k < vectors; ++k) {
            float sum = static_cast<float>(total(sums[row][k]));
            for (std::size_t rest = j; rest < m; ++rest) sum += x[row * m + rest] * q[k * m + rest];
            p[k * n + row] = sum;
        }
}

// q[k] += Σ over rows of p[k·n + row] · x[row].
template <std::size_t rows, std::size_t vectors>
HC_INLINE void add_rows(const float* x, const float* p, std::size_t n, float* q, std::size_t m) {
    const std::size_t ahead = std::max(rows * m, kRowsAhead);  // the rows that come after these
    std::size_t j = 0;
    for (; j + kLanes <= m; j += kLanes) {
        Lanes lines[rows], sum;
        for (std::size_t row = 0; row < rows; ++row) {
            HC_FETCH(x + row * m + j + ahead);
            load(lines[row], x + row * m + j);
        }
        for (std::size_t k = 0; k < vectors; ++k) {
            load(sum, q + k * m + j);
            for (std::size_t row = 0; row < rows; ++row) sum += lines[row] * p[k * n + row];
            std::memcpy(q + k * m + j, &sum, sizeof sum);
        }
    }
    for (; j < m; ++j)
        for (std::size_t k = 0; k < vectors; ++k)
            for (std::size_t row = 0; row < rows; ++row)
                q[k * m + j] += x[row * m + j] * p[k * n + row];
}

// work(first row, how many, first vector, how many) as constants, in parts of at most kHeight and
// kVectors.
template <std::size_t rows, class Work>
HC_INLINE void by_vectors(std::size_t row, std::size_t rank, Work work) {
    std::size_t k = 0;
    const std::integral_constant<std::size_t, rows> height;
    for (; k + kVectors <= rank; k += kVectors)
        work(row, height, k, std::integral_constant<std::size_t, kVectors>{});
    for (; k < rank; ++k) work(row, height, k, std::integral_constant<std::size_t, 1>{});
}

// finish(i, product, count) for some rows of P·Qᵀ, of which q's lines serve all: elements i … i +
// count − 1, `count` as a constant where it is kLanes.
template <std::size_t rows, class Finish>
HC_INLINE void multiply_rows(const float* p, const float* q, std::size_t n, std::size_t m,
                             std::size_t rank, Finish finish) {
    const auto some = [&](std::size_t j, auto count) HC_HOT {
        Lanes sums[rows] = {};
        for (std::size_t k = 0; k < rank; ++k) {
            Lanes factor{};
            std::memcpy(&factor, q + k * m + j, 4 * count);
            for (std::size_t row = 0; row < rows; ++row) sums[row] += factor * p[k * n + row];
        }
        for (std::size_t row = 0; row < rows; ++row) finish(row * m + j, sums[row], count);
    };
    std::size_t j = 0;
    for (; j + kLanes <= m; j += kLanes) some(j, std::integral_constant<std::size_t, kLanes>{});
    if (j < m) some(j, m - j);
}

// x ← x − product, within ±kMost. Compared as integers: half the instructions.
HC_INLINE void leave(Lanes& x, const Lanes& product) {
    x -= product;
    WordLanes moved;
    std::memcpy(&moved, &x, sizeof moved);
    const WordLanes size = moved & 0x7fffffffu;
    const std::uint32_t most = bits_of(kMost);
    moved = (moved & 0x80000000u) | (size < most ? size : WordLanes{} + most);
    std::memcpy(&x, &moved, sizeof x);
}

// pending: the Q of a product that x still holds, whose P is in p; or null.
HC_INLINE bool project_pass(const float* __restrict g, float* __restrict x, const float* q,
                            float* p, const float* pending, std::size_t n, std::size_t m,
                            std::size_t rank) {
    WordLanes peaks{};
    const auto advance = [&](std::size_t i, const Lanes& product, auto count) HC_HOT {
        Lanes kept{}, added{};
        std::memcpy(&kept, x + i, 4 * count);
        std::memcpy(&added, g + i, 4 * count);
        if (pending) leave(kept, product);
        const Lanes moved = kept + added;
        WordLanes b;
        std::memcpy(&b, &moved, sizeof b);
        b &= 0x7fffffffu;
        peaks = peaks > b ? peaks : b;
        kept = b < kTooLarge ? moved : kept;
        std::memcpy(x + i, &kept, 4 * count);
    };
    const std::size_t ahead = std::max(kHeight * m, kRowsAhead);
    const auto part = [&](std::size_t row, auto rows) HC_HOT {
        const auto fetch_and_advance = [&](std::size_t i, const Lanes& product, auto count) HC_HOT {
            HC_FETCH(x + row * m + i + ahead);
            HC_FETCH(g + row * m + i + ahead);
            advance(row * m + i, product, count);
        };
        multiply_rows<rows.value>(p + row, pending, n, m, pending ? rank : 0, fetch_and_advance);
        by_vectors<rows.value>(
            row, rank, [&](std::size_t, auto, std::size_t k, auto vectors) HC_HOT {
                dots<rows.value, vectors.value>(x + row * m, q + k * m, m, p + k * n + row, n);
            });
    };
    std::size_t row = 0;
    for (; row + kHeight <= n; row += kHeight)
        part(row, std::integral_constant<std::size_t, kHeight>{});
    for (; row < n; ++row) part(row, std::integral_constant<std::size_t, 1>{});
    return largest_of(peaks) < kTooLarge;
}

HC_INLINE void project_back_pass(const float* x, const float* p, float* q, std::size_t n,
                                 std::size_t m, std::size_t rank) {
    std::memset(q, 0, 4 * rank * m);
    const auto work = [&](std::size_t row, auto rows, std::size_t k, auto vectors) HC_HOT {
        add_rows<rows.value, vectors.value>(x + row * m, p + k * n + row, n, q + k * m, m);
    };
    std::size_t row = 0;
    for (; row + kAddedRows <= n; row += kAddedRows) by_vectors<kAddedRows>(row, rank, work);
    for (; row < n; ++row) by_vectors<1>(row, rank, work);
}

// finish for all elements of P·Qᵀ.
template <class Finish>
HC_INLINE void multiply(const float* p, const float* q, std::size_t n, std::size_t m,
                        std::size_t rank, Finish finish) {
    const auto part = [&](std::size_t row, auto rows) HC_HOT {
        multiply_rows<rows.value>(p + row, q, n, m, rank,
                                  [&](std::size_t i, const Lanes& product, auto count)
                                      HC_HOT { finish(row * m + i, product, count); });
    };
    std::size_t row = 0;
    for (; row + kHeight <= n; row += kHeight)
        part(row, std::integral_constant<std::size_t, kHeight>{});
    for (; row < n; ++row) part(row, std::integral_constant<std::size_t, 1>{});
}
HC_INLINE void subtract_product_pass(float* x, const float* p, const float* q, std::size_t n,
                                     std::size_t m, std::size_t rank) {
    multiply(p, q, n, m, rank, [=](std::size_t i, const Lanes& product, auto count) HC_HOT {
        Lanes kept{};
        std::memcpy(&kept, x + i, 4 * count);
        leave(kept, product);
        std::memcpy(x + i, &kept, 4 * count);
    });
}
HC_INLINE bool product_pass(float* out, const float* p, const float* q, std::size_t n,
                            std::size_t m, std::size_t rank, float scale) {
    const std::size_t ahead = std::max(kHeight * m, kRowsAhead);
    WordLanes peaks{};
    multiply(p, q, n, m, rank, [&](std::size_t i, const Lanes& product, auto count) HC_HOT {
        HC_FETCH(out + i + ahead);
        const Lanes scaled = product * scale;
        std::memcpy(out + i, &scaled, 4 * count);
        WordLanes b;
        std::memcpy(&b, &scaled, sizeof b);
        b &= 0x7fffffffu;
        peaks = peaks > b ? peaks : b;
    });
    return largest_of(peaks) < kInfinity;
}

// The dot product, and x += factor · y.
HC_INLINE double dot(const double* x, const double* y, std::size_t n) {
    constexpr std::size_t lanes = 8;
    double sums[lanes] = {}, sum = 0;
    std::size_t i = 0;
    for (; i + lanes <= n; i += lanes)
        for (std::size_t j = 0; j < lanes; ++j) sums[j] += x[i + j] * y[i + j];
    for (; i < n; ++i) sums[0] += x[i] * y[i];
    for (double lane : sums) sum += lane;
    return sum;
}
HC_INLINE void add_multiple(double* __restrict x, const double* __restrict y, std::size_t n,
                            double factor) {
    for (std::size_t i = 0; i < n; ++i) x[i] += factor * y[i];
}

struct Dimensions {
    std::size_t n, m;
    Dimensions(std::size_t numel, std::size_t of_p, std::size_t of_q, std::size_t rank) {
        if (rank == 0 || of_p % rank || of_q % rank)
            throw std::invalid_argument("p and q hold `rank` vectors each");
        n = of_p / rank;
        m = of_q / rank;
        same_length(numel, n * m, "the matrix and its p and q");
    }
};

void project(const Floats& grad, Floats& residual, const Floats& q, Floats& p, std::size_t rank,
             bool pending, double length) {
    const Dimensions is(hc::length(residual, "residual"), hc::length(p, "p"), hc::length(q, "q"),
                        rank);
    same_length(hc::length(grad, "grad"), hc::length(residual, "residual"), "grad and residual");
    float *x = residual.mutable_data(), *to = p.mutable_data();
    const float *g = grad.data(), *last = q.data();
    py::gil_scoped_release release;
    std::vector<float> scaled(last, last + rank * is.m);
    for (float& each : scaled) each = static_cast<float>(each / length);
    if (!dispatch<project_pass>(g, x, scaled.data(), to, pending ? last : nullptr, is.n, is.m,
                                rank))
        std::fill(to, to + rank * is.n, std::numeric_limits<float>::quiet_NaN());
}

void project_back(const Floats& residual, const Floats& p, Floats& q, std::size_t rank) {
    const Dimensions is(length(residual, "residual"), length(p, "p"), length(q, "q"), rank);
    const float *x = residual.data(), *from = p.data();
    float* to = q.mutable_data();
    py::gil_scoped_release release;
    dispatch<project_back_pass>(x, from, to, is.n, is.m, rank);
}

void subtract_product(Floats& residual, const Floats& p, const Floats& q, std::size_t rank) {
    const Dimensions is(length(residual, "residual"), length(p, "p"), length(q, "q"), rank);
    float* x = residual.mutable_data();
    const float *left = p.data(), *right = q.data();
    py::gil_scoped_release release;
    dispatch<subtract_product_pass>(x, left, right, is.n, is.m, rank);
}

bool product(const Floats& p, const Floats& sums, Floats& q, Floats& out, std::size_t rank,
             float scale, float size) {
    const Dimensions is(length(out, "out"), length(p, "p"), length(q, "q"), rank);
    same_length(length(sums, "sums"), length(q, "q"), "sums and q");
    float *to = out.mutable_data(), *right = q.mutable_data();
    const float *left = p.data(), *total = sums.data();
    py::gil_scoped_release release;
    for (std::size_t i = 0; i < rank * is.m; ++i) right[i] = total[i] / size;
    return dispatch<product_pass>(to, left, right, is.n, is.m, rank, scale);
}

void orthonormalize(const Floats& sums, Floats& p, std::size_t rank) {
    const std::size_t size = length(p, "p");
    if (rank == 0 || size % rank) throw std::invalid_argument("p holds `rank` vectors");
    same_length(length(sums, "sums"), size, "sums and p");
    const std::size_t n = size / rank;
    const float* vectors = sums.data();
    float* to = p.mutable_data();
    py::gil_scoped_release release;
    std::vector<double> all(vectors, vectors + size);
    for (std::size_t k = 0; k < rank; ++k) {
        double* vector = all.data() + k * n;
        const double before = std::sqrt(dispatch<dot>(vector, vector, n));
        // Once is not orthogonal enough where vectors are nearly parallel.
        for (int twice = 0; twice < 2; ++twice)
            for (std::size_t other = 0; other < k; ++other) {
                const double* earlier = all.data() + other * n;
                dispatch<add_multiple>(vector, earlier, n, -dispatch<dot>(vector, earlier, n));
            }
        const double left = std::sqrt(dispatch<dot>(vector, vector, n)),
                     factor = left > 1e-6 * before ? 1 / left : 0;
        for (std::size_t i = 0; i < n; ++i) to[k * n + i] = static_cast<float>(vector[i] *= factor);
    }
}

}  // namespace

void bind(py::module_& m) {
    m.def("project", for_lists(&project), arg("grad"), arg("residual"), arg("q"), arg("p"),
          py::kw_only(), arg("rank"), arg("pending"), arg("length"));
    m.def("project_back", for_lists(&project_back), arg("residual"), arg("p"), arg("q"),
          py::kw_only(), arg("rank"));
    m.def("subtract_product", for_lists(&subtract_product), arg("residual"), arg("p"), arg("q"),
          py::kw_only(), arg("rank"));
    m.def("product", for_lists(&product), arg("p"), arg("sums"), arg("q"), arg("out"),
          py::kw_only(), arg("rank"), arg("scale"), arg("size"));
    m.def("orthonormalize", for_lists(&orthonormalize), arg("sums"), arg("p"), py::kw_only(),
          arg("rank"));
}

}  // namespace hc::lowrank
