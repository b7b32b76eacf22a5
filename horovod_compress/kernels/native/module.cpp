// The extension module: binds the groups, one file each as in reference/, and says and sets the
// instructions in use.
#include "arrays.hpp"

namespace hc {
namespace adaptive { void bind(py::module_& m); }
namespace buckets { void bind(py::module_& m); }
namespace codes { void bind(py::module_& m); }
namespace dct { void bind(py::module_& m); }
namespace dense { void bind(py::module_& m); }
namespace frames { void bind(py::module_& m); }
namespace lowrank { void bind(py::module_& m); }
namespace quantization { void bind(py::module_& m); }
namespace selection { void bind(py::module_& m); }
namespace sparse { void bind(py::module_& m); }

namespace {

const std::vector<std::string> kNames = {"baseline", "avx2", "avx512"};

// Those that this CPU has, the best last.
std::vector<std::string> available_instructions() {
    return {kNames.begin(), kNames.begin() + static_cast<int>(best_instructions()) + 1};
}

void use_instructions(const std::string& name) {
    const auto names = available_instructions();
    const auto found = std::find(names.begin(), names.end(), name);
    if (found == names.end())
        throw std::invalid_argument("no kernels for the instructions '" + name + "' here");
    instructions = static_cast<Instructions>(found - names.begin());
}

}  // namespace
}  // namespace hc

PYBIND11_MODULE(_native, m) {
    m.doc() = "Native kernels: the functions of horovod_compress.kernels.reference on raw memory.";
    m.def("available_instructions", &hc::available_instructions);
    m.def("use_instructions", &hc::use_instructions, arg("name"),
          "For tests: all give the same results, the last of them fastest.");
    hc::adaptive::bind(m);
    hc::buckets::bind(m);
    hc::frames::bind(m);
    hc::codes::bind(m);
    hc::dct::bind(m);
    hc::quantization::bind(m);
    hc::selection::bind(m);
    hc::sparse::bind(m);
    hc::dense::bind(m);
    hc::lowrank::bind(m);
}
