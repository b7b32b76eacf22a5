"""The parameters of an optimizer under their names, and what they hold as flat float32."""

import collections
import collections.abc
import inspect
import zlib
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import numpy as np
import torch
from torch import nn

from .. import kernels
from ..compressors.base import Compressor
from ..session.notices import warn_once
from ..session.ranks import Ranks
from ..session.session import Session
from . import shards

_CPU = torch.device("cpu")
# As model.named_parameters() gives.
NamedParameters = Iterable[Tuple[str, torch.Tensor]]


class Slot:
    """A parameter under its name. shape: that of its gradients; following: the slot of the
    parameter that came after it in the last step."""

    def __init__(self, name: str, param: torch.Tensor) -> None:
        self.name, self.param, self.following = name, param, self
        self.shape = shards.shape_of(param)
        # A copy of the gradient, where its own memory does not serve.
        self._staging: Optional[torch.Tensor] = None
        # A single number, the tensor with its memory, and a view of that.
        self._carrier: Tuple[Any, Any, Any] = (None, None, None)

    def tensor_of(self, carrier: Any) -> Tuple[torch.Tensor, torch.Tensor]:
        """(The tensor with a carrier's memory, a view of it), made once for a single number."""
        if self._carrier[0] is not carrier:
            tensor = tensor_of(carrier)
            made = carrier, tensor, tensor.view(-1)
            if carrier.size > 1:
                return made[1:]
            self._carrier = made
        return self._carrier[1:]

    def load(
        self, grad: torch.Tensor, on_device: bool = False, carries_float64: bool = False
    ) -> Tuple[torch.Tensor, Any]:
        """(tensor, flat array), contiguous and of float32: the gradient's own memory where
        possible. On the CPU, or with `on_device` where the gradient is, if that is a device that
        kernels serve. With `carries_float64` those of float64 stay that, on the CPU."""
        dtype = torch.float64 if carries_float64 and grad.dtype == torch.float64 else torch.float32
        on_device = on_device and dtype == torch.float32
        own = flat_memory(grad, on_device, dtype)
        if own is not None:
            return grad, own
        if grad.dtype not in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            raise TypeError(
                f"{self.name}: gradients of {grad.dtype} cannot be compressed; real floating point "
                f"is needed"
            )
        served = on_device and kernels.serves(grad.device.type)
        place = grad.device if served else _CPU
        if self._staging is None or self._staging.device != place or self._staging.dtype != dtype:
            if grad.device != place:
                why = (
                    "install triton, or horovod-compress[gpu], to compress them there"
                    if on_device
                    else "there are no kernels for this on a device"
                )
                warn_once(
                    f"gradients on {grad.device.type} are compressed on the CPU, through pinned "
                    f"memory: {why}"
                )
            pinned = grad.device.type == "cuda" and not served
            self._staging = torch.empty(grad.shape, dtype=dtype, device=place, pin_memory=pinned)
        self._staging.copy_(grad)
        return self._staging, flat(self._staging, served)

    def load_for(self, session: Session, grad: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """As of `load`, for a session, which tells where that costs numbers of float64."""
        # Only asked where kernels could be.
        might_be = not grad.is_cpu or kernels.serves("cpu")
        # Most are so.
        if not might_be and grad.dtype is torch.float32 and grad.is_contiguous():
            array = grad.numpy()
            return grad, array if array.ndim == 1 else array.reshape(-1)
        exchange, is_float64 = session.exchange, grad.dtype == torch.float64
        on_device = might_be and exchange.tensors.on_device(self.name)
        loaded, array = self.load(
            grad, on_device, is_float64 and exchange.tensors.carries_float64(self.name)
        )
        if is_float64 and not session.has_told_of_float32 and loses_numbers(grad, loaded):
            session.tell_of_float32(self.name)
        return loaded, array


class Slots(List[Slot]):
    """The parameters of an optimizer, in which gradients are looked up."""

    def __init__(self, pairs: NamedParameters) -> None:
        # A tied parameter has several names, and goes by the first.
        slots: Dict[int, Slot] = {}
        for name, param in pairs:
            slots.setdefault(id(param), Slot(name, param))
        super().__init__(slots.values())
        self._last = self[-1]

    def find(
        self, tensor: torch.Tensor, param_of_copy: Callable[[], Optional[torch.Tensor]]
    ) -> Slot:
        """Looks a gradient up.

        Args:
            tensor: the gradient itself, or its dense copy where `sparse_as_dense` makes one.
            param_of_copy: returns the parameter of such a copy.

        Returns:
            The slot of its parameter.

        Raises:
            ValueError: where it is of none of these.
        """
        # Gradients come in nearly the same order every step.
        slot = self._last.following
        if slot.param.grad is not tensor:
            slot = next(
                (slot for slot in self if slot.param.grad is tensor), None
            ) or self._find_densified(tensor, param_of_copy())
            self._last.following = slot
        self._last = slot
        return slot

    def _find_densified(self, tensor: torch.Tensor, param: Optional[torch.Tensor]) -> Slot:
        """The slot of a parameter whose gradient is sparse, and comes as a dense copy."""
        if any(slot.param is tensor for slot in self):
            raise ValueError(
                "op=Adasum is not supported: it reduces parameters, not gradients; use hvd.Average "
                "or hvd.Sum"
            )
        for slot in self:
            if is_sparse(slot.param.grad) and slot.param is param:
                return slot
        raise ValueError(
            f"a gradient of shape {tuple(tensor.shape)} belongs to none of the parameters that "
            f"this compression was bound "
            "to: bind it to the optimizer's parameters as they are now, after all "
            "add_param_group()"
        )


class Streams:
    """The streams of a GPU that gradients were encoded on: backward is on those of forward, and
    what comes after may be on another one."""

    def __init__(self) -> None:
        self._encoded: Dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def mark(self, memory: torch.Tensor) -> None:
        """Work begun with this memory of a GPU so far has to be done before what comes after
        `join`."""
        stream = torch.cuda.current_stream(memory.device)
        self._encoded[stream] = stream.record_event()

    def join(self) -> None:
        """Has the current stream wait; the CPU does not."""
        for stream, event in self._encoded.items():
            torch.cuda.current_stream(stream.device).wait_event(event)
        self._encoded.clear()


def places_of(
    ranks: Ranks, params: Iterable[torch.Tensor], compressor: Compressor
) -> Dict[str, Any]:
    """Where gradients of parameters are compressed: on ranks that gather on devices, those that
    differ in that would wait for each other; of some compressors the last bits depend on it, and on
    the kind of GPU."""
    exactly = compressor.traits.same_kernels and compressor.traits.on_device
    if not ranks.gathers_on_device and not exactly:
        return {}
    devices, places = {param.device for param in params}, set()
    for device in devices:
        place = "a device" if kernels.serves(device.type) else "the CPU"
        if exactly and place == "a device" and device.type == "cuda":
            place += " of compute capability {}.{}".format(
                *torch.cuda.get_device_capability(device)
            )
        places.add(place)
    return {"compressed on": sorted(places), "devices": len(devices)}


def flat(tensor: torch.Tensor, on_device: bool) -> Any:
    """The tensor's memory as a flat array: NumPy on the CPU, else a DeviceArray. The tensor is
    contiguous."""
    if not on_device:
        return (tensor if tensor.is_cpu else tensor.cpu()).numpy().reshape(-1)
    from ..kernels.device import DeviceArray  # imports Triton

    # `data`: what is written here is no change that the user has made.
    return DeviceArray(tensor.data.view(-1))


def tensor_of(array: Any) -> torch.Tensor:
    """The tensor with the memory of such an array."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array.tensor


def loses_numbers(wide: torch.Tensor, narrow: torch.Tensor) -> bool:
    """Returns whether numbers of float64, finite and not 0, are infinite or 0 in their copy, if
    that is of float32."""
    if narrow.dtype == torch.float64:
        return False
    wide = wide.to(narrow.device)
    return bool(((narrow == 0) & (wide != 0) | narrow.isinf() & wide.isfinite()).any())


def flat_memory(
    tensor: torch.Tensor, on_device: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """The flat array that is a tensor's own memory: on the CPU, or with `on_device` on a device
    that kernels serve. None where it is not contiguous, or not of `dtype`, or is elsewhere."""
    served = on_device and kernels.serves(tensor.device.type)
    fits = tensor.dtype == dtype and tensor.is_contiguous() and (served or tensor.device == _CPU)
    return flat(tensor, served) if fits else None


def named(
    optimizer: Optional[torch.optim.Optimizer], named_parameters: Optional[NamedParameters]
) -> List[Tuple[str, torch.Tensor]]:
    """(name, parameter) pairs of all parameters to expect, checked."""
    groups = [] if optimizer is None else optimizer.param_groups
    numbered = [
        (f"group{i}.{j}", p)
        for i, group in enumerate(groups)
        for j, p in enumerate(group["params"])
    ]
    found = numbered if named_parameters is None else _listed(named_parameters)
    if not found:
        raise ValueError(
            "no parameters: give the optimizer, named_parameters=model.named_parameters(), or both"
        )
    repeated = sorted(
        name for name, count in collections.Counter(name for name, _ in found).items() if count > 1
    )
    if repeated:
        raise ValueError(f"parameter names must be unique; these come twice: {', '.join(repeated)}")
    known = {id(p) for _, p in found}
    if any(id(p) not in known for group in groups for p in group["params"]):
        raise ValueError("the optimizer has parameters that named_parameters does not name")
    return found


def _listed(named_parameters: Any) -> List[Tuple[str, torch.Tensor]]:
    """The pairs of `named_parameters`. TypeError and ValueError for what does not bring (name,
    parameter) pairs."""
    code = getattr(named_parameters, "gi_code", None)
    if (
        code is nn.Module.named_parameters.__code__
        and inspect.getgeneratorstate(named_parameters) == inspect.GEN_CREATED
    ):
        # It is not used up here, but made once more: users give the same generator to
        # hvd.DistributedOptimizer.
        named_parameters = nn.Module.named_parameters(
            **inspect.getgeneratorlocals(named_parameters)
        )
    if not isinstance(named_parameters, collections.abc.Iterable):
        raise TypeError(
            f"named_parameters must be (name, parameter) pairs, as model.named_parameters() gives, "
            f"not {named_parameters!r}; an "
            "option goes by its name: ratio=0.01"
        )
    named = list(named_parameters)
    if not named and isinstance(named_parameters, collections.abc.Iterator):
        raise ValueError(
            "named_parameters was used up before: give each call its own model.named_parameters(), "
            "or a list"
        )
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters must be (name, parameter) pairs, as model.named_parameters() gives"
        )
    return named


def trained(
    optimizer: torch.optim.Optimizer, named_parameters: Optional[NamedParameters]
) -> Dict[str, torch.Tensor]:
    """{name: parameter} of those that this optimizer steps. One that has two names counts once."""
    own = {
        id(param)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad
    }
    trained = {
        id(param): (name, param)
        for name, param in named(optimizer, named_parameters)
        if id(param) in own
    }
    places: Dict[Any, str] = {}
    for name, param in trained.values():
        if not param.is_floating_point():
            raise ValueError(
                f"{name}: a parameter of {param.dtype} cannot be compressed; real floating point "
                f"is needed"
            )
        its = shards.local(param)
        if its.is_meta:
            raise ValueError(f"{name} is on the meta device: make UpdateOptimizer after to_empty()")
        if not its.numel() or not its.data_ptr():
            continue
        other = places.setdefault((its.device, its.data_ptr()), name)
        if other != name:
            raise ValueError(
                f"{other} and {name} share memory, so that what one adds would count as the "
                f"other's too: assign the parameter itself, not its data or a Parameter made of "
                "it, and the two are one"
            )
    return dict(trained.values())


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def is_sparse(grad: Optional[torch.Tensor]) -> bool:
    return grad is not None and grad.is_sparse
