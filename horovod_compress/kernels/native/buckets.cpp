// QSGD: levels by bucket, each bucket against its own norm.
//
// Encoding goes bucket by bucket over the gradient: the largest magnitude (and the norm, for L2) is
// one read; the second one, from the cache, rounds each element at random to a level, sets the
// gradient to zero, and writes the levels into the body, in columns at the width of the bucket's
// largest level. One bucket in 16 also counts the bits that Elias' code would take. Where that
// promises a shorter body, the levels are read back from the body and written in Elias' code into a
// thread-local buffer, which replaces them if it is shorter indeed.
//
// Decoding at fixed width unpacks a bucket's levels into thread-local memory and adds them to the
// output, norm/steps times. Nothing may be added before all of a body has proved good: so levels of
// full width, which alone can be too large, are unpacked once before, and Elias' code is read into
// an array of the whole tensor's levels first.
#include <cfloat>
#include <cmath>

#include "columns.hpp"
#include "elias.hpp"
#include "lists.hpp"

namespace hc::buckets {
namespace {

// Norms below, and what is done to their elements: factors stay in range.
constexpr float kTiny = 0x1p-90f, kLift = 0x1p64f;

enum Coding : std::uint8_t { fixed = 0, elias = 1 };
constexpr std::size_t kHead = 1;  // coding
constexpr int kMaxLevels = 32767;

int width_for(std::int32_t largest) {
    return largest ? log2_of(2 * static_cast<std::uint64_t>(largest)) + 1 : 0;
}
std::uint32_t offset_for(int width) { return width ? (1u << (width - 1)) - 1 : 0; }

// The shape of a tensor in buckets.
struct Shape {
    std::size_t n, bucket, buckets;
    Shape(std::size_t count, std::size_t size, int steps) : n(count), bucket(size) {
        if (bucket == 0) throw std::invalid_argument("bucket_size must be at least 1");
        bucket = std::min(bucket, std::max<std::size_t>(n, 1));
        if (steps < 1 || steps > kMaxLevels) throw std::invalid_argument("1 to 32767 levels");
        buckets = (n + bucket - 1) / bucket;
    }
    std::size_t count(std::size_t b) const { return std::min(bucket, n - b * bucket); }
    std::size_t bytes(std::size_t b, int width) const { return bytes_of(count(b), width); }
};

HC_INLINE void take_levels(const std::uint8_t* in, std::uint32_t* to, std::size_t count,
                           int width) {
    each_block(count, [&](std::size_t first, std::size_t some) HC_HOT {
        take_block(in + bytes_of(first, width), to + first, columns_of(some), width,
                   offset_for(width));
    });
}

// The norm of a bucket whose largest magnitude is finite, and at least that.
HC_INLINE float norm_of(const float* x, std::size_t count, std::uint32_t peak, bool l2) {
    if (!l2 || peak == 0) return float_of(peak);
    const int exponent = exponent_of(peak);  // squares stay in range
    const double squares = scaled_sums(x, count, power_of_two(-exponent)).two;
    const double norm =
        std::min(std::sqrt(squares) * power_of_two(exponent), static_cast<double>(FLT_MAX));
    return std::max(static_cast<float>(norm), float_of(peak));
}

// What a body of fixed width is made of. Its codes have `size` bytes.
struct Fixed {
    std::uint8_t *norms, *widths, *codes;
    std::size_t size = 0;
    // In Elias' code, and elements, of the buckets that are sampled.
    std::uint64_t bits = 0, counted = 0;
    bool finite = true;
};

HC_INLINE void to_fixed(float* __restrict g, const Shape& shape, const Rounding& rounding, bool l2,
                        Key key, Fixed& body) {
    const Rounding round = rounding;
    const std::size_t blocks = blocks_of(shape.bucket),
                      stride = shape.buckets < tuning::kFewBuckets ? 1 : tuning::kSampledBucket;
    for (std::size_t b = 0; b < shape.buckets; ++b) {
        float* x = g + b * shape.bucket;
        const std::size_t count = shape.count(b);
        prefetch_ahead(x, count);
        const std::uint32_t peak = peak_of(x, count);
        body.finite = peak < kInfinity;
        if (!body.finite) return;
        const float norm = norm_of(x, count, peak, l2), lift = norm < kTiny ? kLift : 1;
        if (norm < kTiny)
            for (std::size_t j = 0; j < count; ++j) x[j] *= kLift;
        const float factor = norm > 0 ? round.factor_for(norm * lift) : 0;
        const int width = width_for(round.largest_of(float_of(peak) * lift * factor));
        std::memcpy(body.norms + 4 * b, &norm, 4);
        body.widths[b] = static_cast<std::uint8_t>(width);
        EliasCoder<BitCount> sample;
        each_block(count, [&](std::size_t first, std::size_t some) HC_HOT {
            float* from = x + first;
            std::uint32_t codes[kBlock];
            each_drawn(some, b * blocks + first / kBlock, key,
                       [&](std::size_t j, std::uint32_t bits) HC_HOT {
                           codes[j] =
                               static_cast<std::uint32_t>(round.within(from[j] * factor, bits));
                           from[j] = 0;
                       });
            const std::size_t columns = columns_of(some);
            std::memset(codes + some, 0, 4 * (columns * kRows - some));
            put_block(codes, body.codes + body.size, columns, width, offset_for(width));
            body.size += bytes_of(some, width);
            if (b % stride == 0) {
                sample.put(reinterpret_cast<const std::int32_t*>(codes), some);
                body.counted += some;
            }
        });
        body.bits += sample.out.bits();
    }
}

// Adds step · level to each element; returns the largest magnitude.
template <class Integer>
HC_INLINE std::uint32_t add_levels(const Integer* __restrict levels, std::size_t count, float step,
                                   float* __restrict to) {
    std::uint32_t peak = 0;
    prefetch_ahead(to, count);
    for (std::size_t j = 0; j < count; ++j) {
        to[j] += step * static_cast<float>(levels[j]);
        peak = peak > magnitude(to[j]) ? peak : magnitude(to[j]);
    }
    return peak;
}

// The weight of a level in each bucket.
struct Weights {
    const std::uint8_t* norms;
    float unit;
    HC_INLINE float operator[](std::size_t b) const {
        float norm;
        std::memcpy(&norm, norms + 4 * b, 4);
        return unit * norm;
    }
};

// Whether no level is beyond `steps`. Those of fewer bits than `steps` takes cannot be.
HC_INLINE bool within_steps(const Shape& shape, const std::uint8_t* widths,
                            const std::uint8_t* codes, std::uint32_t* unpacked, int steps) {
    const int full = width_for(steps);
    int largest = 0;
    for (std::size_t b = 0; b < shape.buckets; ++b) {
        const std::size_t count = shape.count(b);
        if (widths[b] == full) {
            take_levels(codes, unpacked, count, full);
            const auto* its = reinterpret_cast<const std::int32_t*>(unpacked);
            for (std::size_t j = 0; j < count; ++j) largest = std::max(largest, std::abs(its[j]));
        }
        codes += shape.bytes(b, widths[b]);
    }
    return largest <= steps;
}
HC_INLINE std::uint32_t add_fixed(const Shape& shape, const Weights& weights,
                                  const std::uint8_t* widths, const std::uint8_t* codes,
                                  std::uint32_t* unpacked, float* out) {
    std::uint32_t peak = 0;
    for (std::size_t b = 0; b < shape.buckets; ++b) {
        const std::size_t count = shape.count(b);
        take_levels(codes, unpacked, count, widths[b]);
        codes += shape.bytes(b, widths[b]);
        peak = std::max(peak, add_levels(reinterpret_cast<const std::int32_t*>(unpacked), count,
                                         weights[b], out + b * shape.bucket));
    }
    return peak;
}
HC_INLINE std::uint32_t add_coded(const Shape& shape, const Weights& weights, const Level* unpacked,
                                  float* out) {
    std::uint32_t peak = 0;
    for (std::size_t b = 0; b < shape.buckets; ++b) {
        const std::size_t first = b * shape.bucket;
        peak =
            std::max(peak, add_levels(unpacked + first, shape.count(b), weights[b], out + first));
    }
    return peak;
}

// One bucket's levels, with room for whole columns; reused between calls.
thread_local std::vector<std::uint32_t> levels;

std::uint32_t* levels_of(const Shape& shape) {
    const std::size_t room = columns_of(shape.bucket) * kRows;
    if (levels.size() < room) levels.resize(room);
    return levels.data();
}

// Elias' stream while it is written, and a tensor's levels read from it; reused between calls.
thread_local std::vector<std::uint8_t> stream;
thread_local std::vector<Level> coded;

// A body of fixed width in Elias' code, if that has fewer bytes than `limit`: how many lie in `out`
// then, else 0.
HC_INLINE std::size_t to_elias(const Shape& shape, const std::uint8_t* widths,
                               const std::uint8_t* codes, std::uint32_t* unpacked,
                               std::uint8_t* out, std::size_t limit) {
    EliasCoder<BitStream> coder(BitStream(out + 4, out + limit));
    for (std::size_t b = 0; b < shape.buckets && !coder.out.full(); ++b) {
        take_levels(codes, unpacked, shape.count(b), widths[b]);
        codes += shape.bytes(b, widths[b]);
        coder.put(reinterpret_cast<const std::int32_t*>(unpacked), shape.count(b));
    }
    std::memcpy(out, &coder.entries, 4);
    const std::size_t bytes = 4 + static_cast<std::size_t>((coder.out.bits() + 7) / 8);
    return bytes < limit ? bytes : 0;
}

// `limit`: Elias' code is used where its bytes are below this share of those at fixed width.
py::object encode_buckets(Floats& grad, std::optional<Bytes> spare, int steps, std::size_t bucket,
                          bool l2, float limit, std::uint64_t key) {
    const Shape shape(length(grad, "grad"), bucket, steps);
    const Rounding rounding(static_cast<float>(steps));
    const std::size_t at_widths = kHead + 4 * shape.buckets, at_codes = at_widths + shape.buckets;
    std::size_t most = at_codes;
    for (std::size_t b = 0; b < shape.buckets; ++b) most += shape.bytes(b, width_for(steps));
    Bytes memory = body_in(spare, most);
    std::uint8_t* out = memory.mutable_data() + kHeadroom;
    float* g = grad.mutable_data();
    bool finite;
    std::size_t size = at_codes;
    {
        py::gil_scoped_release release;
        out[0] = fixed;
        Fixed body{out + kHead, out + at_widths, out + at_codes};
        dispatch<to_fixed>(g, shape, rounding, l2, Key(key), body);
        finite = body.finite;
        size += body.size;
        if (!finite) {  // nothing is sent: no norm, no level
            std::memset(out, 0, at_codes);
            std::memset(g, 0, shape.n * sizeof *g);
            size = at_codes;
        }
        // Writing the code takes longer than all the rest: below a limit of 1 only where the sample
        // promises it.
        const std::size_t most_bytes =
            std::min(size - at_widths,
                     static_cast<std::size_t>(limit * static_cast<float>(size - at_widths)));
        const double estimate =
            body.counted && limit < 1
                ? static_cast<double>(body.bits) * shape.n / static_cast<double>(body.counted)
                : 0;
        if (finite && estimate < 8.0 * most_bytes) {
            if (stream.size() < most_bytes + BitStream::kSlack)
                stream.resize(most_bytes + BitStream::kSlack);
            std::uint8_t *widths = out + at_widths, *codes = out + at_codes, *to = stream.data();
            if (const std::size_t bytes =
                    dispatch<to_elias>(shape, widths, codes, levels_of(shape), to, most_bytes)) {
                out[0] = elias;
                std::memcpy(widths, to, bytes);
                size = at_widths + bytes;
            }
        }
        out[size] = 0;
    }
    const Bytes buffer(static_cast<py::ssize_t>(kHeadroom + size + 1), memory.data(), memory);
    return encoded(buffer, shape.n, finite, py::make_tuple(memory));
}

bool decode_add_buckets(Floats& out, const Bytes& body, int steps, std::size_t bucket,
                        float scale) {
    const Shape shape(length(out, "out"), bucket, steps);
    const std::size_t size = length(body, "body"), at_widths = kHead + 4 * shape.buckets;
    if (size < at_widths) throw std::invalid_argument("shorter than its norms");
    const std::uint8_t *in = body.data(), *norms = in + kHead, *widths = in + at_widths,
                       *end = in + size;
    for (std::size_t b = 0; b < shape.buckets; ++b) {
        float norm;
        std::memcpy(&norm, norms + 4 * b, 4);
        if (!(norm >= 0 && norm <= FLT_MAX)) throw std::invalid_argument("norm out of range");
    }
    float* to = out.mutable_data();
    const Weights weights{norms, scale / static_cast<float>(steps)};
    std::uint32_t peak = 0;
    py::gil_scoped_release release;
    if (in[0] == elias) {
        std::uint32_t entries;
        if (end - widths < 4) throw std::invalid_argument("cut off before its levels");
        std::memcpy(&entries, widths, 4);
        if (entries > shape.n)
            throw std::invalid_argument("more entries than the tensor has elements");
        if (coded.size() < shape.n + Runs::kReach) coded.resize(shape.n + Runs::kReach);
        // All of it is good before anything is added.
        dispatch<read_elias>(widths + 4, end, entries, shape.n, steps, coded.data());
        peak = dispatch<add_coded>(shape, weights, coded.data(), to);
    } else {
        if (in[0] != fixed) throw std::invalid_argument("unknown coding of levels");
        std::size_t expected = at_widths + shape.buckets;
        for (std::size_t b = 0; b < shape.buckets; ++b) {
            if (size < at_widths + shape.buckets || widths[b] > width_for(steps))
                throw std::invalid_argument("width out of range");
            expected += shape.bytes(b, widths[b]);
        }
        if (size != expected) throw std::invalid_argument("not of the length that its widths say");
        const std::uint8_t* codes = widths + shape.buckets;
        if (!dispatch<within_steps>(shape, widths, codes, levels_of(shape), steps))
            throw std::invalid_argument("level out of range");
        peak = dispatch<add_fixed>(shape, weights, widths, codes, levels_of(shape), to);
    }
    return peak < kInfinity;
}

}  // namespace

void bind(py::module_& m) {
    m.def("encode_buckets", for_lists(&encode_buckets), arg("grad"), arg("spare") = py::none(),
          py::kw_only(), arg("steps"), arg("bucket"), arg("l2"), arg("limit"), arg("key"));
    m.def("decode_add_buckets", for_lists(&decode_add_buckets), arg("out"), arg("body"),
          py::kw_only(), arg("steps"), arg("bucket"), arg("scale"));
}

}  // namespace hc::buckets
