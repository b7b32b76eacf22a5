"""Features that stand around the compressor of a tensor: to drivers each is that compressor."""

import dataclasses
import functools
from typing import Any, NamedTuple, Optional

import numpy as np

from .base import Compressor
from .state import zeros


class Shard(NamedTuple):
    """The part of a tensor that one of `ranks` ranks keeps: its first element, the one after its
    last, and the tensor's number of elements."""

    first: int
    last: int
    numel: int
    ranks: int

    def whole(self, part: np.ndarray) -> np.ndarray:
        """A flat tensor with this part, and zero elsewhere."""
        array = zeros(self.numel)
        array[self.first : self.last] = part
        return array


def _inside(name: str) -> Any:
    """A method that is the inner compressor's."""

    def method(self: "Wrapper", *arguments: Any) -> Any:
        return getattr(self.inner, name)(*arguments)

    return functools.update_wrapper(method, getattr(Compressor, name), updated=())


@dataclasses.dataclass(frozen=True, repr=False)
class Wrapper(Compressor):
    """Does what the compressor inside does, but for what a subclass overrides."""

    inner: Compressor

    def __post_init__(self) -> None:
        # What is done around it is on the CPU, where a base would be left.
        traits = self.inner.traits._replace(
            on_device=False, takes_base=False, carries_float64=False
        )
        known = {"id": self.inner.id, "roles": self.inner.roles, "policy": self.inner.policy}
        vars(self).update(known, traits=traits)

    def __repr__(self) -> str:
        return repr(self.inner)

    collectives = _inside("collectives")
    payload_bits = _inside("payload_bits")
    init = _inside("init")
    encode = _inside("encode")
    encode_dense = _inside("encode_dense")
    decode = _inside("decode")
    decode_dense = _inside("decode_dense")
    add = _inside("add")
    residual = _inside("residual")
    forget_sent = _inside("forget_sent")
    commit = _inside("commit")
    rollback = _inside("rollback")
    apply_pending = _inside("apply_pending")

    @property
    def shard(self) -> Optional[Shard]:
        """The part of the tensor that the state is of, where that is not all of it. `encode` itself
        brings what a switch has left to bring then, `tensor.DEBT`, which is as long as the
        tensor."""
        return None

    def part(self, out: np.ndarray, rank: int) -> np.ndarray:
        """The part of the gradient's memory that the payload of a rank is of."""
        return out


def shard_of(compressor: Compressor) -> Optional[Shard]:
    """The part of a tensor that its state is of; None where that is all of it."""
    return compressor.shard if isinstance(compressor, Wrapper) else None


def with_options(compressor: Compressor, **options: Any) -> Compressor:
    """A compressor with other values of these options, in what stands around it."""
    if isinstance(compressor, Wrapper):
        options = {"inner": with_options(compressor.inner, **options)}
    return dataclasses.replace(compressor, **options)


def unwrapped(compressor: Compressor) -> Compressor:
    """The algorithm inside of all that stands around it."""
    while isinstance(compressor, Wrapper):
        compressor = compressor.inner
    return compressor
