"""The kernels as the papers state them, in NumPy. The native kernels have the same names and
meanings, and are tested against these.

All arrays are one-dimensional and contiguous. Gradients, residuals and values are float32; indices
are uint32. Encoders of a payload's body return `Encoded`.
"""

import functools
from typing import Any, Callable, List

import numpy as np

from ..lists import by_tensor
from .adaptive import encode_adacomp, encode_strom, encode_variance
from .buckets import decode_add_buckets, encode_buckets
from .codes import (
    decode_add_bf16,
    decode_add_natural,
    decode_add_one_bit,
    decode_float16,
    encode_bf16,
    encode_float16,
    encode_natural,
    encode_one_bit,
)
from .dct import decode_add_dct, encode_dct
from .dense import (
    add_up,
    apply_momentum,
    flush_denormals,
    max_abs,
    max_abs_and_deviation,
    move,
    norms,
    scatter_add,
    squared_norm,
)
from .frames import open_frames, seal_frame
from .lowrank import orthonormalize, product, project, project_back, subtract_product
from .quantization import decode_signs, dequantize, encode_scales, encode_signs, quantize
from .random import draw_coordinates, random_bits
from .selection import add_to_residual, encode_topk, take_entries
from .sparse import decode_add_sparse, decode_sparse, encode_sparse

__all__ = [
    "add_to_residual",
    "add_up",
    "apply_momentum",
    "decode_add_bf16",
    "decode_add_buckets",
    "decode_add_dct",
    "decode_add_natural",
    "decode_add_one_bit",
    "decode_add_sparse",
    "decode_float16",
    "decode_signs",
    "decode_sparse",
    "dequantize",
    "draw_coordinates",
    "encode_adacomp",
    "encode_bf16",
    "encode_buckets",
    "encode_dct",
    "encode_float16",
    "encode_natural",
    "encode_one_bit",
    "encode_scales",
    "encode_signs",
    "encode_sparse",
    "encode_strom",
    "encode_topk",
    "encode_variance",
    "flush_denormals",
    "max_abs",
    "max_abs_and_deviation",
    "move",
    "norms",
    "open_frames",
    "orthonormalize",
    "product",
    "project",
    "project_back",
    "quantize",
    "random_bits",
    "scatter_add",
    "seal_frame",
    "squared_norm",
    "subtract_product",
    "take_entries",
]


def _for_lists(kernel: Callable[..., Any]) -> Callable[..., List[Any]]:
    """Makes a kernel of one tensor one of lists of tensors, which returns a list of results. NumPy
    does not warn of numbers that overflow or are NaN: gradients have them, and kernels say so."""

    @functools.wraps(kernel)
    def call(*arrays: Any, **options: Any) -> List[Any]:
        with np.errstate(over="ignore", invalid="ignore"):
            return [kernel(*its, **own) for its, own in by_tensor(arrays, options)]

    return call


# Of one array, or none.
_ALONE = {
    "draw_coordinates",
    "flush_denormals",
    "open_frames",
    "random_bits",
    "seal_frame",
}
globals().update({name: _for_lists(globals()[name]) for name in __all__ if name not in _ALONE})
