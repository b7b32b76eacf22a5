// Python's face of the native kernels: checks shapes, releases the GIL, calls select.hpp and sparse.hpp.
// What each function computes is stated in reference.py, which has the same functions in NumPy.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "select.hpp"
#include "sparse.hpp"

namespace py = pybind11;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;
using Floats = Array<float>;
using Indices = Array<std::uint32_t>;
using Bytes = Array<std::uint8_t>;

std::size_t length(const py::array& a, const char* what) {
    if (a.ndim() != 1) throw std::invalid_argument(std::string(what) + " must be one-dimensional");
    return static_cast<std::size_t>(a.size());
}
void same_length(std::size_t a, std::size_t b, const char* what) {
    if (a != b) throw std::invalid_argument(std::string(what) + " must have the same length");
}

hc::Values values_of(const std::string& name) {
    if (name == "fp32") return hc::Values::fp32;
    if (name == "fp16") return hc::Values::fp16;
    if (name == "bf16") return hc::Values::bf16;
    throw std::invalid_argument("values must be fp32, fp16 or bf16, not " + name);
}

// Scratch of one thread, reused between calls: a step allocates nothing that grows with a gradient.
struct Scratch {
    std::vector<hc::Candidate> candidates;
    std::vector<std::uint32_t> magnitudes;
};
thread_local Scratch scratch;

py::tuple accumulate(Floats& grad, std::optional<Floats> u, Floats& v, float momentum, bool nesterov, float scale,
                     std::size_t k, std::size_t samples, std::size_t offset) {
    const std::size_t n = length(grad, "grad");
    same_length(n, length(v, "v"), "grad and v");
    if (u) same_length(n, length(*u, "u"), "grad and u");
    if (n > 0xffffffffu) throw std::invalid_argument("a tensor has at most 2^32 - 1 elements");
    if (k > n) throw std::invalid_argument("k is larger than the tensor");
    const hc::Update t{grad.mutable_data(), u ? u->mutable_data() : nullptr, v.mutable_data(), momentum, scale};
    bool finite = true;
    hc::TopK top(scratch.candidates, scratch.magnitudes);
    {
        py::gil_scoped_release release;
        if (!t.u) finite = hc::accumulate_none(t, n, k, samples, offset, top);
        else if (nesterov) finite = hc::accumulate_nesterov(t, n, k, samples, offset, top);
        else finite = hc::accumulate_vanilla(t, n, k, samples, offset, top);
    }
    const std::size_t count = top.count();
    Indices indices(static_cast<py::ssize_t>(count));
    std::uint32_t* out = indices.mutable_data();
    for (std::size_t i = 0; i < count; ++i) out[i] = top[i].index;
    return py::make_tuple(indices, finite);
}

Floats take(const Indices& indices, Floats& v, std::optional<Floats> u, const std::string& kind_name, bool mask) {
    const std::size_t n = length(indices, "indices"), numel = length(v, "v");
    if (u) same_length(numel, length(*u, "u"), "u and v");
    const hc::Values kind = values_of(kind_name);
    const std::uint32_t* at = indices.data();
    for (std::size_t i = 0; i < n; ++i)
        if (at[i] >= numel) throw std::invalid_argument("index outside the tensor");
    // One row of values, and one of what masking takes out of u, for a rollback.
    Floats taken(std::vector<py::ssize_t>{mask && u ? 2 : 1, static_cast<py::ssize_t>(n)});
    float* values = taken.mutable_data();
    float* pv = v.mutable_data();
    float* pu = u ? u->mutable_data() : nullptr;
    py::gil_scoped_release release;
    constexpr std::size_t ahead = 16;  // scattered reads: fetch early what comes next
    for (std::size_t i = 0; i < n; ++i) {
        if (i + ahead < n) {
            HC_PREFETCH(pv + at[i + ahead]);
            if (mask && pu) HC_PREFETCH(pu + at[i + ahead]);
        }
        const std::uint32_t j = at[i];
        values[i] = hc::rounded(pv[j], kind);
        pv[j] -= values[i];
        if (mask && pu) {
            values[n + i] = pu[j];
            pu[j] = 0;
        }
    }
    return taken;
}

Bytes encode_sparse(const Indices& indices, const Floats& values, const std::string& kind_name) {
    const std::size_t n = length(indices, "indices");
    same_length(n, length(values, "values"), "indices and values");
    const hc::Values kind = values_of(kind_name);
    const std::uint32_t* at = indices.data();
    for (std::size_t i = 1; i < n; ++i)
        if (at[i] <= at[i - 1]) throw std::invalid_argument("indices must ascend");
    const int r = hc::best_rice(at, n);
    Bytes body(static_cast<py::ssize_t>(hc::sparse_size(n, kind, hc::rice_bits(at, n, r))));
    hc::encode_sparse(at, values.data(), n, kind, r, body.mutable_data());
    return body;
}

py::tuple decode_sparse(const Bytes& body, std::size_t count, std::uint64_t numel, const std::string& kind_name) {
    const std::size_t size = length(body, "body");
    const hc::Values kind = values_of(kind_name);
    if (count > size) throw std::invalid_argument("shorter than its values");  // before anything of size count is made
    Indices indices(static_cast<py::ssize_t>(count));
    Floats values(static_cast<py::ssize_t>(count));
    hc::decode_sparse(body.data(), size, count, numel, kind, indices.mutable_data(), values.mutable_data());
    return py::make_tuple(indices, values);
}

bool scatter_add(Floats& out, const Indices& indices, const Floats& values, float scale) {
    const std::size_t n = length(indices, "indices"), numel = length(out, "out");
    same_length(n, length(values, "values"), "indices and values");
    const std::uint32_t* at = indices.data();
    for (std::size_t i = 0; i < n; ++i)
        if (at[i] >= numel) throw std::invalid_argument("index outside the tensor");
    const float* value = values.data();
    float* to = out.mutable_data();
    std::uint32_t peak = 0;
    py::gil_scoped_release release;
    for (std::size_t i = 0; i < n; ++i) {
        to[at[i]] += scale * value[i];
        peak = std::max(peak, hc::magnitude(to[at[i]]));
    }
    return peak < hc::kInfinity;
}

HC_CLONES std::uint32_t largest_magnitude(const float* x, std::size_t n) {
    std::uint32_t peak = 0;
    for (std::size_t i = 0; i < n; ++i) peak = std::max(peak, hc::magnitude(x[i]));
    return peak;
}

bool all_finite(const Floats& x) {
    const std::size_t n = length(x, "x");
    const float* p = x.data();
    py::gil_scoped_release release;
    return largest_magnitude(p, n) < hc::kInfinity;
}

HC_CLONES void apply_momentum(float* __restrict out, const float* __restrict u, float* __restrict new_u, std::size_t n,
                              float m, bool nesterov) {
    for (std::size_t i = 0; i < n; ++i) {
        const float g = out[i], moved = m * u[i] + g;
        new_u[i] = moved;
        out[i] = nesterov ? g + m * moved : moved;
    }
}

bool dense_momentum(Floats& out, const Floats& u, Floats& new_u, float momentum, bool nesterov) {
    const std::size_t n = length(out, "out");
    same_length(n, length(u, "u"), "out and u");
    same_length(n, length(new_u, "new_u"), "out and new_u");
    float* to = out.mutable_data();
    float* moved = new_u.mutable_data();
    const float* from = u.data();
    py::gil_scoped_release release;
    if (largest_magnitude(to, n) >= hc::kInfinity) return false;
    apply_momentum(to, from, moved, n, momentum, nesterov);
    return largest_magnitude(moved, n) < hc::kInfinity && largest_magnitude(to, n) < hc::kInfinity;
}

HC_CLONES double sum_of_squares(const float* x, std::size_t n) {
    double lanes[16] = {};
    std::size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (std::size_t j = 0; j < 16; ++j) lanes[j] += static_cast<double>(x[i + j]) * x[i + j];
    for (; i < n; ++i) lanes[0] += static_cast<double>(x[i]) * x[i];
    double sum = 0;
    for (double lane : lanes) sum += lane;
    return sum;
}

double squared_norm(const Floats& x) {
    const std::size_t n = length(x, "x");
    const float* p = x.data();
    py::gil_scoped_release release;
    return sum_of_squares(p, n);
}

}  // namespace

PYBIND11_MODULE(native, m) {
    m.doc() = "Native kernels: the functions of horovod_compress.kernels.reference on raw memory.";
    m.def("accumulate", &accumulate, py::arg("grad").noconvert(), py::arg("u").noconvert().none(true),
          py::arg("v").noconvert(),
          py::arg("momentum"), py::arg("nesterov"), py::arg("scale"), py::arg("k"), py::arg("samples"), py::arg("offset"));
    m.def("take", &take, py::arg("indices").noconvert(), py::arg("v").noconvert(), py::arg("u").noconvert().none(true),
          py::arg("values"), py::arg("mask"));
    m.def("encode_sparse", &encode_sparse, py::arg("indices").noconvert(), py::arg("values").noconvert(), py::arg("kind"));
    m.def("decode_sparse", &decode_sparse, py::arg("body").noconvert(), py::arg("count"), py::arg("numel"), py::arg("kind"));
    m.def("scatter_add", &scatter_add, py::arg("out").noconvert(), py::arg("indices").noconvert(),
          py::arg("values").noconvert(), py::arg("scale"));
    m.def("dense_momentum", &dense_momentum, py::arg("out").noconvert(), py::arg("u").noconvert(),
          py::arg("new_u").noconvert(), py::arg("momentum"), py::arg("nesterov"));
    m.def("squared_norm", &squared_norm, py::arg("x").noconvert());
    m.def("all_finite", &all_finite, py::arg("x").noconvert());
}
