// Accumulation with momentum, and the choice of the largest entries: select.hpp for Python.
//
// add_to_residual runs the pass of select.hpp with thread-local memory for candidates, so that a step allocates nothing that grows with a
// gradient, and returns their indices. take_entries reads and writes v, and u where it is masked, at those indices, with prefetching.
// encode_topk is both, and the body of what was taken, in one call: small tensors cost calls more than passes.
#include "arrays.hpp"
#include "select.hpp"

namespace hc::selection {
namespace {

// Scratch of one thread, reused between calls: a step allocates nothing that grows with a gradient.
struct Scratch {
    std::vector<Candidate> candidates;
    std::vector<std::uint32_t> magnitudes;
};
thread_local Scratch scratch;

py::tuple add_to_residual(Floats& grad, std::optional<Floats> u, Floats& v, float momentum, bool nesterov, float scale, std::size_t k,
                          std::size_t samples, std::size_t offset) {
    const std::size_t n = length(grad, "grad");
    same_length(n, length(v, "v"), "grad and v");
    if (u) same_length(n, length(*u, "u"), "grad and u");
    if (n > 0xffffffffu) throw std::invalid_argument("a tensor has at most 2^32 - 1 elements");
    if (k > n) throw std::invalid_argument("k is larger than the tensor");
    const Update t{grad.mutable_data(), u ? u->mutable_data() : nullptr, v.mutable_data(), momentum, scale};
    bool finite = true;
    TopK top(scratch.candidates, scratch.magnitudes);
    {
        py::gil_scoped_release release;
        if (!t.u) finite = dispatch<add_to_residual_pass<Momentum::none>>(t, n, k, samples, offset, top);
        else if (nesterov) finite = dispatch<add_to_residual_pass<Momentum::nesterov>>(t, n, k, samples, offset, top);
        else finite = dispatch<add_to_residual_pass<Momentum::vanilla>>(t, n, k, samples, offset, top);
    }
    const std::size_t count = top.count();
    Indices indices(static_cast<py::ssize_t>(count));
    std::uint32_t* out = indices.mutable_data();
    for (std::size_t i = 0; i < count; ++i) out[i] = top[i].index;
    return py::make_tuple(indices, finite);
}

Floats take_entries(const Indices& indices, Floats& v, std::optional<Floats> u, Values kind, bool mask) {
    const std::size_t n = length(indices, "indices"), numel = length(v, "v");
    if (u) same_length(numel, length(*u, "u"), "u and v");
    const std::uint32_t* at = indices.data();
    inside(at, n, numel);
    // One row of values, and one of what masking takes out of u, for a rollback.
    Floats rows(std::vector<py::ssize_t>{mask && u ? 2 : 1, static_cast<py::ssize_t>(n)});
    float* values = rows.mutable_data();
    float* pv = v.mutable_data();
    float* pu = u ? u->mutable_data() : nullptr;
    py::gil_scoped_release release;
    constexpr std::size_t ahead = tuning::kTakeAhead;
    for (std::size_t i = 0; i < n; ++i) {
        if (i + ahead < n) {
            HC_PREFETCH(pv + at[i + ahead]);
            if (mask && pu) HC_PREFETCH(pu + at[i + ahead]);
        }
        const std::uint32_t j = at[i];
        values[i] = rounded(pv[j], kind);
        pv[j] -= values[i];
        if (mask && pu) {
            values[n + i] = pu[j];
            pu[j] = 0;
        }
    }
    return rows;
}

Values rounding(const std::string& kind) {
    const Values values = values_of(kind);
    if (has_scale(values)) throw std::invalid_argument("values must be fp32, fp16 or bf16, not " + kind);
    return values;
}

py::object encode_topk(Floats& grad, std::optional<Floats> u, Floats& v, float momentum, bool nesterov, float scale, std::size_t k,
                       std::size_t samples, std::size_t offset, const std::string& kind, bool mask) {
    const Values values = rounding(kind);
    const py::tuple added = add_to_residual(grad, u, v, momentum, nesterov, scale, k, samples, offset);
    const bool finite = added[1].cast<bool>();
    const Indices indices = finite ? added[0].cast<Indices>() : Indices(0);
    const Floats rows = take_entries(indices, v, u, values, mask);
    const auto n = static_cast<std::size_t>(indices.size());
    return encoded(sparse::body_of(indices.data(), rows.data(), n, values, 0.0f), n, finite, py::make_tuple(indices, rows));
}

}  // namespace

void bind(py::module_& m) {
    m.def("add_to_residual", &add_to_residual, arg("grad").noconvert(), arg("u").noconvert().none(true), arg("v").noconvert(), py::kw_only(),
          arg("momentum") = 0.0f, arg("nesterov") = false, arg("scale") = 1.0f, arg("k") = 0, arg("samples") = 0, arg("offset") = 0);
    m.def(
        "take_entries",
        [](const Indices& indices, Floats& v, std::optional<Floats> u, const std::string& kind, bool mask) {
            return take_entries(indices, v, u, rounding(kind), mask);
        },
        arg("indices").noconvert(), arg("v").noconvert(), arg("u").noconvert().none(true), py::kw_only(), arg("kind"), arg("mask"));
    m.def("encode_topk", &encode_topk, arg("grad").noconvert(), arg("u").noconvert().none(true), arg("v").noconvert(), py::kw_only(),
          arg("momentum") = 0.0f, arg("nesterov") = false, arg("scale") = 1.0f, arg("k"), arg("samples"), arg("offset"), arg("kind"),
          arg("mask") = false);
}

}  // namespace hc::selection
