// Index and value coding of sparse payloads.
#include "arrays.hpp"

namespace hc {
namespace {

thread_local Sparse decoded;  // reused between calls

Bytes encode(const Indices& indices, const Floats& values, const std::string& kind, float scale) {
    const std::size_t n = length(indices, "indices");
    same_length(n, length(values, "values"), "indices and values");
    const std::uint32_t* at = indices.data();
    for (std::size_t i = 1; i < n; ++i)
        if (at[i] <= at[i - 1]) throw std::invalid_argument("indices must ascend");
    return sparse_body(at, values.data(), n, values_of(kind), scale);
}

py::tuple decode(const Bytes& body, std::uint64_t numel) {
    decode_sparse(body.data(), length(body, "body"), numel, decoded);
    return py::make_tuple(to_array(decoded.indices), to_array(decoded.values));
}

bool add(Floats& out, const Bytes& body, float scale) {
    const std::size_t numel = length(out, "out"), size = length(body, "body");
    const std::uint8_t* bytes = body.data();
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    decode_sparse(bytes, size, numel, decoded);
    return add_entries(to, decoded.indices.data(), decoded.values.data(), decoded.indices.size(), scale);
}

}  // namespace

void bind_sparse(py::module_& m) {
    m.def("encode_sparse", &encode, arg("indices").noconvert(), arg("values").noconvert(), arg("kind"), arg("scale") = 0.0f);
    m.def("decode_sparse", &decode, arg("body").noconvert(), arg("numel"));
    m.def("add_sparse", &add, arg("out").noconvert(), arg("body").noconvert(), arg("scale"));
}

}  // namespace hc
