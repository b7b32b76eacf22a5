// Whole tensors in narrower numbers: 16-bit floats, one bit for the sign, nine bits for sign and
// exponent.
//
// float16, bfloat16 and natural compression read the gradient once and write the codes once; the
// two that gather set the gradient to zero in the same turn, while it is in the cache. Natural
// compression goes by blocks of 512: peak, codes by an addition of random bits, columns. All keep
// the largest magnitude as integer bits, which says in the end whether everything was finite.
//
// One-bit compression takes two passes over the residual. The first adds the gradient, sets that to
// zero, and sums the positive and the negative half: short sums in float32, the long one in
// float64. The second writes the sign bits and subtracts what they decode to.
//
// Decoding reads codes and adds to the output in one pass each.
#include <cmath>

#include "columns.hpp"
#include "fields.hpp"
#include "lists.hpp"

namespace hc::codes {
namespace {

using tuning::kFloatSum;

// float32 to float16, ties to even, without a branch: numbers below the normal ones are rounded by
// an addition.
HC_INLINE std::uint32_t encode_float16_pass(const float* __restrict x,
                                            std::uint16_t* __restrict out, std::size_t n) {
    std::uint32_t peak = 0;
    by_stretches(n, [&](std::size_t first, std::size_t count) HC_HOT {
        prefetch_ahead(x + first, count);
        prefetch_ahead(out + first, count);
        for (std::size_t i = first; i < first + count; ++i) {
            const std::uint32_t b = bits_of(x[i]), a = b & 0x7fffffffu;
            peak = peak > a ? peak : a;
            float magnitude;
            std::memcpy(&magnitude, &a, 4);
            // 0.5 has steps of 2^-24 above it.
            const std::uint32_t small = bits_of(magnitude + 0.5f) - 0x3f000000u;
            const std::uint32_t normal = (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13;
            const std::uint32_t finite = a < 0x38800000u ? small : normal;
            const std::uint32_t half = a > kInfinity      ? 0x7e00u
                                       : finite < 0x7c00u ? finite
                                                          : 0x7c00u;
            out[i] = static_cast<std::uint16_t>(half | (b >> 16 & 0x8000u));
        }
    });
    return peak;
}
HC_INLINE std::uint32_t decode_float16_pass(const std::uint16_t* half, float* to, std::size_t n) {
    Output out(to, n);
    std::uint32_t peak = 0;
    by_stretches(n, [&](std::size_t first, std::size_t count) HC_HOT {
        out.append(count, [&](std::size_t j) HC_HOT {
            const std::uint32_t h = half[first + j], a = h & 0x7fffu;
            // Below the normal numbers, as an integer: some processors are slow with denormals.
            const float below = static_cast<float>(static_cast<std::int32_t>(a)) * 0x1p-24f;
            const std::uint32_t normal = (a << 13) + (a < 0x7c00u ? 0x38000000u : 0x70000000u);
            const std::uint32_t b = a < 0x0400u ? bits_of(below) : normal;
            peak = peak > b ? peak : b;
            return float_of(b | (h & 0x8000u) << 16);
        });
    });
    return peak;
}

float encode_float16(const Floats& x, Array<std::uint16_t>& half) {
    const std::size_t n = length(x, "x");
    same_length(n, length(half, "half"), "x and half");
    const float* from = x.data();
    std::uint16_t* to = half.mutable_data();
    py::gil_scoped_release release;
    return float_of(std::min(dispatch<encode_float16_pass>(from, to, n), kInfinity));
}
float decode_float16(const Array<std::uint16_t>& half, Floats& out) {
    const std::size_t n = length(out, "out");
    same_length(n, length(half, "half"), "half and out");
    const std::uint16_t* from = half.data();
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    return float_of(std::min(dispatch<decode_float16_pass>(from, to, n), kInfinity));
}

HC_INLINE std::uint32_t encode_bf16_pass(float* __restrict g, std::uint8_t* __restrict out,
                                         std::size_t n) {
    std::uint32_t peak = 0;
    by_stretches(n, [&](std::size_t first, std::size_t count) HC_HOT {
        prefetch_ahead(g + first, count);
        prefetch_ahead(out + 2 * first, 2 * count);
        HC_APART
        for (std::size_t i = first; i < first + count; ++i) {
            const std::uint32_t b = bits_of(g[i]), a = b & 0x7fffffffu;
            peak = peak > a ? peak : a;
            const std::uint32_t rounded = (a + 0x7fffu + (a >> 16 & 1u)) >> 16;
            const auto half = static_cast<std::uint16_t>((rounded < 0x7f7fu ? rounded : 0x7f7fu) |
                                                         (b >> 16 & 0x8000u));
            std::memcpy(out + 2 * i, &half, 2);
            g[i] = 0;
        }
    });
    return peak;
}
HC_INLINE std::uint32_t decode_add_bf16_pass(const std::uint8_t* __restrict in,
                                             float* __restrict out, std::size_t n, float scale) {
    std::uint32_t peak = 0;
    by_stretches(n, [&](std::size_t first, std::size_t count) HC_HOT {
        prefetch_ahead(out + first, count);
        HC_APART
        for (std::size_t i = first; i < first + count; ++i) {
            std::uint16_t half;
            std::memcpy(&half, in + 2 * i, 2);
            const std::uint32_t b = std::uint32_t{half} << 16;
            float value;
            std::memcpy(&value, &b, 4);
            out[i] += scale * value;
            const std::uint32_t a = magnitude(out[i]);
            peak = peak > a ? peak : a;
        }
    });
    return peak;
}

py::object encode_bf16(Floats& grad, std::optional<Bytes> spare) {
    const std::size_t n = length(grad, "grad");
    Bytes buffer = body_in(spare, 2 * n);
    float* g = grad.mutable_data();
    std::uint8_t* out = buffer.mutable_data() + kHeadroom;
    bool finite;
    {
        py::gil_scoped_release release;
        finite = dispatch<encode_bf16_pass>(g, out, n) < kInfinity;
    }
    return encoded(buffer, n, finite);
}
// The body's bytes, which must be `size`.
const std::uint8_t* exactly(const Bytes& body, std::size_t size) {
    if (length(body, "body") != size)
        throw std::invalid_argument("not of the length that a tensor of this size has");
    return body.data();
}
bool decode_add_bf16(Floats& out, const Bytes& body, float scale) {
    const std::size_t n = length(out, "out");
    const std::uint8_t* in = exactly(body, 2 * n);
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    return dispatch<decode_add_bf16_pass>(in, to, n, scale) < kInfinity;
}

// One bit an element: 1 where it is negative.
struct Halves {
    double sum[2];
    std::uint64_t count[2];
    bool finite;
};
HC_INLINE Halves add_to_halves(float* __restrict g, float* __restrict r, std::size_t n,
                               float growth) {
    constexpr std::size_t lanes = 16;
    std::uint32_t worst = 0;
    Halves total{};
    for (std::size_t begin = 0; begin < n; begin += kFloatSum) {
        const std::size_t end = std::min(n, begin + kFloatSum);
        // Short sums in float32, the long one in float64.
        float negative[lanes] = {}, positive[lanes] = {};
        std::uint32_t negatives[lanes] = {}, peaks[lanes] = {};
        const auto line = [&](std::size_t i, std::size_t count) HC_HOT {
            for (std::size_t j = 0; j < count; ++j) {
                const float grown = growth * r[i + j], moved = grown + g[i + j];
                const std::uint32_t b = magnitude(moved);
                peaks[j] = peaks[j] > b ? peaks[j] : b;
                const float kept = b < kTooLarge                  ? moved
                                   : magnitude(grown) < kTooLarge ? grown
                                                                  : r[i + j];
                r[i + j] = kept;
                g[i + j] = 0;
                negatives[j] += kept < 0;
                negative[j] += kept < 0 ? -kept : 0.0f;
                positive[j] += kept > 0 ? kept : 0.0f;
            }
        };
        std::size_t i = begin;
        for (; i + lanes <= end; i += lanes) {
            prefetch_ahead(g + i, lanes);
            prefetch_ahead(r + i, lanes);
            line(i, lanes);
        }
        line(i, end - i);
        for (std::size_t j = 0; j < lanes; ++j) {
            worst = std::max(worst, peaks[j]);
            total.sum[1] += negative[j];
            total.sum[0] += positive[j];
            total.count[1] += negatives[j];
        }
    }
    total.count[0] = n - total.count[1];
    total.finite = worst < kTooLarge && std::isfinite(total.sum[0] + total.sum[1]);
    return total;
}
HC_INLINE void encode_one_bit_pass(float* __restrict r, std::uint8_t* bits, const Layout& layout,
                                   float plus, float minus) {
    pack<std::int32_t>(bits, layout, [=](std::size_t first, std::size_t count, auto put) HC_HOT {
        prefetch_ahead(r + first, count);
        HC_APART
        for (std::size_t j = 0; j < count; ++j) {
            const bool below = r[first + j] < 0;
            put(j, below);
            r[first + j] -= below ? minus : plus;
        }
    });
}
HC_INLINE std::uint32_t decode_add_one_bit_pass(const std::uint8_t* bits, float* __restrict out,
                                                const Layout& layout, float plus, float minus) {
    std::uint32_t peak = 0;
    unpack<std::int32_t>(bits, layout, 0,
                         [&](std::size_t first, std::size_t count, auto sign) HC_HOT {
                             prefetch_ahead(out + first, count);
                             HC_APART
                             for (std::size_t j = 0; j < count; ++j) {
                                 out[first + j] += sign(j) ? minus : plus;
                                 const std::uint32_t a = magnitude(out[first + j]);
                                 peak = peak > a ? peak : a;
                             }
                         });
    return peak;
}

py::object encode_one_bit(Floats& grad, Floats& residual, std::optional<Bytes> spare, float growth,
                          bool symmetric) {
    const std::size_t n = length(grad, "grad");
    same_length(n, length(residual, "residual"), "grad and residual");
    float *g = grad.mutable_data(), *r = residual.mutable_data();
    const Layout layout(n, 1, 0);
    Bytes buffer = body_in(spare, 8 + 4 * layout.words);
    std::uint8_t* out = buffer.mutable_data() + kHeadroom;
    Halves halves;
    {
        py::gil_scoped_release release;
        halves = dispatch<add_to_halves>(g, r, n, growth);
        float units[2] = {};
        if (halves.finite && n) {
            const double both = (halves.sum[0] + halves.sum[1]) / static_cast<double>(n);
            for (int i = 0; i < 2; ++i) {
                const double mean = symmetric ? both
                                    : halves.count[i]
                                        ? halves.sum[i] / static_cast<double>(halves.count[i])
                                        : 0;
                units[i] = static_cast<float>(i ? -mean : mean);
            }
        }
        std::memcpy(out, units, sizeof units);
        dispatch<encode_one_bit_pass>(r, out + sizeof units, layout, units[0], units[1]);
    }
    return encoded(buffer, n, halves.finite);
}
bool decode_add_one_bit(Floats& out, const Bytes& body, float scale) {
    const std::size_t n = length(out, "out");
    const Layout layout(n, 1, 0);
    const std::uint8_t* in = exactly(body, 8 + 4 * layout.words);
    float units[2];
    std::memcpy(units, in, sizeof units);
    if (!(magnitude(units[0]) < kInfinity && magnitude(units[1]) < kInfinity))
        throw std::invalid_argument("scale not finite");
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    return dispatch<decode_add_one_bit_pass>(in + sizeof units, to, layout, scale * units[0],
                                             scale * units[1]) < kInfinity;
}

// Sign and exponent, rounded up with the probability that the mantissa says: an addition and a
// shift.
constexpr int kPowerBits = 9;
HC_INLINE std::uint32_t encode_natural_pass(float* __restrict g, std::uint8_t* __restrict out,
                                            std::size_t n, Key key) {
    std::uint32_t peak = 0;
    each_block(n, [&](std::size_t first, std::size_t count) HC_HOT {
        float* x = g + first;
        prefetch_ahead(x, count);
        peak = std::max(peak, peak_of(x, count));
        std::uint32_t codes[kBlock];
        each_drawn(count, first / kBlock, key, [&](std::size_t j, std::uint32_t bits) HC_HOT {
            const std::uint32_t b = bits_of(x[j]), a = b & 0x7fffffffu, most = 254u << 23;
            codes[j] = (((b & 0x80000000u) | (a < most ? a : most)) + (bits >> 9)) >> 23;
            x[j] = 0;
        });
        const std::size_t columns = columns_of(count);
        std::memset(codes + count, 0, 4 * (columns * kRows - count));
        put_block(codes, out + bytes_of(first, kPowerBits), columns, kPowerBits, 0);
    });
    return peak;
}
HC_INLINE std::uint32_t decode_add_natural_pass(const std::uint8_t* in, float* __restrict out,
                                                std::size_t n, float scale) {
    std::uint32_t peak = 0;
    each_block(n, [&](std::size_t first, std::size_t count) HC_HOT {
        float* to = out + first;
        prefetch_ahead(to, count);
        std::uint32_t codes[kBlock], largest = 0;
        take_block(in + bytes_of(first, kPowerBits), codes, columns_of(count), kPowerBits, 0);
        for (std::size_t j = 0; j < count; ++j) {
            to[j] += scale * float_of(codes[j] << 23);
            largest = largest > magnitude(to[j]) ? largest : magnitude(to[j]);
        }
        peak = std::max(peak, largest);
    });
    return peak;
}

py::object encode_natural(Floats& grad, std::optional<Bytes> spare, std::uint64_t key) {
    const std::size_t n = length(grad, "grad");
    Bytes buffer = body_in(spare, bytes_of(n, kPowerBits));
    float* g = grad.mutable_data();
    std::uint8_t* out = buffer.mutable_data() + kHeadroom;
    bool finite;
    {
        py::gil_scoped_release release;
        finite = dispatch<encode_natural_pass>(g, out, n, Key(key)) < kInfinity;
    }
    return encoded(buffer, n, finite);
}
bool decode_add_natural(Floats& out, const Bytes& body, float scale) {
    const std::size_t n = length(out, "out");
    const std::uint8_t* in = exactly(body, bytes_of(n, kPowerBits));
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    return dispatch<decode_add_natural_pass>(in, to, n, scale) < kInfinity;
}

}  // namespace

void bind(py::module_& m) {
    m.def("encode_float16", for_lists(&encode_float16), arg("x"), arg("half"));
    m.def("decode_float16", for_lists(&decode_float16), arg("half"), arg("out"));
    m.def("encode_bf16", for_lists(&encode_bf16), arg("grad"), arg("spare") = py::none());
    m.def("decode_add_bf16", for_lists(&decode_add_bf16), arg("out"), arg("body"), py::kw_only(),
          arg("scale"));
    m.def("encode_one_bit", for_lists(&encode_one_bit), arg("grad"), arg("residual"),
          arg("spare") = py::none(), py::kw_only(), arg("growth"), arg("symmetric"));
    m.def("decode_add_one_bit", for_lists(&decode_add_one_bit), arg("out"), arg("body"),
          py::kw_only(), arg("scale"));
    m.def("encode_natural", for_lists(&encode_natural), arg("grad"), arg("spare") = py::none(),
          py::kw_only(), arg("key"));
    m.def("decode_add_natural", for_lists(&decode_add_natural), arg("out"), arg("body"),
          py::kw_only(), arg("scale"));
}

}  // namespace hc::codes
