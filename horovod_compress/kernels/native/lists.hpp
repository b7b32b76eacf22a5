// Kernels of one tensor, for lists of tensors: what reference/__init__.py makes of the
// reference's.
//
// A list has a value for each tensor. Arrays come in lists, or None stands for no array of any
// tensor; any other value that is no list counts for all. All values are converted before the first
// tensor's kernel runs. Arrays are taken as they are, and never copied.
#pragma once

#include <tuple>
#include <type_traits>

#include "arrays.hpp"

namespace hc {

// Converts a value for one tensor, or for all of them, and appends it to others; false where that
// cannot be.
template <class T, class = void>
struct Argument {
    template <class Values>
    static bool append(py::handle value, Values& to) {
        py::detail::make_caster<T> caster;
        if (!caster.load(value, true)) return false;
        to.push_back(py::detail::cast_op<T>(std::move(caster)));
        return true;
    }
    template <class Values>
    static bool append_for_all(py::handle value, Values& to) {
        return append(value, to);
    }
};
template <class T>
struct Argument<T, std::enable_if_t<std::is_base_of_v<py::array, T>>> {
    template <class Values>
    static bool append(py::handle value, Values& to) {
        if (!py::isinstance<T>(value)) return false;
        to.push_back(py::reinterpret_borrow<T>(value));
        return true;
    }
    template <class Values>
    static bool append_for_all(py::handle, Values&) {
        return false;
    }
};
template <class T>
struct Argument<std::optional<T>> {
    template <class Values>
    static bool append(py::handle value, Values& to) {
        return append_none(value, to) || Argument<T>::append(value, to);
    }
    template <class Values>
    static bool append_for_all(py::handle value, Values& to) {
        return append_none(value, to) || Argument<T>::append_for_all(value, to);
    }
    template <class Values>
    static bool append_none(py::handle value, Values& to) {
        if (value.is_none()) to.emplace_back();
        return value.is_none();
    }
};

// The values of an argument, one for each tensor, or one for all.
template <class T>
class Many {
  public:
    bool load(py::handle from) {
        listed_ = PyList_Check(from.ptr());
        if (!listed_) return Argument<T>::append_for_all(from, values_);
        values_.reserve(py::len(from));
        for (const py::handle value : py::reinterpret_borrow<py::list>(from))
            if (!Argument<T>::append(value, values_)) return false;
        return true;
    }
    bool is_for(std::size_t tensors) const { return !listed_ || values_.size() == tensors; }
    std::size_t size() const { return values_.size(); }
    auto& operator[](std::size_t tensor) { return values_[listed_ ? tensor : 0]; }

  private:
    // std::vector<bool> has no references to its elements.
    std::vector<std::conditional_t<std::is_same_v<T, bool>, std::uint8_t, T>> values_;
    bool listed_ = false;
};

// The function of lists, whose first is of arrays, that calls `kernel` for one tensor after the
// other. It returns a list of results.
template <class Result, class First, class... Others>
auto for_lists(Result (*kernel)(First, Others...)) {
    return [kernel](Many<std::decay_t<First>> first, Many<std::decay_t<Others>>... others) {
        const std::size_t tensors = first.size();
        if (!(others.is_for(tensors) && ...))
            throw std::invalid_argument("lists must have a value for each tensor");
        py::list results(tensors);
        for (std::size_t i = 0; i < tensors; ++i) {
            if constexpr (std::is_void_v<Result>) {
                kernel(first[i], others[i]...);
                results[i] = py::none();
            } else {
                results[i] = kernel(first[i], others[i]...);
            }
        }
        return results;
    };
}

}  // namespace hc

namespace pybind11::detail {

template <class T>
struct type_caster<hc::Many<T>> {
    PYBIND11_TYPE_CASTER(hc::Many<T>, const_name("List[") + make_caster<T>::name + const_name("]"));

    bool load(handle from, bool) { return value.load(from); }
};

template <>
struct type_caster<hc::Values> {
    PYBIND11_TYPE_CASTER(hc::Values, const_name("str"));

    bool load(handle from, bool) {
        if (!isinstance<str>(from)) return false;
        value = hc::values_of(from.cast<std::string>());
        return true;
    }
};

}  // namespace pybind11::detail
