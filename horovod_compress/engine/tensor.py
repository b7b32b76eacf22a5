"""A tensor of a compression on one rank: its state, and what is counted of it."""

import dataclasses
from typing import Optional, Tuple

import numpy as np

from ..compressors.base import GATHER, Compressor
from ..compressors.state import LOCAL, State
from ..kernels import beside
from ..protocol import wire
from ..protocol.requests import Allgather, Collective, Exchanged, ToReducer

# Taken for an element's of a payload whose size is not known beforehand.
_UNKNOWN_BITS = 2.0
_GATHERED = (GATHER,)
SENT = ("bytes_sent", "dense_bytes", "elements_sent")
# What tensors share is one of theirs.
SPENT = ("bytes_received", "encode_seconds", "exchange_seconds", "decode_seconds")


@dataclasses.dataclass
class Tensor:
    """A tensor of a compression on one rank.

    digest: uint32 of configuration and tensor, on every frame; declared: what its compressor says
    that a step exchanges; checked: whether the first step has kept to that, and to the rest of the
    contract; carrier: a single 1, for the reducer; dense_until: the step from which on payloads of
    measured size are gathered again; bits: what an element of the open step's payload takes, where
    that is known beforehand; frame_length: what frames are padded to that travel alone;
    joins_up_to: bytes of a payload up to which it travels with those of others.
    """

    name: str
    compressor: Compressor
    state: State
    digest: int
    numel: int
    declared: Tuple[Collective, ...]
    checked: bool = False
    carrier: ToReducer = dataclasses.field(
        default_factory=lambda: ToReducer(np.ones(1, np.float32))
    )
    dense_until: int = 0
    bits: Optional[float] = None
    frame_length: wire.FrameLength = wire.exact
    joins_up_to: int = 0
    counters: dict = dataclasses.field(default_factory=lambda: dict.fromkeys(SENT + SPENT, 0))

    @property
    def residual(self) -> Optional[np.ndarray]:
        """The part of gradients that was not sent yet, up to date only after `apply_pending`; None
        where none is kept."""
        return self.compressor.residual(self.state)

    @property
    def joins(self) -> bool:
        """True if the open step's payload travels with those of others. Alike on all ranks."""
        bits = _UNKNOWN_BITS if self.bits is None else self.bits
        return self.numel * bits <= 8 * self.joins_up_to

    def waits(self, grad: np.ndarray) -> bool:
        """True if the open step, unless it is dense, encodes when all small tensors are there. On a
        device kernels are called together in any case."""
        return self.declared == _GATHERED and self.joins and isinstance(grad, np.ndarray)

    def one(self) -> ToReducer:
        """The carrier of a payload that travels beside it: what the reducer makes of a 1 is the
        factor for the sum of the payloads."""
        self.carrier.array[0] = 1
        return self.carrier

    def count(self, request: Exchanged) -> None:
        """Counts the bytes that go into a collective. As many come back; an allgather's, which are
        more, are counted when they do, without this rank's own."""
        nbytes, counters = request.array.nbytes, self.counters
        counters["bytes_sent"] += nbytes
        counters["bytes_received"] += -nbytes if isinstance(request, Allgather) else nbytes

    def follow(self, grad: np.ndarray) -> None:
        """Brings the state to where the gradient is, on the CPU or on a device."""
        arrays = self.state.arrays
        for key, array in arrays.items():
            if type(array) is not np.ndarray or type(grad) is not np.ndarray:
                arrays[key] = beside(array, grad)

    @property
    def keeps_gradients(self) -> bool:
        """True if the algorithm's state has parts of this rank's gradients."""
        roles = self.compressor.roles
        return any(roles.get(key) is LOCAL for key in self.state.arrays)
