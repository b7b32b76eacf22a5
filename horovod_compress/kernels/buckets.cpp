// Levels by bucket, each bucket against its own norm; levels at the width of the bucket's largest, or in Elias' gamma code.
#include <cfloat>
#include <cmath>

#include "arrays.hpp"
#include "bits.hpp"
#include "random.hpp"

namespace hc {
namespace {

enum Coding : std::uint8_t { fixed = 0, elias = 1 };
constexpr std::size_t kHead = 1;  // coding
constexpr int kMaxLevels = 32767;
constexpr std::size_t kPlane = 32;  // elements that share a word of a plane of bits

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
std::size_t plane_words(std::size_t count) { return (count + kPlane - 1) / kPlane; }

// One bucket's codes, with room for whole words; reused between calls.
thread_local std::vector<std::int32_t> codes;

std::int32_t* codes_of(std::size_t count) {
    const std::size_t room = plane_words(count) * kPlane;
    if (codes.size() < room) codes.resize(room);
    std::fill(codes.begin() + count, codes.begin() + room, 0);
    return codes.data();
}

struct Bucket {
    std::uint32_t peak;     // magnitude bits of the largest element
    std::int32_t largest;   // of the levels
    std::uint32_t count;    // of the levels that are not 0
    float norm;
};

// Norm and levels of a bucket, which is left zero. Its second half takes its random bits from the first, times a constant.
HC_CLONES Bucket to_levels(float* __restrict x, std::int32_t* __restrict out, std::size_t count, std::size_t half, float steps,
                           bool l2, std::uint32_t start, Key key) {
    Bucket bucket{};
    for (std::size_t j = 0; j < count; ++j) {
        const std::uint32_t a = magnitude(x[j]);
        bucket.peak = bucket.peak > a ? bucket.peak : a;
    }
    if (bucket.peak >= kInfinity) return bucket;
    std::memcpy(&bucket.norm, &bucket.peak, 4);
    if (l2 && bucket.peak > 0) {
        const float down = std::ldexp(1.0f, -std::clamp(std::ilogb(bucket.norm), -120, 120));  // squares stay in range
        double one, two;
        scaled_sums(x, count, down, one, two);
        bucket.norm = static_cast<float>(std::min(std::sqrt(two) / down, static_cast<double>(FLT_MAX)));
    }
    const int exponent = bucket.norm > 0 ? std::clamp(std::ilogb(bucket.norm), -120, 120) : 0;
    const float before = std::ldexp(1.0f, -exponent), factor = bucket.norm > 0 ? steps / (bucket.norm * before) : 0;
    std::int32_t largest = 0;
    std::uint32_t not_zero = 0;
    const auto level = [&](std::size_t j, std::uint32_t bits) HC_HOT {
        const float y = std::fabs(x[j]) * before * factor, capped = y < steps ? y : steps;
        const std::int32_t whole = static_cast<std::int32_t>(capped);
        const std::int32_t l = whole + (uniform(bits) < capped - static_cast<float>(whole));
        const std::int32_t sign = static_cast<std::int32_t>(bits_of(x[j])) >> 31;
        largest = largest > l ? largest : l;
        not_zero += l != 0;
        out[j] = (l ^ sign) - sign;
        x[j] = 0;
    };
    const std::uint32_t first = static_cast<std::uint32_t>(std::min(half, count)), second = static_cast<std::uint32_t>(count) - first;
    for (std::uint32_t j = 0; j < first; ++j) level(j, random_bits(start + j, key));
    for (std::uint32_t j = 0; j < second; ++j) level(half + j, random_bits(start + j, key) * kSecond);
    bucket.largest = largest;
    bucket.count = not_zero;
    return bucket;
}

// Planes of bits of levels + offset, the lowest first: bit f of word j is element f · words + j's.
HC_CLONES void put_planes(const std::int32_t* __restrict from, std::uint8_t* out, std::size_t words, int width) {
    const std::int32_t offset = width ? (1 << (width - 1)) - 1 : 0;
    constexpr std::size_t lanes = 16;
    for (int plane = 0; plane < width; ++plane)
        for (std::size_t j = 0; j < words; j += lanes) {
            std::uint32_t bits[lanes] = {};
            const std::size_t many = std::min(lanes, words - j);
            for (std::size_t f = 0; f < kPlane; ++f) {
                const std::int32_t* line = from + f * words + j;
                if (many == lanes)
                    for (std::size_t k = 0; k < lanes; ++k) bits[k] |= (static_cast<std::uint32_t>(line[k] + offset) >> plane & 1u) << f;
                else
                    for (std::size_t k = 0; k < many; ++k) bits[k] |= (static_cast<std::uint32_t>(line[k] + offset) >> plane & 1u) << f;
            }
            std::memcpy(out, bits, 4 * many);
            out += 4 * many;
        }
}
HC_CLONES void take_planes(const std::uint8_t* in, std::int32_t* __restrict to, std::size_t words, int width) {
    const std::int32_t offset = width ? (1 << (width - 1)) - 1 : 0;
    constexpr std::size_t lanes = 16;
    for (std::size_t i = 0; i < words * kPlane; ++i) to[i] = -offset;
    for (int plane = 0; plane < width; ++plane)
        for (std::size_t j = 0; j < words; j += lanes) {
            std::uint32_t bits[lanes];
            const std::size_t many = std::min(lanes, words - j);
            std::memcpy(bits, in, 4 * many);
            in += 4 * many;
            for (std::size_t f = 0; f < kPlane; ++f) {
                std::int32_t* line = to + f * words + j;
                if (many == lanes)
                    for (std::size_t k = 0; k < lanes; ++k) line[k] += static_cast<std::int32_t>((bits[k] >> f & 1u) << plane);
                else
                    for (std::size_t k = 0; k < many; ++k) line[k] += static_cast<std::int32_t>((bits[k] >> f & 1u) << plane);
            }
        }
}
HC_CLONES std::uint32_t add_levels(const std::int32_t* __restrict from, float* __restrict to, std::size_t count, float unit) {
    std::uint32_t peak = 0;
    for (std::size_t j = 0; j < count; ++j) {
        to[j] += unit * static_cast<float>(from[j]);
        const std::uint32_t a = magnitude(to[j]);
        peak = peak > a ? peak : a;
    }
    return peak;
}

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
    std::size_t bytes(std::size_t b, int width) const { return 4 * plane_words(count(b)) * width; }
};

// work(bucket, its codes) for all buckets of a body of fixed width.
template <class Work>
void each_bucket(const Shape& shape, const std::uint8_t* widths, const std::uint8_t* planes, Work work) {
    for (std::size_t b = 0; b < shape.buckets; ++b) {
        std::int32_t* to = codes_of(shape.count(b));
        take_planes(planes, to, plane_words(shape.count(b)), widths[b]);
        planes += shape.bytes(b, widths[b]);
        work(b, to);
    }
}

// A body of fixed width in Elias' code, if that has fewer bytes than `limit`; empty if not.
std::vector<std::uint8_t> to_elias(const Shape& shape, const std::uint8_t* widths, const std::uint8_t* planes, std::uint32_t count,
                                   std::size_t limit) {
    std::vector<std::uint8_t> stream;
    std::uint64_t bits = 0;
    for (bool writing : {false, true}) {
        if (writing) {
            if (4 + (bits + 7) / 8 >= limit) return {};
            stream.resize(4 + (bits + 7) / 8);
            std::memcpy(stream.data(), &count, 4);
        }
        BitWriter writer(stream.data() + (writing ? 4 : 0));
        std::uint64_t next = 0;
        each_bucket(shape, widths, planes, [&](std::size_t b, const std::int32_t* level) {
            for (std::size_t j = 0; j < shape.count(b); ++j) {
                if (level[j] == 0) continue;
                const std::uint64_t at = b * shape.bucket + j, its = static_cast<std::uint64_t>(std::abs(level[j]));
                if (writing) {
                    put_gamma(writer, at - next + 1);
                    writer.put(level[j] < 0, 1);
                    put_gamma(writer, its);
                } else {
                    bits += gamma_bits(at - next + 1) + 1 + gamma_bits(its);
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
    const std::size_t at_widths = kHead + 4 * shape.buckets, at_planes = at_widths + shape.buckets;
    std::size_t most = at_planes;
    for (std::size_t b = 0; b < shape.buckets; ++b) most += shape.bytes(b, width_for(steps));
    Bytes buffer = body_in(spare, most);
    std::uint8_t* out = buffer.mutable_data() + kHeadroom;
    float* g = grad.mutable_data();
    bool finite = true;
    std::size_t size = at_planes;
    {
        py::gil_scoped_release release;
        bucket = shape.bucket;
        const std::size_t half = (bucket + 1) / 2;
        std::uint64_t count = 0;
        out[0] = fixed;
        for (std::size_t b = 0; b < shape.buckets && finite; ++b) {
            float* x = g + b * bucket;
            fetch_ahead(x + 2 * bucket, std::min<std::size_t>(bucket, 4096));
            std::int32_t* to = codes_of(shape.count(b));
            const Bucket found = to_levels(x, to, shape.count(b), half, static_cast<float>(steps), l2,
                                           static_cast<std::uint32_t>(b * half), Key(key));
            finite = found.peak < kInfinity;
            const int width = width_for(found.largest);
            std::memcpy(out + kHead + 4 * b, &found.norm, 4);
            out[at_widths + b] = static_cast<std::uint8_t>(width);
            put_planes(to, out + size, plane_words(shape.count(b)), width);
            size += shape.bytes(b, width);
            count += found.count;
        }
        if (!finite) {  // nothing is sent: no norm, no level
            std::memset(out, 0, at_planes);
            std::memset(g, 0, shape.n * sizeof *g);
            size = at_planes;
        }
        // A level takes 3 bits at least, and 2·log2 more of the mean gap: not worth counting where that is too much already.
        const double least = count ? count * (3 + std::log2(static_cast<double>(shape.n) / count)) / 8 : 0;
        if (finite && least < limit * (size - at_widths)) {
            const auto stream = to_elias(shape, out + at_widths, out + at_planes, static_cast<std::uint32_t>(count),
                                         static_cast<std::size_t>(limit * (size - at_widths)));
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
    const auto norm_of = [&](std::size_t b) {
        float norm;
        std::memcpy(&norm, norms + 4 * b, 4);
        return unit * norm;
    };
    std::uint32_t peak = 0;
    py::gil_scoped_release release;
    if (in[0] == elias) {
        read_elias(widths, end, shape.n, steps, [](std::uint64_t, float) {});  // all of it is good before anything is added
        read_elias(widths, end, shape.n, steps, [&](std::uint64_t at, float level) {
            to[at] += norm_of(at / bucket) * level;
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
        each_bucket(shape, widths, widths + shape.buckets, [&](std::size_t b, const std::int32_t* level) {
            fetch_ahead(to + (b + 2) * bucket, std::min<std::size_t>(bucket, 4096));
            peak = std::max(peak, add_levels(level, to + b * bucket, shape.count(b), norm_of(b)));
        });
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
