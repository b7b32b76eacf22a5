"""The kernels on a device, for `DeviceArray`: Triton programs over torch tensors, for the
algorithms that say `on_device`.

The functions are those of `kernels.cpu` by the same names, and their results are the same to the
last bit, but for products with few vectors (`lowrank`). The tensors of a list are on one device,
and share launches. Passes over their elements run there, on the stream that is current, which
`wait_for` makes wait for others; what has as many elements as are sent comes to the CPU, where the
CPU's kernels code it. Programs are compiled without fused multiply-add, which rounds once where the
others round twice. With TRITON_INTERPRET=1 they run in Triton's interpreter, on tensors of the CPU.
"""

from .adaptive import encode_adacomp, encode_variance
from .array import DeviceArray, wait_for
from .dense import (
    apply_momentum,
    decode_add_bf16,
    decode_float16,
    encode_bf16,
    max_abs,
    squared_norm,
)
from .entries import decode_add_sparse
from .lowrank import orthonormalize, product, project, project_back, subtract_product
from .quantization import dequantize, encode_scales, norms, quantize
from .selection import add_to_residual, encode_topk, take_entries

__all__ = [
    "DeviceArray",
    "add_to_residual",
    "apply_momentum",
    "decode_add_bf16",
    "decode_add_sparse",
    "decode_float16",
    "dequantize",
    "encode_adacomp",
    "encode_bf16",
    "encode_scales",
    "encode_topk",
    "encode_variance",
    "max_abs",
    "norms",
    "orthonormalize",
    "product",
    "project",
    "project_back",
    "quantize",
    "squared_norm",
    "subtract_product",
    "take_entries",
    "wait_for",
]
