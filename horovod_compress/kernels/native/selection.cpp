// Accumulation with momentum, and the choice of the largest entries: select.hpp for Python.
//
// add_to_residual runs the pass of select.hpp, and chooses nothing. take_entries reads v at given
// indices, codes what it finds, and then writes v, and u where it is masked, with prefetching.
// encode_topk is both, of what the pass has chosen, and the body of that, in one call: small
// tensors cost calls more than passes. The memory for candidates is thread-local, so that a step
// allocates nothing that grows with a gradient.
#include "lists.hpp"
#include "select.hpp"

namespace hc::selection {
namespace {

// Scratch of one thread, reused between calls. candidates and magnitudes are of the choice; chosen
// are the indices that it has found; before and values are of take.
struct Scratch {
    std::vector<Candidate> candidates;
    std::vector<std::uint32_t> magnitudes, chosen;
    std::vector<float> before, values;
};
thread_local Scratch scratch;

template <Momentum M>
bool add(const Update& t, std::size_t n, std::size_t k, std::size_t samples, std::size_t offset,
         std::size_t chunk) {
    TopK top(scratch.candidates, scratch.magnitudes);
    std::vector<std::uint32_t>& chosen = scratch.chosen;
    if (chunk) return dispatch<add_by_chunks_pass<M>>(t, n, k, chunk, top, chosen);
    const bool finite = dispatch<add_to_residual_pass<M>>(t, n, k, samples, offset, top);
    chosen.resize(top.count());
    for (std::size_t i = 0; i < chosen.size(); ++i) chosen[i] = top[i].index;
    return finite;
}

// Leaves the indices of what it chooses in scratch.chosen. Returns whether every new v was finite.
bool add_and_choose(Floats& grad, std::optional<Floats>& u, Floats& v,
                    const std::optional<Floats>& base, float momentum, bool nesterov, float scale,
                    std::size_t k, std::size_t samples, std::size_t offset, std::size_t chunk) {
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
    py::gil_scoped_release release;
    if (!t.u) return add<Momentum::none>(t, n, k, samples, offset, chunk);
    if (nesterov) return add<Momentum::nesterov>(t, n, k, samples, offset, chunk);
    return add<Momentum::vanilla>(t, n, k, samples, offset, chunk);
}

bool add_to_residual(Floats& grad, std::optional<Floats> u, Floats& v,
                     const std::optional<Floats>& base, float momentum, bool nesterov,
                     float scale) {
    return add_and_choose(grad, u, v, base, momentum, nesterov, scale, 0, 0, 0, 0);
}

// What take_entries returns, but for the values, which are the first of scratch.values.
struct Taken {
    Indices indices;
    Floats rows;
    float scales[kMostScales];

    std::size_t count() const { return static_cast<std::size_t>(indices.size()); }
};

// Reads v at the indices into scratch.before, and what is sent of it into scratch.values: in kinds
// that have scales, those follow from all values. Returns how many entries are sent.
std::size_t code_entries(const std::uint32_t* at, std::size_t n, const float* v, Values kind,
                         float* scales) {
    py::gil_scoped_release release;
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

// The indices are inside v.
Taken take(const std::uint32_t* at, std::size_t n, Floats& v, std::optional<Floats>& u, Values kind,
           std::size_t masked) {
    float* pv = v.mutable_data();
    float* pu = masked && u ? u->mutable_data() : nullptr;
    const bool scaled = scales_of(kind) > 0;
    float scales[kMostScales] = {};
    scratch.values.resize(n);
    const std::size_t count = scaled ? code_entries(at, n, pv, kind, scales) : n;
    const auto entries = static_cast<py::ssize_t>(count);
    Taken taken{Indices(entries), Floats({py::ssize_t{pu ? 2 : 1}, entries}), {}};
    std::copy_n(scales, kMostScales, taken.scales);
    std::uint32_t* sent_at = taken.indices.mutable_data();
    float *rows = taken.rows.mutable_data(), *values = scratch.values.data();
    py::gil_scoped_release release;
    for (std::size_t i = 0, sent = 0; i < n; ++i) {
        if (i + tuning::kTakeAhead < n) {
            HC_PREFETCH(pv + at[i + tuning::kTakeAhead]);
            if (pu) HC_PREFETCH(pu + at[i + tuning::kTakeAhead]);
        }
        const std::uint32_t j = at[i];
        const float before = pv[j], value = scaled ? values[i] : rounded(before, kind);
        if (count < n && value == 0) continue;
        sent_at[sent] = j;
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

py::tuple take_entries(const Indices& indices, Floats& v, std::optional<Floats> u, Values kind,
                       std::size_t masked) {
    const std::size_t n = length(indices, "indices"), numel = length(v, "v");
    if (u) same_length(numel, length(*u, "u"), "u and v");
    inside(indices.data(), n, numel);
    const Taken taken = take(indices.data(), n, v, u, kind, masked);
    const Floats sent(static_cast<py::ssize_t>(taken.count()), scratch.values.data());
    return py::make_tuple(taken.indices, taken.rows, sent,
                          std::vector<float>(taken.scales, taken.scales + scales_of(kind)));
}

py::object encode_topk(Floats& grad, std::optional<Floats> u, Floats& v,
                       const std::optional<Floats>& base, float momentum, bool nesterov,
                       float scale, std::size_t k, std::size_t samples, std::size_t offset,
                       std::size_t chunk, Values kind, std::size_t masked) {
    const bool finite =
        add_and_choose(grad, u, v, base, momentum, nesterov, scale, k, samples, offset, chunk);
    const std::vector<std::uint32_t>& chosen = scratch.chosen;
    const Taken taken = take(chosen.data(), finite ? chosen.size() : 0, v, u, kind, masked);
    const Bytes body = sparse::body_of(taken.indices.data(), scratch.values.data(), taken.count(),
                                       kind, taken.scales);
    return encoded(body, taken.count(), finite, py::make_tuple(taken.indices, taken.rows));
}

}  // namespace

void bind(py::module_& m) {
    m.def("add_to_residual", for_lists(&add_to_residual), arg("grad"), arg("u"), arg("v"),
          py::kw_only(), arg("base") = py::none(), arg("momentum") = 0.0f, arg("nesterov") = false,
          arg("scale") = 1.0f);
    m.def("take_entries", for_lists(&take_entries), arg("indices"), arg("v"), arg("u"),
          py::kw_only(), arg("kind"), arg("masked"));
    m.def("encode_topk", for_lists(&encode_topk), arg("grad"), arg("u"), arg("v"), py::kw_only(),
          arg("base") = py::none(), arg("momentum") = 0.0f, arg("nesterov") = false,
          arg("scale") = 1.0f, arg("k"), arg("samples"), arg("offset"), arg("chunk") = 0,
          arg("kind"), arg("masked") = 0);
}

}  // namespace hc::selection
