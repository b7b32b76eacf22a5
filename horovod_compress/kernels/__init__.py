"""The hot loops, on one-dimensional contiguous arrays, in NumPy (`reference`), C++ (`native`) and
Triton (`device`): modules of functions with the same names, arguments and meaning.

`of(array)` is the module that works on an array. For NumPy arrays that is `cpu`: the native module
(C++) where it was built, else the NumPy reference. `backend` names it, "native" or "reference". The
environment variable HOROVOD_COMPRESS_KERNELS selects one of them. A missing native module is an
error where it was selected, and otherwise a warning. For a DeviceArray, a torch tensor on a GPU, it
is `device`. HOROVOD_COMPRESS_KERNELS=device is for tests: gradients on the CPU go through those
kernels too, in Triton's interpreter.

What steps call takes lists in and gives a list back: arrays are positional arguments, lists with
one for each tensor, or None; numbers and flags are keywords, and a list has one for each tensor.
On a device the list may be `Late`: work has begun, and whoever reads results waits for them.
`encode_X` makes a payload's body, or the words of a sum. `decode_X` is the inverse. `decode_add_X`
decodes a body and adds the result.
"""

import functools
import importlib.util
import os
import warnings
from types import ModuleType
from typing import Any, List, Sequence

import numpy as np

from . import reference
from .encoded import HEADROOM, Encoded, new_body
from .lists import Late, in_groups, then
from .reference.quantization import word_dtype

__all__ = [
    "HEADROOM",
    "Encoded",
    "Late",
    "backend",
    "beside",
    "cpu",
    "new_body",
    "of",
    "serves",
    "squared_norms",
    "then",
    "word_dtype",
]

_wanted = os.environ.get("HOROVOD_COMPRESS_KERNELS") or None
if _wanted not in (None, "native", "reference", "device"):
    raise ValueError(
        f"HOROVOD_COMPRESS_KERNELS must be native, reference or device, not {_wanted!r}"
    )
if _wanted == "device":
    # Which Triton reads when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"

backend = "reference"
cpu: ModuleType = reference
if _wanted != "reference":
    try:
        from . import native

        backend, cpu = "native", native
    except ImportError as error:
        if _wanted == "native":
            raise
        warnings.warn(
            f"horovod_compress: the native kernels are not available ({error}); the NumPy "
            f"reference serves, about ten times "
            "slower. Install a C++ compiler and reinstall horovod-compress, or set "
            "HOROVOD_COMPRESS_KERNELS=reference if that is "
            "what you want.",
            RuntimeWarning,
            stacklevel=2,
        )


def of(array: Any) -> ModuleType:
    """The kernels that work on this array, a module of functions."""
    if isinstance(array, np.ndarray):
        return cpu
    kernels = getattr(array, "kernels", None)
    if kernels is None:
        raise TypeError(
            f"no kernels for {type(array).__module__}.{type(array).__qualname__}: they work on "
            f"NumPy's arrays and on DeviceArray"
        )
    return kernels


@functools.lru_cache(maxsize=None)
def serves(device_type: str) -> bool:
    """Returns whether there are kernels for arrays on devices of this type, as torch names it: on
    "cuda" where Triton is installed; on "cpu" where HOROVOD_COMPRESS_KERNELS=device says that they
    are to be interpreted, as tests do."""
    return (
        device_type == ("cpu" if _wanted == "device" else "cuda")
        and importlib.util.find_spec("triton") is not None
    )


def squared_norms(arrays: Sequence[Any]) -> Sequence[float]:
    """Of each array Σ x², whatever their places and types of float are."""

    def alike(its: List[Any]) -> Sequence[float]:
        # Kernels know no float64.
        wide = its[0].dtype == np.float64
        return [float(np.dot(x, x)) for x in its] if wide else of(its[0]).squared_norm(its)

    return in_groups(arrays, lambda x: (getattr(x, "device", None), x.dtype), alike)


def beside(array: Any, other: Any) -> Any:
    """The array where another one is: itself, or a copy."""
    return np.asarray(array) if isinstance(other, np.ndarray) else other.beside(array)
