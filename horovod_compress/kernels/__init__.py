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

from .reference import *  # noqa: E402, F403
from .reference.sparse import new_body  # noqa: E402, F401

if backend == "native":
    for _name in reference.__all__:
        globals()[_name] = getattr(native, _name)
