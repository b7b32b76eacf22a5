// Index and value coding of sparse payloads (docs/wire-format.md): the values, then the gaps
// between ascending indices in Rice code.
//
// A Rice code with parameter r is the gap's r low bits and the rest in unary. The low bits of all
// gaps come first and the unary parts after them, so that where an entry's low bits are does not
// wait for the entries before. Encoding tries parameters around the one that fits the mean gap,
// each a read of the indices; then it reads values and indices once and writes the body. Decoding
// reads the unary parts as the places of ones, adds the low bits, and leaves indices and values in
// thread-local memory; decode_add_sparse then adds them to the output.
//
// Decoding trusts nothing: every read is inside the body, every index inside the tensor, and all is
// checked before anything is added.
#include "bits.hpp"
#include "lists.hpp"

namespace hc::sparse {
namespace {

constexpr int kMaxRice = 31;

std::uint64_t low_size(std::uint64_t n, int r) { return (n * r + 7) / 8; }

HC_INLINE std::uint64_t high_bits(const std::uint32_t* indices, std::size_t n, int r) {
    if (n == 0) return 0;
    // All of them are at most as many as the tensor has elements.
    std::uint32_t zeros = indices[0] >> r;
    for (std::size_t i = 1; i < n; ++i) zeros += (indices[i] - indices[i - 1] - 1) >> r;
    return n + std::uint64_t{zeros};
}

// The parameter of fewest bits, the least of several: their number is convex in it, so walk from
// the one that fits the mean gap.
int best_rice(const std::uint32_t* indices, std::size_t n) {
    if (n == 0) return 0;
    const double mean = (static_cast<double>(indices[n - 1]) + 1) / static_cast<double>(n);
    int r = mean > 1 ? std::max(std::ilogb(mean * 0.6931), 0) : 0;
    const auto bits = [=](int parameter) {
        return n * parameter + dispatch<high_bits>(indices, n, parameter);
    };
    std::uint64_t best = bits(r), other;
    for (; r < kMaxRice && (other = bits(r + 1)) < best; ++r) best = other;
    for (; r > 0 && (other = bits(r - 1)) <= best; --r) best = other;
    return r;
}

constexpr std::size_t kSparseHead = 6;  // count, kind, Rice parameter

// The d of a value that is exactly ±scale/2^d.
HC_INLINE std::uint32_t power_code(float value, float scale) {
    return (bits_of(value) >> 28 & 8u) |
           (((magnitude(scale) >> 23) - (magnitude(value) >> 23)) & 7u);
}
HC_INLINE float power_value(std::uint32_t code, float scale) {
    return scale * float_of((code & 8u) << 28 | (127 - (code & 7u)) << 23);  // ±2^-d
}

// Which of the four scales a value is, the first where several are alike.
HC_INLINE std::uint32_t two_bits_code(float value, const float* scales) {
    return value == scales[0] ? 0 : value == scales[1] ? 1 : value == scales[2] ? 2 : 3;
}

HC_INLINE void put_values(const float* __restrict values, std::size_t n, Values kind,
                          const float* scales, std::uint8_t* __restrict out) {
    if (kind == Values::fp32) {
        if (n) std::memcpy(out, values, 4 * n);
    } else if (kind == Values::sign) {
        const auto pack = [=](std::size_t first, std::size_t count) HC_HOT {
            std::uint32_t byte = 0;
            for (std::size_t j = 0; j < count; ++j) byte |= bits_of(values[first + j]) >> 31 << j;
            out[first / 8] = static_cast<std::uint8_t>(byte);
        };
        std::size_t i = 0;
        for (; i + 8 <= n; i += 8) pack(i, 8);
        if (i < n) pack(i, n - i);
    } else if (kind == Values::power) {
        for (std::size_t i = 0; i < n / 2; ++i)
            out[i] = static_cast<std::uint8_t>(power_code(values[2 * i], scales[0]) |
                                               power_code(values[2 * i + 1], scales[0]) << 4);
        if (n % 2) out[n / 2] = static_cast<std::uint8_t>(power_code(values[n - 1], scales[0]));
    } else if (kind == Values::two_bits) {
        for (std::size_t i = 0; i < n; i += 4) {
            std::uint32_t byte = 0;
            for (std::size_t j = 0; j < std::min<std::size_t>(4, n - i); ++j)
                byte |= two_bits_code(values[i + j], scales) << 2 * j;
            out[i / 4] = static_cast<std::uint8_t>(byte);
        }
    } else {
        for (std::size_t i = 0; i < n; ++i) {
            const std::uint16_t h =
                kind == Values::fp16 ? to_half(values[i]) : to_bfloat(values[i]);
            std::memcpy(out + 2 * i, &h, 2);
        }
    }
}
HC_INLINE void read_values(const std::uint8_t* __restrict in, std::size_t n, Values kind,
                           const float* scales, float* __restrict values) {
    if (kind == Values::fp32) {
        if (n) std::memcpy(values, in, 4 * n);
    } else if (kind == Values::sign) {
        const std::uint32_t plus = bits_of(scales[0]);
        for (std::size_t i = 0; i < n; i += 8) {
            std::uint32_t eight[8];
            for (std::uint32_t j = 0; j < 8; ++j)
                eight[j] = plus ^ (std::uint32_t{in[i / 8]} >> j & 1) << 31;
            std::memcpy(values + i, eight, 4 * std::min<std::size_t>(8, n - i));
        }
    } else if (kind == Values::power) {
        for (std::size_t i = 0; i < n / 2; ++i) {
            values[2 * i] = power_value(in[i], scales[0]);
            values[2 * i + 1] = power_value(in[i] >> 4, scales[0]);
        }
        if (n % 2) values[n - 1] = power_value(in[n / 2], scales[0]);
    } else if (kind == Values::two_bits) {
        for (std::size_t i = 0; i < n; ++i) values[i] = scales[in[i / 4] >> 2 * (i % 4) & 3];
    } else {
        for (std::size_t i = 0; i < n; ++i) {
            std::uint16_t h;
            std::memcpy(&h, in + 2 * i, 2);
            values[i] = kind == Values::fp16 ? from_half(h) : from_bfloat(h);
        }
    }
}

HC_INLINE void put_gaps(const std::uint32_t* indices, std::size_t n, int r, std::uint8_t* out) {
    BitWriter low(out);
    UnaryWriter high(out + low_size(n, r));
    std::uint32_t next = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t gap = indices[i] - next;
        low.put(gap & ((1u << r) - 1), r);
        high.put(gap >> r);
        next = indices[i] + 1;
    }
    low.finish();
    high.finish();
}
// Room for kPlacesAtOnce more indices.
HC_INLINE void read_gaps(const std::uint8_t* in, const std::uint8_t* end, std::size_t n, int r,
                         std::uint64_t numel, std::uint32_t* indices) {
    const std::uint64_t low = low_size(n, r), size = static_cast<std::uint64_t>(end - in);
    if (size < low) throw std::invalid_argument("shorter than its gaps");
    if (8 * (size - low) > n + ((numel - n) >> r) + 7)
        throw std::invalid_argument("index outside the tensor");
    read_places(in + low, end, n, indices);
    // Then the places of the ones are the indices.
    if (r == 0) {
        if (n && indices[n - 1] >= numel) throw std::invalid_argument("index outside the tensor");
        return;
    }
    const BitReader bits(in, end);
    const std::uint64_t mask = (1ull << r) - 1;
    std::uint32_t last = 0;
    std::uint64_t next = 0, at = 0;
    for (std::size_t i = 0; i < n; ++i, at += r) {
        next += std::uint64_t{indices[i] - last} << r | (bits.from(at) & mask);
        last = indices[i] + 1;
        indices[i] = static_cast<std::uint32_t>(next++);
    }
    if (at < 8 * low && in[low - 1] >> (at & 7))
        throw std::invalid_argument("longer than its entries");
    if (next > numel) throw std::invalid_argument("index outside the tensor");  // they ascend
}

struct Sparse {
    std::size_t count = 0;
    std::vector<std::uint32_t> indices;
    std::vector<float> values;

    // They only grow: what they grow by is filled with zeros.
    void reserve(std::size_t n) {
        count = n;
        if (values.size() >= n) return;
        indices.resize(n + kPlacesAtOnce);
        values.resize(n);
    }
};
thread_local Sparse decoded;  // reused between calls

// Reads a body into `to`. The body must be used up exactly, its padding zero.
void read_sparse(const std::uint8_t* body, std::size_t size, std::uint64_t numel, Sparse& to) {
    if (size < kSparseHead) throw std::invalid_argument("cut off in the head of its entries");
    std::uint32_t n;
    std::memcpy(&n, body, 4);
    if (n > numel) throw std::invalid_argument("more entries than the tensor has elements");
    if (body[4] >= kKinds) throw std::invalid_argument("unknown kind of values");
    const int r = body[5];
    if (r > kMaxRice) throw std::invalid_argument("Rice parameter out of range");
    const auto kind = static_cast<Values>(body[4]);
    const std::uint8_t *in = body + kSparseHead, *end = body + size;
    const std::size_t scale_bytes = 4 * scales_of(kind);
    if (static_cast<std::uint64_t>(size - kSparseHead) < scale_bytes + values_size(n, kind))
        throw std::invalid_argument("shorter than its values");
    float scales[kMostScales] = {};
    std::memcpy(scales, in, scale_bytes);
    if (peak_of(scales, kMostScales) >= kInfinity) throw std::invalid_argument("scale not finite");
    in += scale_bytes;
    const std::uint64_t bits = bits_of_value(kind) * std::uint64_t{n};
    if (bits % 8 && in[bits / 8] >> bits % 8) throw std::invalid_argument("longer than its values");
    // Only now: n entries are really there.
    to.reserve(n);
    dispatch<read_values>(in, n, kind, scales, to.values.data());
    dispatch<read_gaps>(in + values_size(n, kind), end, n, r, numel, to.indices.data());
}

py::object encode_sparse(const Indices& indices, const Floats& values, Values kind,
                         const std::vector<float>& scales) {
    const std::size_t n = length(indices, "indices");
    same_length(n, length(values, "values"), "indices and values");
    const std::uint32_t* at = indices.data();
    for (std::size_t i = 1; i < n; ++i)
        if (at[i] <= at[i - 1]) throw std::invalid_argument("indices must ascend");
    if (scales.size() != scales_of(kind))
        throw std::invalid_argument(std::string("values of kind ") +
                                    kKindNames[static_cast<int>(kind)] + " have " +
                                    std::to_string(scales_of(kind)) + " scales");
    return encoded(body_of(at, values.data(), n, kind, scales.data()), n, true);
}

py::tuple decode_sparse(const Bytes& body, std::uint64_t numel) {
    const Entries entries = entries_of(body.data(), length(body, "body"), numel);
    const auto n = static_cast<py::ssize_t>(entries.count);
    return py::make_tuple(Indices(n, entries.indices), Floats(n, entries.values));
}

bool decode_add_sparse(Floats& out, const Bytes& body, float scale) {
    const std::size_t numel = length(out, "out"), size = length(body, "body");
    const std::uint8_t* bytes = body.data();
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    const Entries entries = entries_of(bytes, size, numel);
    return add_entries(to, entries.indices, entries.values, entries.count, scale);
}

}  // namespace

Entries entries_of(const std::uint8_t* body, std::size_t size, std::uint64_t numel) {
    read_sparse(body, size, numel, decoded);
    return {decoded.indices.data(), decoded.values.data(), decoded.count};
}

Bytes body_of(const std::uint32_t* indices, const float* values, std::size_t n, Values kind,
              const float* scales) {
    const int r = best_rice(indices, n);
    const std::size_t head = kSparseHead + 4 * scales_of(kind), value_bytes = values_size(n, kind);
    Bytes buffer = new_body(head + value_bytes + low_size(n, r) +
                            (dispatch<high_bits>(indices, n, r) + 7) / 8);
    std::uint8_t* out = buffer.mutable_data() + kHeadroom;
    const auto count = static_cast<std::uint32_t>(n);
    std::memcpy(out, &count, 4);
    out[4] = static_cast<std::uint8_t>(kind);
    out[5] = static_cast<std::uint8_t>(r);
    if (scales_of(kind)) std::memcpy(out + kSparseHead, scales, 4 * scales_of(kind));
    dispatch<put_values>(values, n, kind, scales, out + head);
    dispatch<put_gaps>(indices, n, r, out + head + value_bytes);
    return buffer;
}

void bind(py::module_& m) {
    m.def("encode_sparse", for_lists(&encode_sparse), arg("indices"), arg("values"), py::kw_only(),
          arg("kind"), arg("scales") = py::tuple());
    m.def("decode_sparse", for_lists(&decode_sparse), arg("body"), py::kw_only(), arg("numel"));
    m.def("decode_add_sparse", for_lists(&decode_add_sparse), arg("out"), arg("body"),
          py::kw_only(), arg("scale"));
}

}  // namespace hc::sparse
