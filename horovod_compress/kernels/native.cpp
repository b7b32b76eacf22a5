// The native kernels: one file a group, as in reference/.
#include "arrays.hpp"

PYBIND11_MODULE(native, m) {
    m.doc() = "Native kernels: the functions of horovod_compress.kernels.reference on raw memory.";
    m.attr("HEADROOM") = hc::kHeadroom;
    hc::bind_adaptive(m);
    hc::bind_buckets(m);
    hc::bind_checksum(m);
    hc::bind_codes(m);
    hc::bind_quantization(m);
    hc::bind_selection(m);
    hc::bind_sparse(m);
    hc::bind_dense(m);
    hc::bind_lowrank(m);
}
