// Accumulation with momentum, and the choice of the largest entries: select.hpp for Python.
//
// add_to_residual runs the pass of select.hpp with thread-local memory for candidates, so that a
// step allocates nothing that grows with a gradient, and returns their indices. take_entries reads
// v at those indices, codes what it finds, and then writes v, and u where it is masked, with
// prefetching. encode_topk is both, and the body of what was taken, in one call: small tensors cost
// calls more than passes.
#include "arrays.hpp"
#include "select.hpp"

namespace hc::selection {
namespace {

// Scratch of one thread, reused between calls. chosen is of add_by_chunks_pass; before and values
// are of take_entries.
struct Scratch {
    std::vector<Candidate> candidates;
    std::vector<std::uint32_t> magnitudes, chosen;
    std::vector<float> before, values;
};
thread_local Scratch scratch;

template <Momentum M>
bool add(const Update& t, std::size_t n, std::size_t k, std::size_t samples, std::size_t offset,
         std::size_t chunk, TopK& top) {
    if (chunk) return dispatch<add_by_chunks_pass<M>>(t, n, k, chunk, top, scratch.chosen);
    return dispatch<add_to_residual_pass<M>>(t, n, k, samples, offset, top);
}

py::tuple add_to_residual(Floats& grad, std::optional<Floats> u, Floats& v,
                          const std::optional<Floats>& base, float momentum, bool nesterov,
                          float scale, std::size_t k, std::size_t samples, std::size_t offset,
                          std::size_t chunk) {
    const std::size_t n = length(grad, "grad");
    same_length(n, length(v, "v"), "grad and v");
    if (u) same_length(n, length(*u, "u"), "grad and u");
    if (base) same_length(n, length(*base, "base"), "grad and base");
    if (n > 0xffffffffu) throw std::invalid_argument("a tensor has at most 2^32 - 1 elements");
    if (k > n || (chunk && k > chunk))
        throw std::invalid_argument("k is larger than the tensor, or than a chunk of it");
    const Update t{grad.mutable_data(),
                   base ? base->data() : nullptr,
                   u ? u->mutable_data() : nullptr,
                   v.mutable_data(),
                   momentum,
                   scale};
    bool finite = true;
    TopK top(scratch.candidates, scratch.magnitudes);
    {
        py::gil_scoped_release release;
        if (!t.u) finite = add<Momentum::none>(t, n, k, samples, offset, chunk, top);
        else if (nesterov) finite = add<Momentum::nesterov>(t, n, k, samples, offset, chunk, top);
        else finite = add<Momentum::vanilla>(t, n, k, samples, offset, chunk, top);
    }
    const std::size_t count = chunk ? scratch.chosen.size() : top.count();
    Indices indices(static_cast<py::ssize_t>(count));
    std::uint32_t* out = indices.mutable_data();
    for (std::size_t i = 0; i < count; ++i) out[i] = chunk ? scratch.chosen[i] : top[i].index;
    return py::make_tuple(indices, finite);
}

// What take_entries returns, but for the values, which are the first of scratch.values.
struct Taken {
    Indices indices;
    Floats rows;
    float scales[kMostScales] = {};

    std::size_t count() const { return static_cast<std::size_t>(indices.size()); }
};

// Reads v at the indices into scratch.before, and what is sent of it into scratch.values, in kinds
// that have scales: those follow from all values. Returns how many entries are sent.
std::size_t code_entries(const std::uint32_t* at, std::size_t n, const float* v, Values kind,
                         float* scales) {
    scratch.values.resize(n);
    if (scales_of(kind) == 0) return n;
    scratch.before.resize(n);
    float *before = scratch.before.data(), *values = scratch.values.data();
    for (std::size_t i = 0; i < n; ++i) {
        if (i + tuning::kTakeAhead < n) HC_PREFETCH(v + at[i + tuning::kTakeAhead]);
        before[i] = v[at[i]];
    }
    dispatch<code_values>(before, n, kind, values, scales);
    return kind == Values::power
               ? n - static_cast<std::size_t>(std::count(values, values + n, 0.0f))
               : n;
}

Taken take_entries(const Indices& indices, Floats& v, std::optional<Floats> u, Values kind,
                   std::size_t masked) {
    const std::size_t n = length(indices, "indices"), numel = length(v, "v");
    if (u) same_length(numel, length(*u, "u"), "u and v");
    const std::uint32_t* at = indices.data();
    inside(at, n, numel);
    float* pv = v.mutable_data();
    float* pu = masked && u ? u->mutable_data() : nullptr;
    Taken taken;
    std::size_t count;
    {
        py::gil_scoped_release release;
        count = code_entries(at, n, pv, kind, taken.scales);
    }
    taken.indices = count == n ? indices : Indices(static_cast<py::ssize_t>(count));
    taken.rows = Floats(std::vector<py::ssize_t>{pu ? 2 : 1, static_cast<py::ssize_t>(count)});
    std::uint32_t* sent_at = count == n ? nullptr : taken.indices.mutable_data();
    float *rows = taken.rows.mutable_data(), *values = scratch.values.data();
    const bool scaled = scales_of(kind) > 0;
    py::gil_scoped_release release;
    for (std::size_t i = 0, sent = 0; i < n; ++i) {
        if (i + tuning::kTakeAhead < n) {
            HC_PREFETCH(pv + at[i + tuning::kTakeAhead]);
            if (pu) HC_PREFETCH(pu + at[i + tuning::kTakeAhead]);
        }
        const std::uint32_t j = at[i];
        const float before = pv[j], value = scaled ? values[i] : rounded(before, kind);
        if (sent_at && value == 0) continue;
        if (sent_at) sent_at[sent] = j;
        rows[sent] = before;
        values[sent] = value;
        pv[j] -= value;
        if (pu) {
            rows[count + sent] = pu[j];
            if (j < masked) pu[j] = 0;
        }
        ++sent;
    }
    return taken;
}

py::object encode_topk(Floats& grad, std::optional<Floats> u, Floats& v,
                       const std::optional<Floats>& base, float momentum, bool nesterov,
                       float scale, std::size_t k, std::size_t samples, std::size_t offset,
                       std::size_t chunk, const std::string& kind, std::size_t masked) {
    const Values values = values_of(kind);
    const py::tuple added =
        add_to_residual(grad, u, v, base, momentum, nesterov, scale, k, samples, offset, chunk);
    const bool finite = added[1].cast<bool>();
    const Taken taken =
        take_entries(finite ? added[0].cast<Indices>() : Indices(0), v, u, values, masked);
    const Bytes body = sparse::body_of(taken.indices.data(), scratch.values.data(), taken.count(),
                                       values, taken.scales);
    return encoded(body, taken.count(), finite, py::make_tuple(taken.indices, taken.rows));
}

}  // namespace

void bind(py::module_& m) {
    m.def("add_to_residual", &add_to_residual, arg("grad").noconvert(),
          arg("u").noconvert().none(true), arg("v").noconvert(), py::kw_only(),
          arg("base").noconvert() = py::none(), arg("momentum") = 0.0f, arg("nesterov") = false,
          arg("scale") = 1.0f, arg("k") = 0, arg("samples") = 0, arg("offset") = 0,
          arg("chunk") = 0);
    m.def(
        "take_entries",
        [](const Indices& indices, Floats& v, std::optional<Floats> u, const std::string& kind,
           std::size_t masked) {
            const Values values = values_of(kind);
            const Taken taken = take_entries(indices, v, u, values, masked);
            const Floats sent(static_cast<py::ssize_t>(taken.count()), scratch.values.data());
            return py::make_tuple(
                taken.indices, taken.rows, sent,
                std::vector<float>(taken.scales, taken.scales + scales_of(values)));
        },
        arg("indices").noconvert(), arg("v").noconvert(), arg("u").noconvert().none(true),
        py::kw_only(), arg("kind"), arg("masked"));
    m.def("encode_topk", &encode_topk, arg("grad").noconvert(), arg("u").noconvert().none(true),
          arg("v").noconvert(), py::kw_only(), arg("base").noconvert() = py::none(),
          arg("momentum") = 0.0f, arg("nesterov") = false, arg("scale") = 1.0f, arg("k"),
          arg("samples"), arg("offset"), arg("chunk") = 0, arg("kind"), arg("masked") = 0);
}

}  // namespace hc::selection
