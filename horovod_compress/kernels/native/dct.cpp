// Chunks of a matrix in the discrete cosine transform, and the largest coefficients of each (DeMo,
// arXiv 2411.19870).
//
// encode_dct goes through the matrix chunk by chunk: it advances the residual, sets the gradient to
// zero, and transforms the chunk by two products with small matrices, while it is in the cache; the
// largest coefficients are chosen as in a chunk of top-k. When all are chosen their values are
// coded, because their scales are the whole tensor's. A second pass subtracts what they decode to,
// chunk by chunk.
//
// Decoding multiplies only rows of coefficients that are not empty: the products of zeros that it
// leaves out change no sum. Every sum is added up in the order of its terms, 16 sums side by side,
// so all instructions, and the reference, give the same bits.
#include <algorithm>
#include <vector>

#include "lists.hpp"
#include "select.hpp"

namespace hc::dct {
namespace {

using tuning::kHeight;

// Bits of 2^109, of what is left of an element: what was sent must not take it to kTooLarge.
constexpr std::uint32_t kMost = 0x76000000;

std::size_t side(const Floats& matrix, const char* what) {
    const std::size_t size = length(matrix, what);
    std::size_t n = 1;
    while (n * n < size) ++n;
    if (n * n != size) throw std::invalid_argument(std::string(what) + " must be a square matrix");
    return n;
}

std::size_t padded(std::size_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// A tensor as a matrix of whole chunks.
struct Grid {
    // Elements; columns of the matrix; rows and columns of a chunk.
    std::size_t n, width, h, w;

    Grid(std::size_t numel, std::size_t columns, const Floats& of_rows, const Floats& of_columns)
        : n(numel), width(columns), h(side(of_rows, "rows")), w(side(of_columns, "columns")) {
        if (width == 0 || width % w || n % width || n / width % h)
            throw std::invalid_argument("the tensor must be a matrix of whole chunks");
        if (n > 0xffffffffu) throw std::invalid_argument("a tensor has at most 2^32 - 1 elements");
    }
    std::size_t size() const { return h * w; }
    std::size_t chunks() const { return n / size(); }
    // Where a chunk's first element is.
    std::size_t first(std::size_t chunk) const {
        return chunk / (width / w) * h * width + chunk % (width / w) * w;
    }
};

// Memory of one thread, reused between calls. Rows of matrices on the right of a product, and of
// products, are padded to whole vectors.
struct Scratch {
    std::vector<float> columns, transposed_columns;  // w × padded w
    std::vector<float> left, half, whole, dense;  // h × h; h × padded w, twice; h × w
    std::vector<std::uint32_t> indices;
    std::vector<float> values, coded;
    std::vector<selection::Candidate> candidates;
    std::vector<std::uint32_t> magnitudes;

    void prepare(const Grid& grid, const float* d) {
        const std::size_t w = grid.w, stride = padded(w);
        for (auto* matrix : {&columns, &transposed_columns}) matrix->assign(w * stride, 0.0f);
        for (auto* matrix : {&half, &whole}) matrix->assign(grid.h * stride, 0.0f);
        left.resize(grid.h * grid.h);
        dense.resize(grid.size());
        for (std::size_t i = 0; i < w; ++i)
            for (std::size_t j = 0; j < w; ++j)
                columns[i * stride + j] = transposed_columns[j * stride + i] = d[i * w + j];
    }
};
thread_local Scratch scratch;

// `count` rows of left · right, 16 columns at a time: left has `inner` columns, right as many rows
// of `stride` floats.
template <std::size_t count>
HC_INLINE void multiply_rows(const float* left, std::size_t left_stride, std::size_t inner,
                             const float* right, std::size_t stride, float* out) {
    for (std::size_t column = 0; column < stride; column += kLanes) {
        Lanes sums[count] = {}, line;
        for (std::size_t i = 0; i < inner; ++i) {
            std::memcpy(&line, right + i * stride + column, sizeof line);
            for (std::size_t row = 0; row < count; ++row)
                sums[row] += left[row * left_stride + i] * line;
        }
        for (std::size_t row = 0; row < count; ++row)
            std::memcpy(out + row * stride + column, &sums[row], sizeof sums[row]);
    }
}
HC_INLINE void multiply(const float* left, std::size_t left_stride, std::size_t rows,
                        std::size_t inner, const float* right, std::size_t stride, float* out) {
    std::size_t row = 0;
    for (; row + kHeight <= rows; row += kHeight)
        multiply_rows<kHeight>(left + row * left_stride, left_stride, inner, right, stride,
                               out + row * stride);
    for (; row < rows; ++row)
        multiply_rows<1>(left + row * left_stride, left_stride, inner, right, stride,
                         out + row * stride);
}

// Leaves in s.whole what `count` coefficients of a chunk decode to. Indices ascend, and count from
// `first` on.
HC_INLINE void inverse(const Grid& grid, const float* rows, const std::uint32_t* indices,
                       const float* values, std::size_t count, std::size_t first, Scratch& s) {
    const std::size_t h = grid.h, w = grid.w, stride = padded(w);
    // Rows of coefficients that are not empty, and which was the last.
    std::size_t used = 0, last = h;
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t place = indices[i] - first, row = place / w;
        float* half = s.half.data() + used * stride;
        if (row != last) {
            for (std::size_t j = 0; j < h; ++j) s.left[j * h + used] = rows[row * h + j];
            std::fill_n(half, stride, 0.0f);
            last = row;
            ++used;
        } else {
            half -= stride;
        }
        const float* wave = s.columns.data() + place % w * stride;
        for (std::size_t j = 0; j < stride; ++j) half[j] += values[i] * wave[j];
    }
    multiply(s.left.data(), h, h, used, s.half.data(), stride, s.whole.data());
}

// use(to, decoded, count) for every row of every chunk that has coefficients.
template <class Use>
HC_INLINE void each_decoded_row(const Grid& grid, const float* rows, const std::uint32_t* indices,
                                const float* values, std::size_t count, float* to, Scratch& s,
                                Use use) {
    for (std::size_t begin = 0; begin < count;) {
        const std::size_t chunk = indices[begin] / grid.size(), first = chunk * grid.size();
        std::size_t end = begin + 1;
        while (end < count && indices[end] - first < grid.size()) ++end;
        inverse(grid, rows, indices + begin, values + begin, end - begin, first, s);
        for (std::size_t row = 0; row < grid.h; ++row)
            use(to + grid.first(chunk) + row * grid.width, s.whole.data() + row * padded(grid.w),
                grid.w);
        begin = end;
    }
}

// The residual advances, and coefficients are chosen into s.indices and s.values. Returns whether
// all of it was finite.
HC_INLINE bool choose(const Grid& grid, const float* rows, float* g, float* r, float decay,
                      float scale, std::size_t k, Scratch& s) {
    const std::size_t h = grid.h, w = grid.w, stride = padded(w), wanted = std::min(k, grid.size());
    selection::TopK top(s.candidates, s.magnitudes);
    std::uint32_t worst = 0, floor = 1;
    s.indices.clear();
    s.values.clear();
    for (std::size_t chunk = 0; chunk < grid.chunks(); ++chunk) {
        const std::size_t first = grid.first(chunk);
        for (std::size_t row = 0; row < h; ++row) {
            float *added = g + first + row * grid.width, *kept = r + first + row * grid.width;
            HC_APART
            for (std::size_t j = 0; j < w; ++j) {
                const float old = kept[j], moved = decay * old + scale * added[j];
                const std::uint32_t b = magnitude(moved);
                worst = worst > b ? worst : b;
                kept[j] = b < kTooLarge ? moved : old;
                added[j] = 0;
            }
        }
        multiply(r + first, grid.width, h, w, s.transposed_columns.data(), stride, s.half.data());
        multiply(rows, h, h, h, s.half.data(), stride, s.whole.data());
        for (std::size_t row = 0; row < h; ++row)
            std::copy_n(s.whole.data() + row * stride, w, s.dense.data() + row * w);
        const float* coefficients = s.dense.data();
        floor = selection::largest_of_chunk(
            coefficients, grid.size(), wanted, floor, top,
            [=](std::size_t i, std::size_t count) { return peak_of(coefficients + i, count); });
        for (std::size_t i = 0; i < top.count(); ++i) {
            s.indices.push_back(static_cast<std::uint32_t>(chunk * grid.size()) + top[i].index);
            s.values.push_back(coefficients[top[i].index]);
        }
    }
    return worst < kTooLarge;
}

// Codes what was chosen, and leaves out what has no code. Returns how many coefficients are sent.
HC_INLINE std::size_t code(Values kind, float* scales, Scratch& s) {
    const std::size_t n = s.indices.size();
    s.coded.resize(n);
    code_values(s.values.data(), n, kind, s.coded.data(), scales);
    if (kind != Values::power) return n;
    std::size_t sent = 0;
    for (std::size_t i = 0; i < n; ++i) {
        s.indices[sent] = s.indices[i];
        s.coded[sent] = s.coded[i];
        sent += s.coded[i] != 0;
    }
    return sent;
}

HC_INLINE std::size_t encode_pass(const Grid& grid, const float* rows, float* g, float* r,
                                  float decay, float scale, std::size_t k, Values kind,
                                  float* scales, bool* finite, Scratch& s) {
    *finite = choose(grid, rows, g, r, decay, scale, k, s);
    if (!*finite) s.indices.clear(), s.values.clear();
    const std::size_t sent = code(kind, scales, s);
    each_decoded_row(grid, rows, s.indices.data(), s.coded.data(), sent, r, s,
                     [](float* kept, const float* decoded, std::size_t count) HC_HOT {
                         for (std::size_t j = 0; j < count; ++j) {
                             const float left = kept[j] - decoded[j];
                             const std::uint32_t b = bits_of(left), a = b & 0x7fffffffu;
                             kept[j] = float_of((b & 0x80000000u) | (a < kMost ? a : kMost));
                         }
                     });
    return sent;
}

HC_INLINE bool decode_add_pass(const Grid& grid, const float* rows, sparse::Entries entries,
                               float* out, float scale, Scratch& s) {
    std::uint32_t peak = 0;
    each_decoded_row(grid, rows, entries.indices, entries.values, entries.count, out, s,
                     [&](float* to, const float* decoded, std::size_t count) HC_HOT {
                         for (std::size_t j = 0; j < count; ++j) {
                             to[j] += scale * decoded[j];
                             peak = peak > magnitude(to[j]) ? peak : magnitude(to[j]);
                         }
                     });
    return peak < kInfinity;
}

py::object encode_dct(Floats& grad, Floats& residual, const Floats& rows, const Floats& columns,
                      std::size_t width, std::size_t k, float decay, float scale, Values kind) {
    const Grid grid(length(grad, "grad"), width, rows, columns);
    same_length(grid.n, length(residual, "residual"), "grad and residual");
    float *g = grad.mutable_data(), *r = residual.mutable_data(), scales[kMostScales] = {};
    const float *of_rows = rows.data(), *of_columns = columns.data();
    Scratch& s = scratch;
    std::size_t sent;
    bool finite;
    {
        py::gil_scoped_release release;
        s.prepare(grid, of_columns);
        sent =
            dispatch<encode_pass>(grid, of_rows, g, r, decay, scale, k, kind, scales, &finite, s);
    }
    return encoded(sparse::body_of(s.indices.data(), s.coded.data(), sent, kind, scales), sent,
                   finite);
}

bool decode_add_dct(Floats& out, const Bytes& body, const Floats& rows, const Floats& columns,
                    std::size_t width, float scale) {
    const Grid grid(length(out, "out"), width, rows, columns);
    const std::size_t size = length(body, "body");
    const std::uint8_t* bytes = body.data();
    const float *of_rows = rows.data(), *of_columns = columns.data();
    float* to = out.mutable_data();
    Scratch& s = scratch;
    py::gil_scoped_release release;
    const sparse::Entries entries = sparse::entries_of(bytes, size, grid.n);
    s.prepare(grid, of_columns);
    return dispatch<decode_add_pass>(grid, of_rows, entries, to, scale, s);
}

}  // namespace

void bind(py::module_& m) {
    m.def("encode_dct", for_lists(&encode_dct), arg("grad"), arg("residual"), arg("rows"),
          arg("columns"), py::kw_only(), arg("width"), arg("k"), arg("decay"), arg("scale") = 1.0f,
          arg("kind"));
    m.def("decode_add_dct", for_lists(&decode_add_dct), arg("out"), arg("body"), arg("rows"),
          arg("columns"), py::kw_only(), arg("width"), arg("scale"));
}

}  // namespace hc::dct
