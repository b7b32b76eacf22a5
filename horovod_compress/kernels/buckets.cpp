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
constexpr std::size_t kRows = 32;  // codes of a column: of w bits each, they fill w words

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
std::size_t columns_of(std::size_t count) { return (count + kRows - 1) / kRows; }

// One bucket's codes, with room for whole words; reused between calls.
thread_local std::vector<std::int32_t> codes;

std::int32_t* codes_of(std::size_t count) {
    const std::size_t room = columns_of(count) * kRows;
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
HC_CLONES Bucket to_levels(float* __restrict x, std::int32_t* __restrict out, std::size_t count, std::size_t half,
                           const Rounding& rounding, float steps, bool l2, std::uint32_t start, Key key) {
    const Rounding round = rounding;
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
    const float before = std::ldexp(1.0f, -exponent), factor = bucket.norm > 0 ? steps / (bucket.norm * before) * round.one : 0;
    std::int32_t largest = 0, smallest = 0;
    std::uint32_t zeros = 0;
    const auto level = [&](std::size_t j, std::uint32_t bits) HC_HOT {
        const std::int32_t code = round(x[j] * before * factor, bits);
        largest = largest > code ? largest : code;
        smallest = smallest < code ? smallest : code;
        zeros += code == 0;
        out[j] = code;
        x[j] = 0;
    };
    const std::uint32_t first = static_cast<std::uint32_t>(std::min(half, count)), second = static_cast<std::uint32_t>(count) - first;
    for (std::uint32_t j = 0; j < second; ++j) {
        const std::uint32_t bits = random_bits(start + j, key);
        level(j, bits);
        level(half + j, bits * kSecond);
    }
    for (std::uint32_t j = second; j < first; ++j) level(j, random_bits(start + j, key));
    bucket.largest = std::max(largest, -smallest);
    bucket.count = static_cast<std::uint32_t>(count) - zeros;
    return bucket;
}

std::int32_t offset_for(int width) { return width ? (1 << (width - 1)) - 1 : 0; }

// Levels + offset, of `width` bits each: row r of column c is element r · columns + c; its bits come after those of the rows above, in
// the column's `width` words, of which word k lies at k · columns + c.
template <class Word>  // of one column, or of as many as there are lanes
HC_INLINE void put_some(const std::int32_t* from, std::uint8_t* out, std::size_t columns, int width) {
    const Word offset = Word{} + static_cast<std::uint32_t>(offset_for(width));
    Word word{}, code;
    int filled = 0;
    for (std::size_t row = 0; row < kRows; ++row, from += columns) {
        std::memcpy(&code, from, sizeof code);
        code += offset;
        word |= code << filled;
        filled += width;
        if (filled < 32) continue;
        std::memcpy(out, &word, sizeof word);
        out += 4 * columns;
        filled -= 32;
        word = code >> (width - filled);
    }
}
template <class Word>
HC_INLINE void take_some(const std::uint8_t* in, std::int32_t* to, std::size_t columns, int width) {
    const Word offset = Word{} + static_cast<std::uint32_t>(offset_for(width)), mask = Word{} + ((1u << width) - 1);
    Word word, code;
    std::memcpy(&word, in, sizeof word);
    int used = 0;
    for (std::size_t row = 0; row < kRows; ++row, to += columns) {
        code = word >> used;
        used += width;
        if (used >= 32 && row + 1 < kRows) {
            in += 4 * columns;
            std::memcpy(&word, in, sizeof word);
            used -= 32;
            code |= word << (width - used);
        }
        code = (code & mask) - offset;
        std::memcpy(to, &code, sizeof code);
    }
}
HC_CLONES void put_columns(const std::int32_t* from, std::uint8_t* out, std::size_t columns, int width) {
    if (width == 0) return;
    std::size_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) put_some<WordLanes>(from + c, out + 4 * c, columns, width);
    for (; c < columns; ++c) put_some<std::uint32_t>(from + c, out + 4 * c, columns, width);
}
HC_CLONES void take_columns(const std::uint8_t* in, std::int32_t* to, std::size_t columns, int width) {
    if (width == 0) {
        std::memset(to, 0, 4 * kRows * columns);
        return;
    }
    std::size_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) take_some<WordLanes>(in + 4 * c, to + c, columns, width);
    for (; c < columns; ++c) take_some<std::uint32_t>(in + 4 * c, to + c, columns, width);
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
    std::size_t bytes(std::size_t b, int width) const { return 4 * columns_of(count(b)) * width; }
};

// work(bucket, its codes) for all buckets of a body of fixed width.
template <class Work>
void each_bucket(const Shape& shape, const std::uint8_t* widths, const std::uint8_t* codes_at, Work work) {
    for (std::size_t b = 0; b < shape.buckets; ++b) {
        std::int32_t* to = codes_of(shape.count(b));
        take_columns(codes_at, to, columns_of(shape.count(b)), widths[b]);
        codes_at += shape.bytes(b, widths[b]);
        work(b, to);
    }
}

// A body of fixed width in Elias' code, if that has fewer bytes than `limit`; empty if not.
std::vector<std::uint8_t> to_elias(const Shape& shape, const std::uint8_t* widths, const std::uint8_t* codes_at, std::uint32_t count,
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
    bool finite = true;
    std::size_t size = at_codes;
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
            const Bucket found = to_levels(x, to, shape.count(b), half, rounding, static_cast<float>(steps), l2,
                                           static_cast<std::uint32_t>(b * half), Key(key));
            finite = found.peak < kInfinity;
            const int width = width_for(found.largest);
            std::memcpy(out + kHead + 4 * b, &found.norm, 4);
            out[at_widths + b] = static_cast<std::uint8_t>(width);
            put_columns(to, out + size, columns_of(shape.count(b)), width);
            size += shape.bytes(b, width);
            count += found.count;
        }
        if (!finite) {  // nothing is sent: no norm, no level
            std::memset(out, 0, at_codes);
            std::memset(g, 0, shape.n * sizeof *g);
            size = at_codes;
        }
        // Counting the bits takes longer than all the rest: below a limit of 1 only where an estimate is promising, 3 bits a level and
        // log2 of the mean gap.
        const double estimate = count && limit < 1 ? count * (3 + std::log2(static_cast<double>(shape.n) / count)) / 8 : 0;
        const std::size_t most_bytes = std::min(size - at_widths, static_cast<std::size_t>(limit * (size - at_widths)));
        if (finite && estimate < limit * (size - at_widths)) {
            const auto stream = to_elias(shape, out + at_widths, out + at_codes, static_cast<std::uint32_t>(count), most_bytes);
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
