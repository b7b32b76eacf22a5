// What the kernels share at the border to Python: arrays in and out, checked, and what encoders
// return.
//
// What each function computes is stated in reference/, which has the same functions in NumPy, file
// by file. A function takes arrays without converting or copying them, checks lengths, releases
// Python's lock and calls the variant of its pass for this CPU. Passes know pointers only. Buffers
// of bodies are those of an earlier step where they fit.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "sparse.hpp"

namespace py = pybind11;
using py::arg;

namespace hc {

template <class T>
using Array = py::array_t<T, py::array::c_style>;
using Floats = Array<float>;
using Indices = Array<std::uint32_t>;
using Bytes = Array<std::uint8_t>;

inline std::size_t length(const py::array& a, const char* what) {
    if (a.ndim() != 1) throw std::invalid_argument(std::string(what) + " must be one-dimensional");
    return static_cast<std::size_t>(a.size());
}
inline void same_length(std::size_t a, std::size_t b, const char* what) {
    if (a != b) throw std::invalid_argument(std::string(what) + " must have the same length");
}
inline void inside(const std::uint32_t* indices, std::size_t n, std::size_t numel) {
    for (std::size_t i = 0; i < n; ++i)
        if (indices[i] >= numel) throw std::invalid_argument("index outside the tensor");
}

// to[at[i]] += scale · value[i]; returns whether what stands there now is finite.
inline bool add_entries(float* to, const std::uint32_t* at, const float* value, std::size_t n,
                        float scale) {
    constexpr std::size_t ahead = tuning::kScatterAhead;
    std::uint32_t peak = 0;
    for (std::size_t i = 0; i < n; ++i) {
        if (i + ahead < n) HC_PREFETCH(to + at[i + ahead]);
        to[at[i]] += scale * value[i];
        peak = std::max(peak, magnitude(to[at[i]]));
    }
    return peak < kInfinity;
}

// Memory that begins on a cache line, where it is not small: TensorFlow takes that over as it is,
// and else copies.
template <class T>
Array<T> aligned(std::size_t n) {
    if (n * sizeof(T) < tuning::kAlignedBytes) return Array<T>(static_cast<py::ssize_t>(n));
    Bytes memory(static_cast<py::ssize_t>(n * sizeof(T) + 64));
    std::uint8_t* first = memory.mutable_data();
    first += -reinterpret_cast<std::uintptr_t>(first) % 64;
    return Array<T>(static_cast<py::ssize_t>(n), reinterpret_cast<T*>(first), memory);
}

// An encoded body's array has room for a frame's header before it and for a padding byte behind it.
constexpr std::size_t kHeadroom = 24;

inline Bytes new_body(std::size_t size) {
    Bytes buffer = aligned<std::uint8_t>(kHeadroom + size + 1);
    std::memset(buffer.mutable_data(), 0, kHeadroom);
    buffer.mutable_data()[kHeadroom + size] = 0;
    return buffer;
}

// The same in memory of an earlier step, where that is given and fits: what is freed and allocated
// anew each step costs a pass.
inline Bytes body_in(const std::optional<Bytes>& spare, std::size_t size) {
    if (!spare || length(*spare, "spare") != kHeadroom + size + 1) return new_body(size);
    Bytes buffer = *spare;
    std::memset(buffer.mutable_data(), 0, kHeadroom);
    return buffer;
}

// The named tuple that encoders return, kernels.encoded.Encoded; made as a plain tuple is, because
// its constructor is a Python function.
inline PyObject* encoded_class = nullptr;
inline py::object encoded(const Bytes& buffer, std::size_t elements, bool finite,
                          const py::tuple& undo = py::tuple()) {
    if (!encoded_class)
        encoded_class =
            py::object(py::module_::import("horovod_compress.kernels.encoded").attr("Encoded"))
                .release()
                .ptr();
    auto* type = reinterpret_cast<PyTypeObject*>(encoded_class);
    PyObject *tuple = type->tp_alloc(type, 4), *count = PyLong_FromSize_t(elements);
    if (!tuple || !count) throw py::error_already_set();
    PyTuple_SET_ITEM(tuple, 0, py::object(buffer).release().ptr());
    PyTuple_SET_ITEM(tuple, 1, count);
    PyTuple_SET_ITEM(tuple, 2, py::bool_(finite).release().ptr());
    PyTuple_SET_ITEM(tuple, 3, py::object(undo).release().ptr());
    return py::reinterpret_steal<py::object>(tuple);
}

namespace sparse {
// Of a sparse body, until this thread reads another one. Throws where it is not, down to the last
// bit, entries of a tensor of numel elements.
struct Entries {
    const std::uint32_t* indices;
    const float* values;
    std::size_t count;
};
Entries entries_of(const std::uint8_t* body, std::size_t size, std::uint64_t numel);
// The buffer of a sparse body: indices ascend.
Bytes body_of(const std::uint32_t* indices, const float* values, std::size_t n, Values kind,
              const float* scales);
}  // namespace sparse

}  // namespace hc
