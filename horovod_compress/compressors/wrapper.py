"""Features that stand around the compressor of a tensor: to drivers each is that compressor."""

import dataclasses
import functools
from typing import Any, Callable, ClassVar, Optional, Tuple

import numpy as np

from ..protocol.machine import Machine, Placement
from .base import Compressor


def _inside(name: str) -> Any:
    """A method that is the inner compressor's."""

    def method(self: "Wrapper", *arguments: Any) -> Any:
        return getattr(self.inner, name)(*arguments)

    return functools.update_wrapper(method, getattr(Compressor, name), updated=())


@dataclasses.dataclass(frozen=True, repr=False)
class Wrapper(Compressor):
    """Passes all to the compressor inside, except what a subclass overrides."""

    # Whether `encode` itself brings what a switch has left to bring, `debt.DEBT`.
    pays_debts: ClassVar[bool] = False
    # Whether `encode_dense` asks for a collective first.
    dense_asks: ClassVar[bool] = False

    inner: Compressor

    @classmethod
    def around(
        cls, compressor: Compressor, shape: Tuple[int, ...], machine: Optional[Machine]
    ) -> Compressor:
        """The compressor of a tensor of this shape, in a wrapper where its options say so.

        Args:
            compressor: of the whole tensor.
            shape: the tensor's.
            machine: the ranks of this rank's, where that is known.
        """
        return compressor

    @classmethod
    def needs_machine(
        cls, compressor: Compressor, placement: Placement, tell: Callable[[str], Any]
    ) -> bool:
        """Returns whether `around` has use for the ranks of a machine.

        Args:
            compressor: that of a session.
            placement: where the ranks are.
            tell: warns of an option that has no effect.

        Raises:
            ValueError: it cannot have them, among such ranks.
        """
        return False

    def __post_init__(self) -> None:
        # What is done around it is on the CPU, where a base would be left.
        traits = self.inner.traits._replace(
            on_device=False, takes_base=False, carries_float64=False
        )
        vars(self).update(
            id=self.inner.id, roles=self.inner.roles, policy=self.inner.policy, traits=traits
        )

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def kin(self) -> Any:
        """Equal for compressors whose tensors can share a group."""
        return self

    collectives = _inside("collectives")
    payload_bits = _inside("payload_bits")
    stage = _inside("stage")
    init = _inside("init")
    encode_all = _inside("encode_all")
    encode_dense_all = _inside("encode_dense_all")
    decode_all = _inside("decode_all")
    decode_dense_all = _inside("decode_dense_all")
    add_all = _inside("add_all")
    residual = _inside("residual")
    accumulate_all = _inside("accumulate_all")
    forget_sent = _inside("forget_sent")
    commit = _inside("commit")
    rollback = _inside("rollback")
    apply_pending = _inside("apply_pending")

    def part(self, out: np.ndarray, rank: int) -> np.ndarray:
        """The part of the gradient's memory that the payload of a rank is of."""
        return out

    def whole(self, debt: np.ndarray) -> np.ndarray:
        """An array as long as the tensor, from one as long as the residual."""
        return debt


def kin_of(compressor: Compressor) -> Any:
    """Equal for compressors whose tensors can share a group."""
    return compressor.kin if isinstance(compressor, Wrapper) else compressor


def with_options(compressor: Compressor, **options: Any) -> Compressor:
    """A compressor with other values of these options, in what stands around it."""
    if isinstance(compressor, Wrapper):
        options = {"inner": with_options(compressor.inner, **options)}
    return dataclasses.replace(compressor, **options)


def unwrapped(compressor: Compressor) -> Compressor:
    """The algorithm inside all wrappers."""
    while isinstance(compressor, Wrapper):
        compressor = compressor.inner
    return compressor
