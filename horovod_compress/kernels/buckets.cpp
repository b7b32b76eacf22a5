// Levels by bucket, each bucket against its own norm; levels at a fixed width or in Elias' gamma code, whichever is smaller.
#include <cfloat>
#include <cmath>

#include "arrays.hpp"
#include "bits.hpp"
#include "fields.hpp"
#include "random.hpp"

namespace hc {
namespace {

constexpr std::size_t kHead = 2;  // coding, width
enum Coding : std::uint8_t { fixed = 0, elias = 1 };
constexpr int kMaxLevels = 32767;

thread_local std::vector<std::int16_t> levels;  // reused between calls

struct Summary {
    std::uint32_t peak = 0;     // magnitude bits of the largest element
    std::int32_t largest = 0;   // of the levels
};

// Norms and levels of all buckets. The second half of a bucket takes its random bits from the first, times a constant.
HC_CLONES Summary to_levels(float* __restrict g, std::int16_t* __restrict out, float* __restrict norms, std::size_t n,
                            std::size_t bucket, float steps, bool l2, Key key) {
    Summary all;
    const std::size_t half = (bucket + 1) / 2;
    for (std::size_t begin = 0, b = 0; begin < n; begin += bucket, ++b) {
        const std::size_t count = std::min(bucket, n - begin);
        float* x = g + begin;
        std::int16_t* to = out + begin;
        fetch_ahead(x + 2 * bucket, count);
        std::uint32_t peak = 0;
        for (std::size_t j = 0; j < count; ++j) {
            const std::uint32_t a = magnitude(x[j]);
            peak = peak > a ? peak : a;
        }
        all.peak = std::max(all.peak, peak);
        float norm;
        std::memcpy(&norm, &peak, 4);
        if (l2 && peak > 0 && peak < kInfinity) {
            constexpr std::size_t lanes = 16;
            const float down = std::ldexp(1.0f, -std::clamp(std::ilogb(norm), -120, 120));  // squares stay in range
            float sums[lanes] = {};
            std::size_t j = 0;
            for (; j + lanes <= count; j += lanes)
                for (std::size_t k = 0; k < lanes; ++k) {
                    const float y = x[j + k] * down;
                    sums[k] += y * y;
                }
            for (; j < count; ++j) sums[0] += x[j] * down * (x[j] * down);
            double sum = 0;
            for (float each : sums) sum += each;
            norm = static_cast<float>(std::min(std::sqrt(sum) / down, static_cast<double>(FLT_MAX)));
        }
        norms[b] = norm;
        const int exponent = norm > 0 && peak < kInfinity ? std::clamp(std::ilogb(norm), -120, 120) : 0;
        const float before = std::ldexp(1.0f, -exponent), factor = norm > 0 ? steps / (norm * before) : 0;
        std::int32_t largest = 0;
        const auto level = [&](std::size_t j, std::uint32_t bits) HC_HOT {
            const float y = std::fabs(x[j]) * before * factor, capped = y < steps ? y : steps;
            const std::int32_t whole = static_cast<std::int32_t>(capped);
            const std::int32_t l = whole + (uniform(bits) < capped - static_cast<float>(whole));
            const std::int32_t sign = static_cast<std::int32_t>(bits_of(x[j])) >> 31;
            largest = largest > l ? largest : l;
            to[j] = static_cast<std::int16_t>((l ^ sign) - sign);
            x[j] = 0;
        };
        const std::uint32_t start = static_cast<std::uint32_t>(b * half), first = static_cast<std::uint32_t>(std::min(half, count));
        for (std::uint32_t j = 0; j < first; ++j) level(j, random_bits(start + j, key));
        for (std::uint32_t j = 0; j < count - first; ++j) level(half + j, random_bits(start + j, key) * kSecond);
        all.largest = std::max(all.largest, largest);
    }
    return all;
}

HC_CLONES void pack_levels(const std::int16_t* from, std::uint8_t* words, const Layout& layout) {
    const auto encode = [=](int, std::size_t, std::size_t first, std::size_t count, std::int32_t* codes) HC_HOT {
        for (std::size_t j = 0; j < count; ++j) codes[j] = from[first + j];
    };
    if (layout.wide) pack<std::int64_t>(words, layout, encode);
    else pack<std::int32_t>(words, layout, encode);
}
HC_CLONES std::int32_t unpack_levels(const std::uint8_t* words, std::int16_t* to, const Layout& layout, std::uint64_t offset) {
    std::int32_t largest = 0;
    const auto decode = [&](std::size_t first, std::size_t count, const std::int32_t* sums) HC_HOT {
        for (std::size_t j = 0; j < count; ++j) {
            const std::int32_t a = sums[j] < 0 ? -sums[j] : sums[j];
            largest = largest > a ? largest : a;
            to[first + j] = static_cast<std::int16_t>(sums[j]);
        }
    };
    if (layout.wide) unpack<std::int64_t>(words, layout, offset, decode);
    else unpack<std::int32_t>(words, layout, offset, decode);
    return largest;
}
HC_CLONES std::uint32_t add_levels(const std::int16_t* from, const std::uint8_t* norms, float* __restrict out, std::size_t n,
                                   std::size_t bucket, float unit) {
    std::uint32_t peak = 0;
    for (std::size_t begin = 0, b = 0; begin < n; begin += bucket, ++b) {
        const std::size_t count = std::min(bucket, n - begin);
        float norm;
        std::memcpy(&norm, norms + 4 * b, 4);
        const float step = unit * norm;
        float* to = out + begin;
        const std::int16_t* codes = from + begin;
        fetch_ahead(to + 2 * bucket, count);
        for (std::size_t j = 0; j < count; ++j) {
            to[j] += step * codes[j];
            const std::uint32_t a = magnitude(to[j]);
            peak = peak > a ? peak : a;
        }
    }
    return peak;
}

int log2_of(std::uint64_t n) { return 63 - __builtin_clzll(n); }
// Gamma code of n ≥ 1: as many ones as n has bits after the first, a zero, those bits.
std::uint64_t gamma_bits(std::uint64_t n) { return 2 * log2_of(n) + 1; }
void put_gamma(BitWriter& writer, std::uint64_t n) {
    const int bits = log2_of(n);
    writer.put((1ull << bits) - 1, bits + 1);
    writer.put(n ^ 1ull << bits, bits);
}
std::uint64_t take_gamma(BitReader& reader) {
    const int bits = static_cast<int>(reader.ones(31));
    return 1ull << bits | reader.take(bits);
}

// work(gap, level) for every level that is not 0; gap: zeros since the last one.
template <class Work>
void each_level(const std::int16_t* from, std::size_t n, Work work) {
    std::size_t next = 0;
    for (std::size_t i = 0; i < n; ++i) {
        if (from[i] == 0) continue;
        work(i - next, from[i]);
        next = i + 1;
    }
}

int width_for(std::int32_t largest) { return largest ? log2_of(2 * static_cast<std::uint64_t>(largest)) + 1 : 1; }

py::tuple encode_buckets(Floats& grad, int steps, std::size_t bucket, bool l2, bool smaller, std::uint64_t key,
                         std::optional<Bytes> spare) {
    const std::size_t n = length(grad, "grad");
    if (bucket == 0) throw std::invalid_argument("bucket_size must be at least 1");
    if (steps < 1 || steps > kMaxLevels) throw std::invalid_argument("1 to 32767 levels");
    const std::size_t buckets = (n + bucket - 1) / bucket;
    float* g = grad.mutable_data();
    std::vector<float> norms(buckets);
    Summary all;
    std::uint64_t gamma = 0, count = 0;
    {
        py::gil_scoped_release release;
        if (levels.size() < n) levels.resize(n);
        all = to_levels(g, levels.data(), norms.data(), n, bucket, static_cast<float>(steps), l2, Key(key));
        if (all.peak >= kInfinity) std::memset(levels.data(), 0, n * sizeof levels[0]), std::fill(norms.begin(), norms.end(), 0.0f);
    }
    const int width = width_for(all.peak < kInfinity ? all.largest : 0);
    const Layout layout(n, width, 0);
    const std::size_t at_fixed = layout.words * (layout.wide ? 8 : 4);
    if (smaller)
        each_level(levels.data(), n, [&](std::size_t gap, std::int16_t level) {
            gamma += gamma_bits(gap + 1) + 1 + gamma_bits(static_cast<std::uint64_t>(std::abs(level)));
            ++count;
        });
    const bool is_elias = smaller && 4 + (gamma + 7) / 8 < at_fixed;
    const std::size_t size = kHead + 4 * buckets + (is_elias ? 4 + (gamma + 7) / 8 : at_fixed);
    Bytes buffer = body_in(spare, size);
    std::uint8_t* out = buffer.mutable_data() + kHeadroom;
    out[0] = is_elias ? elias : fixed;
    out[1] = static_cast<std::uint8_t>(width);
    if (buckets) std::memcpy(out + kHead, norms.data(), 4 * buckets);
    out += kHead + 4 * buckets;
    py::gil_scoped_release release;
    if (is_elias) {
        const std::uint32_t entries = static_cast<std::uint32_t>(count);
        std::memcpy(out, &entries, 4);
        BitWriter writer(out + 4);
        each_level(levels.data(), n, [&](std::size_t gap, std::int16_t level) {
            put_gamma(writer, gap + 1);
            writer.put(level < 0, 1);
            put_gamma(writer, static_cast<std::uint64_t>(std::abs(level)));
        });
        writer.finish();
    } else {
        pack_levels(levels.data(), out, layout);
    }
    py::gil_scoped_acquire acquire;
    return py::make_tuple(buffer, n, all.peak < kInfinity);
}

bool add_buckets(Floats& out, const Bytes& body, int steps, std::size_t bucket, float scale) {
    const std::size_t n = length(out, "out"), size = length(body, "body");
    if (bucket == 0) throw std::invalid_argument("bucket_size must be at least 1");
    if (steps < 1 || steps > kMaxLevels) throw std::invalid_argument("1 to 32767 levels");
    const std::size_t buckets = (n + bucket - 1) / bucket;
    if (size < kHead + 4 * buckets) throw std::invalid_argument("shorter than its norms");
    const std::uint8_t *in = body.data(), *norms = in + kHead, *codes = norms + 4 * buckets, *end = in + size;
    for (std::size_t b = 0; b < buckets; ++b) {
        float norm;
        std::memcpy(&norm, norms + 4 * b, 4);
        if (!(norm >= 0 && norm <= FLT_MAX)) throw std::invalid_argument("norm out of range");
    }
    if (in[0] > elias || in[1] < 1 || in[1] > width_for(steps)) throw std::invalid_argument("unknown coding of levels");
    if (levels.size() < n) levels.resize(n);
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    if (in[0] == elias) {
        if (end - codes < 4) throw std::invalid_argument("cut off before its levels");
        std::uint32_t count;
        std::memcpy(&count, codes, 4);
        if (count > n) throw std::invalid_argument("more entries than the tensor has elements");
        if (n) std::memset(levels.data(), 0, n * sizeof levels[0]);
        BitReader reader(codes + 4, end);
        std::uint64_t next = 0;
        for (std::uint32_t i = 0; i < count; ++i) {
            const std::uint64_t at = next + take_gamma(reader) - 1;
            if (at >= n) throw std::invalid_argument("index outside the tensor");
            const bool minus = reader.take(1) != 0;
            const std::uint64_t level = take_gamma(reader);
            if (level > static_cast<std::uint64_t>(steps)) throw std::invalid_argument("level out of range");
            levels[at] = static_cast<std::int16_t>(minus ? -static_cast<int>(level) : static_cast<int>(level));
            next = at + 1;
        }
        reader.finish();
    } else {
        const Layout layout(n, in[1], 0);
        if (static_cast<std::size_t>(end - codes) != layout.words * (layout.wide ? 8 : 4))
            throw std::invalid_argument("not of the length that a tensor of this size has");
        const std::uint64_t offset = (1ull << (in[1] - 1)) - 1;
        if (unpack_levels(codes, levels.data(), layout, offset) > steps) throw std::invalid_argument("level out of range");
    }
    return add_levels(levels.data(), norms, to, n, bucket, scale / static_cast<float>(steps)) < kInfinity;
}

}  // namespace

void bind_buckets(py::module_& m) {
    m.def("encode_buckets", &encode_buckets, arg("grad").noconvert(), arg("steps"), arg("bucket"), arg("l2"), arg("smaller"),
          arg("key"), arg("spare") = py::none());
    m.def("add_buckets", &add_buckets, arg("out").noconvert(), arg("body").noconvert(), arg("steps"), arg("bucket"), arg("scale"));
}

}  // namespace hc
