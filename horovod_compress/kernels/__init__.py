"""The hot loops, on raw one-dimensional contiguous arrays: native (C++) where it was built, else the NumPy reference.

`backend` says which: "native" or "reference". The variable HOROVOD_COMPRESS_KERNELS asks for one of them: by itself a missing
native module is a warning, where it was asked for an error.
"""
import os
import warnings

from . import reference

_wanted = os.environ.get("HOROVOD_COMPRESS_KERNELS") or None
if _wanted not in (None, "native", "reference"):
    raise ValueError(f"HOROVOD_COMPRESS_KERNELS must be native or reference, not {_wanted!r}")

backend = "reference"
if _wanted != "reference":
    try:
        from . import native

        backend = "native"
    except ImportError as error:
        if _wanted == "native":
            raise
        warnings.warn(
            f"horovod_compress: the native kernels are not available ({error}); the NumPy reference serves, about ten times "
            "slower. Install a C++ compiler and reinstall horovod-compress, or set HOROVOD_COMPRESS_KERNELS=reference if that is "
            "what you want.",
            RuntimeWarning,
            stacklevel=2,
        )

from .reference import *  # noqa: E402, F403
from .reference.sparse import new_body  # noqa: E402, F401

if backend == "native":
    for _name in reference.__all__:
        globals()[_name] = getattr(native, _name)
