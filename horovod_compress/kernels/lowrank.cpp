// Products of a matrix M of n rows and m columns with few vectors. Those lie one behind the other: P as rank × n, Q as rank × m.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "arrays.hpp"

namespace hc {
namespace {

constexpr std::size_t kHeight = 4, kVectors = 4;  // rows and vectors worked on together: what is loaded serves several products
constexpr std::size_t kAdded = 8;                 // rows whose products are added to q's lines at once: each time these are read and written
constexpr float kMost = 0x1p109f;  // of what is left of an element: rounding alone must not take it to kTooLarge

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
    std::size_t j = 0;
    for (; j + kLanes <= m; j += kLanes) {
        Lanes lines[rows], sum;
        for (std::size_t row = 0; row < rows; ++row) {
            HC_PREFETCH(x + (row + rows) * m + j);
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
            for (std::size_t row = 0; row < rows; ++row) q[k * m + j] += x[row * m + j] * p[k * n + row];
}

// work(first row, how many, first vector, how many) as constants, in parts of at most kHeight and kVectors.
template <std::size_t rows, class Work>
HC_INLINE void by_vectors(std::size_t row, std::size_t rank, Work work) {
    std::size_t k = 0;
    const std::integral_constant<std::size_t, rows> height;
    for (; k + kVectors <= rank; k += kVectors) work(row, height, k, std::integral_constant<std::size_t, kVectors>{});
    for (; k < rank; ++k) work(row, height, k, std::integral_constant<std::size_t, 1>{});
}

HC_CLONES bool project_rows(const float* __restrict g, float* __restrict x, const float* q, float* p, std::size_t n, std::size_t m,
                            std::size_t rank) {
    std::uint32_t worst = 0;
    const auto advance = [&](std::size_t first, std::size_t count) HC_HOT {
        HC_APART
        for (std::size_t i = first; i < first + count; ++i) {
            const float moved = x[i] + g[i];
            const std::uint32_t b = magnitude(moved);
            worst = worst > b ? worst : b;
            x[i] = b < kTooLarge ? moved : x[i];
        }
    };
    const auto work = [&](std::size_t row, auto rows, std::size_t k, auto vectors) HC_HOT {
        dots<rows.value, vectors.value>(x + row * m, q + k * m, m, p + k * n + row, n);
    };
    std::size_t row = 0;
    for (; row + kHeight <= n; row += kHeight) {
        advance(row * m, kHeight * m);
        by_vectors<kHeight>(row, rank, work);
    }
    for (; row < n; ++row) {
        advance(row * m, m);
        by_vectors<1>(row, rank, work);
    }
    return worst < kTooLarge;
}

HC_CLONES void project_columns(const float* x, const float* p, float* q, std::size_t n, std::size_t m, std::size_t rank) {
    std::memset(q, 0, 4 * rank * m);
    const auto work = [&](std::size_t row, auto rows, std::size_t k, auto vectors) HC_HOT {
        add_rows<rows.value, vectors.value>(x + row * m, p + k * n + row, n, q + k * m, m);
    };
    std::size_t row = 0;
    for (; row + kAdded <= n; row += kAdded) by_vectors<kAdded>(row, rank, work);
    for (; row < n; ++row) by_vectors<1>(row, rank, work);
}

// x −= P·Qᵀ, within ±kMost; out = scale·P·Qᵀ: some rows, of which q's lines serve all.
template <std::size_t rows>
HC_INLINE void subtract_rows(float* __restrict x, const float* __restrict p, const float* __restrict q, float* __restrict out, std::size_t n,
                             std::size_t m, std::size_t rank, float scale) {
    const std::uint32_t most = bits_of(kMost);
    const auto finish = [=](std::size_t i, float product) HC_HOT {
        const std::uint32_t moved = bits_of(x[i] - product), size = moved & 0x7fffffffu;  // compared as integers: half the instructions
        x[i] = float_of((moved & 0x80000000u) | (size < most ? size : most));
        out[i] = product * scale;
    };
    std::size_t j = 0;
    for (; j + kLanes <= m; j += kLanes) {
        Lanes sums[rows] = {}, factor;
        for (std::size_t k = 0; k < rank; ++k) {
            load(factor, q + k * m + j);
            for (std::size_t row = 0; row < rows; ++row) sums[row] += factor * p[k * n + row];
        }
        for (std::size_t row = 0; row < rows; ++row) {
            float products[kLanes];
            std::memcpy(products, &sums[row], sizeof products);
            HC_APART
            for (std::size_t lane = 0; lane < kLanes; ++lane) finish(row * m + j + lane, products[lane]);
        }
    }
    for (; j < m; ++j)
        for (std::size_t row = 0; row < rows; ++row) {
            float product = 0;
            for (std::size_t k = 0; k < rank; ++k) product += q[k * m + j] * p[k * n + row];
            finish(row * m + j, product);
        }
}
HC_CLONES void subtract(float* x, const float* p, const float* q, float* out, std::size_t n, std::size_t m, std::size_t rank, float scale) {
    std::size_t row = 0;
    for (; row + kHeight <= n; row += kHeight) subtract_rows<kHeight>(x + row * m, p + row, q, out + row * m, n, m, rank, scale);
    for (; row < n; ++row) subtract_rows<1>(x + row * m, p + row, q, out + row * m, n, m, rank, scale);
}

// The dot product, and x += factor · y.
HC_CLONES double dot(const double* x, const double* y, std::size_t n) {
    constexpr std::size_t lanes = 8;
    double sums[lanes] = {}, sum = 0;
    std::size_t i = 0;
    for (; i + lanes <= n; i += lanes)
        for (std::size_t j = 0; j < lanes; ++j) sums[j] += x[i + j] * y[i + j];
    for (; i < n; ++i) sums[0] += x[i] * y[i];
    for (double its : sums) sum += its;
    return sum;
}
HC_CLONES void add_multiple(double* __restrict x, const double* __restrict y, std::size_t n, double factor) {
    for (std::size_t i = 0; i < n; ++i) x[i] += factor * y[i];
}

struct Dimensions {
    std::size_t n, m;
    Dimensions(std::size_t numel, std::size_t of_p, std::size_t of_q, std::size_t rank) {
        if (rank == 0 || of_p % rank || of_q % rank) throw std::invalid_argument("p and q hold `rank` vectors each");
        n = of_p / rank;
        m = of_q / rank;
        same_length(numel, n * m, "the matrix and its p and q");
    }
};

bool project(const Floats& grad, Floats& residual, const Floats& q, Floats& p, std::size_t rank) {
    const Dimensions is(length(residual, "residual"), length(p, "p"), length(q, "q"), rank);
    same_length(length(grad, "grad"), length(residual, "residual"), "grad and residual");
    float *x = residual.mutable_data(), *to = p.mutable_data();
    const float *g = grad.data(), *from = q.data();
    py::gil_scoped_release release;
    return project_rows(g, x, from, to, is.n, is.m, rank);
}

void project_back(const Floats& residual, const Floats& p, Floats& q, std::size_t rank) {
    const Dimensions is(length(residual, "residual"), length(p, "p"), length(q, "q"), rank);
    const float *x = residual.data(), *from = p.data();
    float* to = q.mutable_data();
    py::gil_scoped_release release;
    project_columns(x, from, to, is.n, is.m, rank);
}

void subtract_product(Floats& residual, const Floats& p, const Floats& q, Floats& out, std::size_t rank, float scale) {
    const Dimensions is(length(residual, "residual"), length(p, "p"), length(q, "q"), rank);
    same_length(length(out, "out"), length(residual, "residual"), "out and residual");
    float *x = residual.mutable_data(), *to = out.mutable_data();
    const float *left = p.data(), *right = q.data();
    py::gil_scoped_release release;
    subtract(x, left, right, to, is.n, is.m, rank, scale);
}

void orthonormalize(Floats& p, std::size_t rank) {
    const std::size_t size = length(p, "p");
    if (rank == 0 || size % rank) throw std::invalid_argument("p holds `rank` vectors");
    const std::size_t n = size / rank;
    float* vectors = p.mutable_data();
    py::gil_scoped_release release;
    std::vector<double> all(vectors, vectors + size);
    for (std::size_t k = 0; k < rank; ++k) {
        double* its = all.data() + k * n;
        const double before = std::sqrt(dot(its, its, n));
        for (int twice = 0; twice < 2; ++twice)  // once is not orthogonal enough where vectors are nearly parallel
            for (std::size_t other = 0; other < k; ++other) {
                const double* theirs = all.data() + other * n;
                add_multiple(its, theirs, n, -dot(its, theirs, n));
            }
        const double left = std::sqrt(dot(its, its, n)), factor = left > 1e-6 * before ? 1 / left : 0;
        for (std::size_t i = 0; i < n; ++i) vectors[k * n + i] = static_cast<float>(its[i] *= factor);
    }
}

}  // namespace

void bind_lowrank(py::module_& m) {
    m.def("project", &project, arg("grad").noconvert(), arg("residual").noconvert(), arg("q").noconvert(), arg("p").noconvert(),
          arg("rank"));
    m.def("project_back", &project_back, arg("residual").noconvert(), arg("p").noconvert(), arg("q").noconvert(), arg("rank"));
    m.def("subtract_product", &subtract_product, arg("residual").noconvert(), arg("p").noconvert(), arg("q").noconvert(),
          arg("out").noconvert(), arg("rank"), arg("scale"));
    m.def("orthonormalize", &orthonormalize, arg("p").noconvert(), arg("rank"));
}

}  // namespace hc
