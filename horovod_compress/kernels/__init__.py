"""The hot loops, on one-dimensional contiguous arrays, in NumPy (`reference`), C++ (`native`) and
Triton (`device`): modules of functions with the same names, arguments and meaning.

`of(array)` is the module that works on an array. For NumPy arrays that is `cpu`: the native module
(C++) where it was built, else the NumPy reference. `backend` names it, "native" or "reference". The
environment variable HOROVOD_COMPRESS_KERNELS selects one of them. A missing native module is an
error where it was selected, and otherwise a warning. For a DeviceArray, a torch tensor on a GPU, it
is `device`. HOROVOD_COMPRESS_KERNELS=device is for tests: gradients on the CPU go through those
kernels too, in Triton's interpreter.

`kernels.NAME(…)` calls the kernel of that name for an algorithm, as
`encoded = yield from kernels.encode_topk(grad, …)`: on the CPU at once, on a device together with
other tensors' calls.

`encode_X` makes a payload's body, or the words of a sum. `decode_X` is the inverse. `decode_add_X`
decodes a body and adds the result. Arrays are positional arguments; numbers and flags are keywords.
"""

import functools
import importlib.util
import os
import warnings
from types import GeneratorType, ModuleType
from typing import Any, Generator, List, Sequence

import numpy as np

from . import reference
from .calls import DeviceCall
from .encoded import HEADROOM, Encoded, new_body
from .reference.quantization import word_dtype

__all__ = [
    "HEADROOM",
    "DeviceCall",
    "Encoded",
    "at_once",
    "backend",
    "beside",
    "cpu",
    "new_body",
    "of",
    "serves",
    "together",
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


def __getattr__(name: str) -> Any:
    """The kernel of that name for steps, which call it by `yield from`."""
    if not hasattr(cpu, name):
        raise AttributeError(f"there is no kernel {name}")

    def call(*arrays: Any, **options: Any) -> Generator[DeviceCall, Any, Any]:
        for array in arrays:
            if not isinstance(array, _NOT_ON_DEVICE):
                answer = yield DeviceCall(array, name, arrays, options, array.stream())
                if isinstance(answer, Exception):
                    raise answer
                return answer
        return getattr(cpu, name)(*arrays, **options)

    return globals().setdefault(name, call)


# Either says nothing of a device.
_NOT_ON_DEVICE = np.ndarray, type(None)


def together(calls: Sequence[DeviceCall]) -> List[Any]:
    """Makes calls, which share launches. Returns what their kernels return, or exceptions, in the
    same order."""
    return of(calls[0].where).together(calls) if calls else []


def at_once(returned: Any) -> Any:
    """The result of a method that returns it plainly, or of a generator that yields DeviceCalls
    only."""
    if not isinstance(returned, GeneratorType):
        return returned
    answer = None
    try:
        while True:
            (answer,) = together([returned.send(answer)])
    except StopIteration as stop:
        return stop.value


@functools.lru_cache(maxsize=None)
def serves(device_type: str) -> bool:
    """Whether there are kernels for arrays on devices of this type, as torch names it: on "cuda"
    where Triton is installed; on "cpu" where HOROVOD_COMPRESS_KERNELS=device says that they are to
    be interpreted, as tests do."""
    return (
        device_type == ("cpu" if _wanted == "device" else "cuda")
        and importlib.util.find_spec("triton") is not None
    )


def beside(array: Any, other: Any) -> Any:
    """The array where another one is: itself, or a copy."""
    return np.asarray(array) if isinstance(other, np.ndarray) else other.beside(array)
