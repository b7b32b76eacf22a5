// Levels by bucket, each bucket against its own norm; levels at the width of the bucket's largest, or in Elias' gamma code.
#include <cfloat>
#include <cmath>

#include "arrays.hpp"
#include "bits.hpp"
#include "columns.hpp"

namespace hc::buckets {
namespace {

constexpr float kTiny = 0x1p-90f, kLift = 0x1p64f;  // norms below, and what is done to their elements: factors stay in range

enum Coding : std::uint8_t { fixed = 0, elias = 1 };
constexpr std::size_t kHead = 1;  // coding
constexpr int kMaxLevels = 32767;

int log2_of(std::uint64_t n) { return 63 - __builtin_clzll(n); }
// Gamma code of n ≥ 1: as many ones as n has bits after the first, a zero, those bits.
std::uint64_t gamma_bits(std::uint64_t n) { return 2 * log2_of(n) + 1; }
std::uint64_t take_gamma(BitReader& reader) {
    const int bits = static_cast<int>(reader.ones(31));
    return 1ull << bits | reader.take(bits);
}

int width_for(std::int32_t largest) { return largest ? log2_of(2 * static_cast<std::uint64_t>(largest)) + 1 : 0; }
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

HC_INLINE void take_levels(const std::uint8_t* in, std::uint32_t* to, std::size_t count, int width) {
    each_block(count, [&](std::size_t first, std::size_t some) HC_HOT {
        take_block(in + bytes_of(first, width), to + first, columns_of(some), width, offset_for(width));
    });
}

// The norm of a bucket whose largest magnitude is finite, and at least that.
HC_INLINE float norm_of(const float* x, std::size_t count, std::uint32_t peak, bool l2) {
    if (!l2 || peak == 0) return float_of(peak);
    const int exponent = exponent_of(peak);  // squares stay in range
    const double squares = scaled_sums(x, count, power_of_two(-exponent)).two;
    const double norm = std::min(std::sqrt(squares) * power_of_two(exponent), static_cast<double>(FLT_MAX));
    return std::max(static_cast<float>(norm), float_of(peak));
}

// What a body of fixed width is made of. Its codes have `size` bytes.
struct Fixed {
    std::uint8_t *norms, *widths, *codes;
    std::size_t size = 0;
    std::uint64_t bits = 0, counted = 0;  // in Elias' code, and elements, of the buckets that are sampled
    bool finite = true;
};
constexpr std::size_t kSampled = 16, kFew = 64;  // one bucket in so many is sampled; all, where there are so few

HC_INLINE void to_fixed(float* __restrict g, const Shape& shape, const Rounding& rounding, bool l2, Key key, Fixed& body) {
    const Rounding round = rounding;
    const std::size_t blocks = blocks_of(shape.bucket), stride = shape.buckets < kFew ? 1 : kSampled;
    for (std::size_t b = 0; b < shape.buckets; ++b) {
        float* x = g + b * shape.bucket;
        const std::size_t count = shape.count(b);
        ask_ahead(x, count);
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
        std::uint64_t gap = 1;
        each_block(count, [&](std::size_t first, std::size_t some) HC_HOT {
            float* from = x + first;
            std::uint32_t codes[kBlock];
            each_drawn(some, b * blocks + first / kBlock, key, [&](std::size_t j, std::uint32_t bits) HC_HOT {
                codes[j] = static_cast<std::uint32_t>(round.within(from[j] * factor, bits));
                from[j] = 0;
            });
            const std::size_t columns = columns_of(some);
            std::memset(codes + some, 0, 4 * (columns * kRows - some));
            put_block(codes, body.codes + body.size, columns, width, offset_for(width));
            body.size += bytes_of(some, width);
            if (b % stride == 0) {
                for (std::size_t j = 0; j < some; ++j) {
                    const auto level = static_cast<std::int32_t>(codes[j]);
                    if (level) body.bits += gamma_bits(gap) + 1 + gamma_bits(static_cast<std::uint64_t>(std::abs(level)));
                    gap = level ? 1 : gap + 1;
                }
                body.counted += some;
            }
        });
    }
}

HC_INLINE std::uint32_t add_fixed(const Shape& shape, const std::uint8_t* norms, const std::uint8_t* widths, const std::uint8_t* codes,
                                  std::uint32_t* __restrict its, float* __restrict out, float unit) {
    std::uint32_t peak = 0;
    for (std::size_t b = 0; b < shape.buckets; ++b) {
        const std::size_t count = shape.count(b);
        float norm;
        std::memcpy(&norm, norms + 4 * b, 4);
        const float step = unit * norm;
        float* to = out + b * shape.bucket;
        ask_ahead(to, count);
        take_levels(codes, its, count, widths[b]);
        codes += shape.bytes(b, widths[b]);
        for (std::size_t j = 0; j < count; ++j) {
            to[j] += step * static_cast<float>(static_cast<std::int32_t>(its[j]));
            peak = peak > magnitude(to[j]) ? peak : magnitude(to[j]);
        }
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

// work(bucket, its levels) for all buckets of a body of fixed width.
template <class Work>
void each_bucket(const Shape& shape, const std::uint8_t* widths, const std::uint8_t* codes, Work work) {
    std::uint32_t* to = levels_of(shape);
    for (std::size_t b = 0; b < shape.buckets; ++b) {
        take_levels(codes, to, shape.count(b), widths[b]);
        codes += shape.bytes(b, widths[b]);
        work(b, reinterpret_cast<const std::int32_t*>(to));
    }
}

// The gamma code of n ≥ 1 as a number, from its lowest bit up, of gamma_bits(n).
HC_INLINE std::uint64_t gamma_of(std::uint64_t n, int more) { return ((1ull << more) - 1) | (n ^ 1ull << more) << (more + 1); }

// Elias' stream while it is written; reused between calls. kSlack: what one entry may take and a write of whole words touches behind.
constexpr std::size_t kSlack = 32;
thread_local std::vector<std::uint8_t> stream;
thread_local std::vector<std::uint32_t> places;

// A body of fixed width in Elias' code, if that has fewer bytes than `limit`: how many lie in `stream` then, else 0.
std::size_t to_elias(const Shape& shape, const std::uint8_t* widths, const std::uint8_t* codes_at, std::size_t limit) {
    if (stream.size() < limit + kSlack) stream.resize(limit + kSlack);
    if (places.size() < shape.bucket) places.resize(shape.bucket);
    std::uint8_t *out = stream.data() + 4, *end = stream.data() + limit;
    std::uint64_t word = 0, next = 0;
    std::uint32_t count = 0;
    int filled = 0;
    const auto put = [&](std::uint64_t code, int bits) {  // at most 56: whole bytes leave, fewer than 8 bits stay
        word |= code << filled;
        std::memcpy(out, &word, 8);
        filled += bits;
        out += filled >> 3;
        word >>= filled & ~7;
        filled &= 7;
    };
    each_bucket(shape, widths, codes_at, [&](std::size_t b, const std::int32_t* level) {
        std::size_t found = 0;
        for (std::size_t j = 0; j < shape.count(b); ++j) {  // no branch for each: half of them may be 0
            places[found] = static_cast<std::uint32_t>(j);
            found += level[j] != 0;
        }
        for (std::size_t i = 0; i < found && out < end; ++i) {
            const std::int32_t its = level[places[i]];
            const std::uint64_t at = b * shape.bucket + places[i], gap = at - next + 1, size = static_cast<std::uint64_t>(std::abs(its));
            const int wide = log2_of(gap), high = log2_of(size);
            const std::uint64_t signed_size = (its < 0) | gamma_of(size, high) << 1;
            if (wide < 13) {
                put(gamma_of(gap, wide) | signed_size << (2 * wide + 1), 2 * (wide + high) + 3);
            } else {
                put((1ull << wide) - 1, wide);
                put((gap ^ 1ull << wide) << 1, wide + 1);
                put(signed_size, 2 * high + 2);
            }
            next = at + 1;
        }
        count += static_cast<std::uint32_t>(found);
    });
    const std::size_t bytes = static_cast<std::size_t>(out - stream.data()) + (filled > 0);
    std::memcpy(stream.data(), &count, 4);
    return out < end && bytes < limit ? bytes : 0;
}

// `limit`: Elias' code is used where its bytes are below this share of those at fixed width.
py::tuple encode_buckets(Floats& grad, int steps, std::size_t bucket, bool l2, float limit, std::uint64_t key,
                         std::optional<Bytes> spare) {
    const Shape shape(length(grad, "grad"), bucket, steps);
    const Rounding rounding(static_cast<float>(steps));
    const std::size_t at_widths = kHead + 4 * shape.buckets, at_codes = at_widths + shape.buckets;
    std::size_t most = at_codes;
    for (std::size_t b = 0; b < shape.buckets; ++b) most += shape.bytes(b, width_for(steps));
    Bytes buffer = body_in(spare, most);
    std::uint8_t* out = buffer.mutable_data() + kHeadroom;
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
        // Writing the code takes longer than all the rest: below a limit of 1 only where the sample promises it.
        const std::size_t most_bytes = std::min(size - at_widths, static_cast<std::size_t>(limit * static_cast<float>(size - at_widths)));
        const double estimate = body.counted && limit < 1 ? static_cast<double>(body.bits) * shape.n / static_cast<double>(body.counted) : 0;
        if (finite && estimate < 8.0 * most_bytes) {
            if (const std::size_t bytes = to_elias(shape, out + at_widths, out + at_codes, most_bytes)) {
                out[0] = elias;
                std::memcpy(out + at_widths, stream.data(), bytes);
                size = at_widths + bytes;
            }
        }
        out[size] = 0;
    }
    return py::make_tuple(buffer, kHeadroom + size + 1, shape.n, finite);
}

// Goes through an Elias stream; work(index, level) for every level.
template <class Work>
void read_elias(const std::uint8_t* in, const std::uint8_t* end, std::size_t n, int steps, Work work) {
    if (end - in < 4) throw std::invalid_argument("cut off before its levels");
    std::uint32_t count;
    std::memcpy(&count, in, 4);
    if (count > n) throw std::invalid_argument("more entries than the tensor has elements");
    BitReader reader(in + 4, end);
    std::uint64_t next = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
        std::uint64_t gap, level;
        bool minus;
        // An entry that is short, as most are, from one look at the bits.
        const std::uint64_t word = reader.peek();
        const int wide = __builtin_ctzll(~word | 1ull << 63);
        const std::uint64_t rest = wide < 13 ? word >> (2 * wide + 1) : ~0ull;
        const int high = __builtin_ctzll(~(rest >> 1) | 1ull << 62);
        if (2 * (wide + high) + 3 <= 56) {
            gap = 1ull << wide | (word >> (wide + 1) & ((1ull << wide) - 1));
            minus = rest & 1;
            level = 1ull << high | (rest >> (high + 2) & ((1ull << high) - 1));
            reader.skip(2 * (wide + high) + 3);
        } else {
            gap = take_gamma(reader);
            minus = reader.take(1) != 0;
            level = take_gamma(reader);
        }
        const std::uint64_t at = next + gap - 1;
        if (at >= n) throw std::invalid_argument("index outside the tensor");
        if (level > static_cast<std::uint64_t>(steps)) throw std::invalid_argument("level out of range");
        work(at, minus ? -static_cast<float>(level) : static_cast<float>(level));
        next = at + 1;
    }
    reader.finish();
}

bool add_buckets(Floats& out, const Bytes& body, int steps, std::size_t bucket, float scale) {
    const Shape shape(length(out, "out"), bucket, steps);
    const std::size_t size = length(body, "body"), at_widths = kHead + 4 * shape.buckets;
    if (size < at_widths) throw std::invalid_argument("shorter than its norms");
    const std::uint8_t *in = body.data(), *norms = in + kHead, *widths = in + at_widths, *end = in + size;
    for (std::size_t b = 0; b < shape.buckets; ++b) {
        float norm;
        std::memcpy(&norm, norms + 4 * b, 4);
        if (!(norm >= 0 && norm <= FLT_MAX)) throw std::invalid_argument("norm out of range");
    }
    bucket = shape.bucket;
    float* to = out.mutable_data();
    const float unit = scale / static_cast<float>(steps);
    const auto step_of = [&](std::size_t b) {
        float norm;
        std::memcpy(&norm, norms + 4 * b, 4);
        return unit * norm;
    };
    std::uint32_t peak = 0;
    py::gil_scoped_release release;
    if (in[0] == elias) {
        read_elias(widths, end, shape.n, steps, [](std::uint64_t, float) {});  // all of it is good before anything is added
        std::uint64_t b = 0;
        float step = shape.buckets ? step_of(0) : 0;
        read_elias(widths, end, shape.n, steps, [&](std::uint64_t at, float level) {
            if (at >= (b + 1) * bucket) step = step_of(b = at / bucket);
            to[at] += step * level;
            peak = std::max(peak, magnitude(to[at]));
        });
    } else {
        if (in[0] != fixed) throw std::invalid_argument("unknown coding of levels");
        std::size_t expected = at_widths + shape.buckets;
        for (std::size_t b = 0; b < shape.buckets; ++b) {
            if (size < at_widths + shape.buckets || widths[b] > width_for(steps)) throw std::invalid_argument("width out of range");
            expected += shape.bytes(b, widths[b]);
        }
        if (size != expected) throw std::invalid_argument("not of the length that its widths say");
        peak = dispatch<add_fixed>(shape, norms, widths, widths + shape.buckets, levels_of(shape), to, unit);
    }
    return peak < kInfinity;
}

}  // namespace

void bind(py::module_& m) {
    m.def("encode_buckets", &encode_buckets, arg("grad").noconvert(), arg("steps"), arg("bucket"), arg("l2"), arg("limit"),
          arg("key"), arg("spare") = py::none());
    m.def("add_buckets", &add_buckets, arg("out").noconvert(), arg("body").noconvert(), arg("steps"), arg("bucket"), arg("scale"));
}

}  // namespace hc::buckets
