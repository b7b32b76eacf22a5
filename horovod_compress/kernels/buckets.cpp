// Levels by bucket, each bucket against its own norm; levels at the width of the bucket's largest, or in Elias' gamma code.
#include <cfloat>
#include <cmath>

#include "arrays.hpp"
#include "bits.hpp"
#include "columns.hpp"

namespace hc {
namespace {

constexpr float kTiny = 0x1p-90f, kLift = 0x1p64f;  // norms below, and what is done to their elements: factors stay in range

enum Coding : std::uint8_t { fixed = 0, elias = 1 };
constexpr std::size_t kHead = 1;  // coding
constexpr int kMaxLevels = 32767;

int log2_of(std::uint64_t n) { return 63 - __builtin_clzll(n); }
// Gamma code of n ≥ 1: as many ones as n has bits after the first, a zero, those bits.
std::uint64_t gamma_bits(std::uint64_t n) { return 2 * log2_of(n) + 1; }
void put_gamma(BitWriter& writer, std::uint64_t n) {
    const int bits = log2_of(n);
    writer.put_run(bits, n ^ 1ull << bits, bits);
}
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
    std::uint64_t count = 0, counted = 0;  // of the levels that are not 0, and of all, of every 16th bucket
    bool finite = true;
};
constexpr std::size_t kSampled = 16;

HC_CLONES void to_fixed(float* __restrict g, const Shape& shape, const Rounding& rounding, bool l2, Key key, Fixed& body) {
    const Rounding round = rounding;
    const std::size_t blocks = blocks_of(shape.bucket);
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
            if (b % kSampled == 0) {
                std::uint32_t counted = 0;
                for (std::size_t j = 0; j < some; ++j) counted += codes[j] != 0;
                body.count += counted;
                body.counted += some;
            }
        });
    }
}

HC_CLONES std::uint32_t add_fixed(const Shape& shape, const std::uint8_t* norms, const std::uint8_t* widths, const std::uint8_t* codes,
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

// A body of fixed width in Elias' code, if that has fewer bytes than `limit`; empty if not.
std::vector<std::uint8_t> to_elias(const Shape& shape, const std::uint8_t* widths, const std::uint8_t* codes_at, std::size_t limit) {
    std::vector<std::uint8_t> stream;
    std::uint64_t bits = 0;
    std::uint32_t count = 0;
    for (bool writing : {false, true}) {
        if (writing) {
            if (4 + (bits + 7) / 8 >= limit) return {};
            stream.resize(4 + (bits + 7) / 8);
            std::memcpy(stream.data(), &count, 4);
        }
        BitWriter writer(stream.data() + (writing ? 4 : 0));
        std::uint64_t next = 0;
        each_bucket(shape, widths, codes_at, [&](std::size_t b, const std::int32_t* level) {
            for (std::size_t j = 0; j < shape.count(b); ++j) {
                if (level[j] == 0) continue;
                const std::uint64_t at = b * shape.bucket + j, its = static_cast<std::uint64_t>(std::abs(level[j]));
                if (writing) {
                    put_gamma(writer, at - next + 1);
                    writer.put(level[j] < 0, 1);
                    put_gamma(writer, its);
                } else {
                    bits += gamma_bits(at - next + 1) + 1 + gamma_bits(its);
                    ++count;
                }
                next = at + 1;
            }
        });
        if (writing) writer.finish();
    }
    return stream;
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
        to_fixed(g, shape, rounding, l2, Key(key), body);
        finite = body.finite;
        size += body.size;
        if (!finite) {  // nothing is sent: no norm, no level
            std::memset(out, 0, at_codes);
            std::memset(g, 0, shape.n * sizeof *g);
            size = at_codes;
        }
        // Counting the bits takes longer than all the rest: below a limit of 1 only where an estimate is promising, 3 bits a level and
        // log2 of the mean gap.
        const double part = body.count ? static_cast<double>(body.count) / static_cast<double>(body.counted) : 0;
        const double estimate = body.count && limit < 1 ? shape.n * part * (3 - std::log2(part)) / 8 : 0;
        const std::size_t most_bytes = std::min(size - at_widths, static_cast<std::size_t>(limit * (size - at_widths)));
        if (finite && estimate < limit * (size - at_widths)) {
            const auto stream = to_elias(shape, out + at_widths, out + at_codes, most_bytes);
            if (!stream.empty()) {
                out[0] = elias;
                std::memcpy(out + at_widths, stream.data(), stream.size());
                size = at_widths + stream.size();
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
        const std::uint64_t at = next + take_gamma(reader) - 1;
        if (at >= n) throw std::invalid_argument("index outside the tensor");
        const bool minus = reader.take(1) != 0;
        const std::uint64_t level = take_gamma(reader);
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
        read_elias(widths, end, shape.n, steps, [&](std::uint64_t at, float level) {
            to[at] += step_of(at / bucket) * level;
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
        peak = add_fixed(shape, norms, widths, widths + shape.buckets, levels_of(shape), to, unit);
    }
    return peak < kInfinity;
}

}  // namespace

void bind_buckets(py::module_& m) {
    m.def("encode_buckets", &encode_buckets, arg("grad").noconvert(), arg("steps"), arg("bucket"), arg("l2"), arg("limit"),
          arg("key"), arg("spare") = py::none());
    m.def("add_buckets", &add_buckets, arg("out").noconvert(), arg("body").noconvert(), arg("steps"), arg("bucket"), arg("scale"));
}

}  // namespace hc
