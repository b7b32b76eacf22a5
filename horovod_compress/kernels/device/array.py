"""Arrays on a device, which NumPy's functions take as far as steps, states and checkpoints need
them."""

import importlib
from types import ModuleType
from typing import Any, Callable, Dict, Iterable, Optional, Sequence, Tuple, Union

import numpy as np
import torch

_TORCH: Dict[Any, Callable[..., torch.Tensor]] = {
    np.add: torch.add,
    np.subtract: torch.subtract,
    np.multiply: torch.multiply,
    np.divide: torch.divide,
    np.not_equal: torch.ne,
    np.copysign: lambda value, like: torch.copysign(torch.full_like(like, value), like),
}
_DTYPES: Dict[torch.dtype, np.dtype] = {
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.uint16: np.dtype(np.uint16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}
_TENSORS = {dtype: of for of, dtype in _DTYPES.items()}
Array = Union[np.ndarray, "DeviceArray"]


def stream_of(device: torch.device) -> Optional[int]:
    """The number of the current stream on a GPU, None elsewhere. torch.cuda.current_stream() makes
    an object of it, which takes many times as long."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None


def wait_for(streams: Iterable[Optional[int]], device: torch.device) -> None:
    """Makes the current stream of a device wait for what others have under way.

    Args:
        streams: their numbers, as `DeviceArray.stream` returns them.
        device: theirs.
    """
    for stream in {*streams} - {None, stream_of(device)}:
        # ExternalStream(0) is a new stream; 0 is the number of the default one.
        other = (
            torch.cuda.ExternalStream(stream, device)
            if stream
            else torch.cuda.default_stream(device)
        )
        torch.cuda.current_stream(device).wait_stream(other)


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A contiguous torch tensor in one dimension, by NumPy's interface. What is computed of it and
    of arrays on the CPU is on the device, unless it goes into an array on the CPU. np.asarray
    copies it to the CPU, and waits for it, as does np.concatenate with an array on the CPU, whose
    result is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def kernels(self) -> ModuleType:
        """The kernels that work on it."""
        return importlib.import_module(__package__)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.tensor.device

    @property
    def dtype(self) -> np.dtype:
        """As NumPy names it."""
        return _DTYPES[self.tensor.dtype]

    @property
    def shape(self) -> Tuple[int, ...]:
        """(size,)."""
        return tuple(self.tensor.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.tensor.numel()

    @property
    def nbytes(self) -> int:
        """The memory of its elements."""
        return self.tensor.nbytes

    def __len__(self) -> int:
        return self.size

    def view(self, dtype: Any) -> "DeviceArray":
        """The same memory as elements of another type."""
        return DeviceArray(self.tensor.view(_TENSORS[np.dtype(dtype)]))

    def fill(self, value: float) -> None:
        """Gives all elements this value."""
        self.tensor.fill_(value)

    def any(self) -> bool:
        """Returns whether an element is not zero; waits for the device."""
        return bool(self.tensor.any())

    def stream(self) -> Any:
        """On a GPU the number of the stream that is current; None elsewhere."""
        return stream_of(self.device)

    def beside(self, array: Array) -> "DeviceArray":
        """An array's copy where this one is, or the array itself where it is there already."""
        tensor = self._tensor_of(array)
        return (
            array
            if isinstance(array, DeviceArray) and tensor is array.tensor
            else DeviceArray(tensor)
        )

    def __getitem__(self, at: Any) -> "DeviceArray":
        """The elements of a slice, or a copy of those at indices, uint32."""
        return DeviceArray(self.tensor[at if isinstance(at, slice) else self._index_of(at)])

    def __setitem__(self, at: Any, values: Any) -> None:
        """Writes one element, or those at indices, uint32, that do not repeat."""
        self.tensor[self._index_of(at) if isinstance(at, np.ndarray) else at] = self._tensor_of(
            values
        )

    def _index_of(self, indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(indices.astype(np.int64)).to(self.device)

    def __array__(self, dtype: Any = None, copy: Optional[bool] = None) -> np.ndarray:
        array = self.tensor.detach().to("cpu", copy=True).numpy()
        return array if dtype is None else array.astype(dtype)

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: Tuple[Any, ...] = (None,), **keywords: Any
    ) -> Any:
        (into,) = out
        if isinstance(into, np.ndarray):
            return ufunc(
                *(np.asarray(each) if isinstance(each, DeviceArray) else each for each in inputs),
                out=into,
                **keywords,
            )
        if ufunc not in _TORCH or method != "__call__" or keywords:
            return NotImplemented
        # Where something is on the CPU, torch computes with numbers as they are, and with arrays
        # once they are here.
        tensors = [self._tensor_of(each) for each in inputs]
        if into is None:
            return DeviceArray(_TORCH[ufunc](*tensors))
        if not any(isinstance(each, torch.Tensor) for each in tensors):
            return NotImplemented
        _TORCH[ufunc](*tensors, out=into.tensor)
        return into

    def __array_function__(
        self, function: Any, types: Iterable[type], args: Any, keywords: Any
    ) -> Any:
        if function is np.copyto and len(args) == 2 and not keywords:
            to, source = args
            if isinstance(to, DeviceArray):
                to.tensor.copy_(to._tensor_of(source))
            else:
                np.copyto(to, np.asarray(source))
            return None
        if function is np.empty_like and len(args) == 1 and keywords.keys() <= {"dtype"}:
            return DeviceArray(
                torch.empty_like(
                    args[0].tensor, dtype=_TENSORS[np.dtype(keywords.get("dtype", args[0].dtype))]
                )
            )
        if function is np.concatenate and len(args) == 1 and not keywords:
            (arrays,) = args
            if any(isinstance(each, np.ndarray) for each in arrays):
                return np.concatenate([np.asarray(each) for each in arrays])
            return DeviceArray(_joined([each.tensor for each in arrays]))
        return NotImplemented

    def _tensor_of(self, value: Any) -> Any:
        """A number as Python's, an array as a tensor on this device."""
        if isinstance(value, DeviceArray):
            return value.tensor.to(self.device)
        if isinstance(value, np.ndarray) and value.ndim:
            return torch.from_numpy(value).to(self.device)
        return value.item() if isinstance(value, (np.generic, np.ndarray)) else value


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one behind the other: the memory that they are parts of, where they lie so."""
    tensors = [each for each in tensors if len(each)] or list(tensors[:1])
    first, end = tensors[0], tensors[0].data_ptr()
    for each in tensors:
        alike = each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if each.data_ptr() != end or not alike:
            return torch.cat(tensors)
        end += each.nbytes
    return first.as_strided((sum(map(len, tensors)),), (1,))
