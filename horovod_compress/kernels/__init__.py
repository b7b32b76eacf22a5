"""The hot loops, on raw one-dimensional contiguous arrays: native (C++) where it was built, else the NumPy reference.

`backend` says which: "native" or "reference". HOROVOD_COMPRESS_KERNELS=reference asks for the reference.
"""
import os
import warnings

from . import reference

backend = "reference"
if os.environ.get("HOROVOD_COMPRESS_KERNELS", "native") != "reference":
    try:
        from . import native

        backend = "native"
    except ImportError as error:
        warnings.warn(
            f"horovod_compress: the native kernels are not available ({error}); the NumPy reference serves, about ten times "
            "slower. Install a C++ compiler and reinstall horovod-compress.",
            RuntimeWarning,
            stacklevel=2,
        )

_chosen = native if backend == "native" else reference
accumulate = _chosen.accumulate
take = _chosen.take
encode_sparse = _chosen.encode_sparse
decode_sparse = _chosen.decode_sparse
scatter_add = _chosen.scatter_add
dense_momentum = _chosen.dense_momentum
squared_norm = _chosen.squared_norm
all_finite = _chosen.all_finite
