"""The kernels as the papers state them, in NumPy. The native ones are tested against these; one name, one meaning, both sides.

All arrays are one-dimensional and contiguous; gradients, residuals and values are float32, indices uint32.
"""
from .adaptive import adacomp, strom, variance
from .buckets import add_buckets, encode_buckets
from .checksum import checksum
from .codes import add_bf16, add_natural, add_one_bit, encode_bf16, encode_natural, from_float16, one_bit, to_float16
from .dense import dense_momentum, flush_denormals, largest, scatter_add, spread, squared_norm
from .lowrank import orthonormalize, product, project, project_back, subtract_product
from .quantization import coordinates, dequantize, fine_enough, quantize, random_bits, sum_signs, vote
from .samples import add_sample_squares
from .selection import accumulate, take
from .sparse import HEADROOM, add_sparse, decode_sparse, encode_sparse

__all__ = [
    "HEADROOM", "accumulate", "adacomp", "add_bf16", "add_buckets", "add_natural", "add_one_bit", "add_sample_squares", "add_sparse",
    "checksum", "coordinates",
    "decode_sparse", "dense_momentum", "dequantize", "encode_bf16", "encode_buckets", "encode_natural",
    "encode_sparse", "fine_enough", "flush_denormals", "from_float16", "largest", "one_bit", "orthonormalize", "product", "project", "project_back",
    "quantize", "random_bits", "scatter_add", "spread", "squared_norm", "strom", "subtract_product", "sum_signs", "take", "to_float16",
    "variance", "vote",
]
