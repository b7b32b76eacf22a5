// What each sample contributes to a product of matrices, squared and summed, for variance's
// moments.
//
// For each sample, 16 columns of the right matrix are copied side by side; six rows of the left one
// times these columns are summed over places in registers, squared, and added to `squares` (and
// `sums`). No sample's product is ever written to memory. The left matrix is copied first where its
// rows lie together, and read in place where it is a view of overlapping windows.
#include <algorithm>

#include "arrays.hpp"

namespace hc::samples {
namespace {

using tuning::kTall;

// Where elements are, in floats from a sample's first.
using Offsets = std::vector<std::ptrdiff_t>;

// A matrix (place, element) a sample, anywhere in memory.
struct Matrices {
    const float* first;
    std::ptrdiff_t sample;
    Offsets places, elements;
};

HC_INLINE void add(float* to, const Lanes& lanes, std::size_t count) {
    Lanes sum{};
    if (count == kLanes) {
        std::memcpy(&sum, to, sizeof sum);
        sum += lanes;
        std::memcpy(to, &sum, sizeof sum);
    } else {
        for (std::size_t c = 0; c < count; ++c) to[c] += lanes[c];
    }
}

// panel[place · kLanes + c] = column first + c of one sample; 0 behind the last one.
HC_INLINE void gather_columns(const float* sample, const Matrices& right, std::size_t first,
                              float* panel) {
    const std::size_t places = right.places.size(),
                      count = std::min(kLanes, right.elements.size() - first);
    const std::ptrdiff_t *places_at = right.places.data(), *at = right.elements.data() + first;
    if (count == kLanes && at[kLanes - 1] - at[0] == kLanes - 1) {
        for (std::size_t p = 0; p < places; ++p)
            std::memcpy(panel + p * kLanes, sample + places_at[p] + at[0], 4 * kLanes);
        return;
    }
    for (std::size_t c = 0; c < kLanes; ++c)
        for (std::size_t p = 0; p < places; ++p)
            panel[p * kLanes + c] = c < count ? sample[places_at[p] + at[c]] : 0;
}

// strip[(row · places + place · kTall) + k] = row row + k of one sample, for each kTall rows; the
// last row again behind it.
HC_INLINE void gather_rows(const float* sample, const Matrices& left, float* strip) {
    const std::size_t rows = left.elements.size(), places = left.places.size();
    for (std::size_t row = 0; row < rows; row += kTall)
        for (std::size_t p = 0; p < places; ++p)
            for (std::size_t k = 0; k < kTall; ++k)
                strip[row * places + p * kTall + k] =
                    sample[left.places[p] + left.elements[std::min(row + k, rows - 1)]];
}

// Rows that lie together are gathered first: at their places the caches' sets would collide. Those
// of a convolution's windows overlap and stay where they are.
HC_INLINE void add_products(const Matrices& left, const Matrices& right, std::size_t samples,
                            bool gathers, float* squares, float* sums, float* panel, float* strip) {
    const std::size_t rows = left.elements.size(), columns = right.elements.size(),
                      places = left.places.size();
    std::ptrdiff_t offsets[kTall];
    for (std::size_t k = 0; k < kTall; ++k) offsets[k] = static_cast<std::ptrdiff_t>(k);
    for (std::size_t z = 0; z < samples; ++z) {
        const float* lefts = left.first + static_cast<std::ptrdiff_t>(z) * left.sample;
        if (gathers) gather_rows(lefts, left, strip);
        for (std::size_t column = 0; column < columns; column += kLanes) {
            gather_columns(right.first + static_cast<std::ptrdiff_t>(z) * right.sample, right,
                           column, panel);
            for (std::size_t row = 0; row < rows; row += kTall) {
                if (!gathers)
                    for (std::size_t k = 0; k < kTall; ++k)
                        offsets[k] = left.elements[std::min(row + k, rows - 1)];
                const float* from = gathers ? strip + row * places : lefts;
                Lanes products[kTall] = {};
                for (std::size_t p = 0; p < places; ++p) {
                    Lanes line;
                    std::memcpy(&line, panel + p * kLanes, sizeof line);
                    const float* at =
                        from + (gathers ? static_cast<std::ptrdiff_t>(p * kTall) : left.places[p]);
                    HC_UNROLL
                    for (std::size_t k = 0; k < kTall; ++k) products[k] += at[offsets[k]] * line;
                }
                const std::size_t height = std::min(kTall, rows - row),
                                  width = std::min(kLanes, columns - column);
                for (std::size_t k = 0; k < height; ++k) {
                    add(squares + (row + k) * columns + column, products[k] * products[k], width);
                    if (sums) add(sums + (row + k) * columns + column, products[k], width);
                }
            }
        }
    }
}

// The offsets of an array's elements along some of its dimensions, in row-major order.
Offsets offsets_of(const py::array_t<float>& array, py::ssize_t from, py::ssize_t to) {
    Offsets offsets{0};
    for (py::ssize_t d = from; d < to; ++d) {
        Offsets finer;
        finer.reserve(offsets.size() * static_cast<std::size_t>(array.shape(d)));
        for (std::ptrdiff_t offset : offsets)
            for (py::ssize_t i = 0; i < array.shape(d); ++i)
                finer.push_back(offset + i * array.strides(d) / 4);
        offsets.swap(finer);
    }
    return offsets;
}

void add_sample_squares(const py::array_t<float>& left, const py::array_t<float>& right,
                        Floats& squares, std::optional<Floats> sums) {
    const py::ssize_t split = right.ndim() - 1;
    if (split < 1 || left.ndim() < split + 1)
        throw std::invalid_argument("left and right must be (samples, places …, elements …)");
    for (py::ssize_t d = 0; d < split; ++d)
        if (left.shape(d) != right.shape(d))
            throw std::invalid_argument("left and right must have the same samples and places");
    for (const auto* array : {&left, &right})
        for (py::ssize_t d = 0; d < array->ndim(); ++d)
            if (array->strides(d) % 4)
                throw std::invalid_argument("left and right must be aligned");
    const Matrices rows{left.data(), left.strides(0) / 4, offsets_of(left, 1, split),
                        offsets_of(left, split, left.ndim())};
    const Matrices columns{right.data(), right.strides(0) / 4, offsets_of(right, 1, split),
                           offsets_of(right, split, split + 1)};
    const std::size_t numel = rows.elements.size() * columns.elements.size(),
                      places = rows.places.size();
    same_length(numel, length(squares, "squares"), "squares and the product");
    if (sums) same_length(numel, length(*sums, "sums"), "sums and the product");
    float *to = squares.mutable_data(), *also = sums ? sums->mutable_data() : nullptr;
    if (!numel || !places) return;
    const bool gathers = left.ndim() == right.ndim();
    std::vector<float> panel(places * kLanes),
        strip(gathers ? places * (rows.elements.size() + kTall) : 0);
    py::gil_scoped_release release;
    dispatch<add_products>(rows, columns, static_cast<std::size_t>(left.shape(0)), gathers, to,
                           also, panel.data(), strip.data());
}

}  // namespace

void bind(py::module_& m) {
    m.def("add_sample_squares", &add_sample_squares, arg("left").noconvert(),
          arg("right").noconvert(), arg("squares").noconvert(),
          arg("sums").noconvert().none(true) = py::none());
}

}  // namespace hc::samples
