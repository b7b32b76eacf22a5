"""A tensor of a compression on one rank: its state, and what is counted of it."""

import dataclasses
from typing import Any, Optional, Tuple

import numpy as np

from ..compressors.base import Compressor
from ..compressors.state import LOCAL, State, zeros
from ..protocol.requests import Allgather, Collective, Exchanged

SENT = ("bytes_sent", "dense_bytes", "elements_sent")
# What tensors share is one of theirs.
SPENT = ("bytes_received", "encode_seconds", "exchange_seconds", "decode_seconds")


@dataclasses.dataclass
class Tensor:
    """A tensor of a compression on one rank.

    kin: alike for tensors that can be in one group; digest: uint32 of configuration and tensor, on
    every frame; declared: what its compressor says that a step exchanges; dense_until: the step
    from which on payloads of measured size are gathered again; alone: its own group, for steps in
    which it does not go with the others; place: its number in its group.
    """

    name: str
    compressor: Compressor
    state: State
    kin: int
    digest: int
    numel: int
    declared: Tuple[Collective, ...]
    # A single 1, for the reducer: what it makes of that is the factor for the sum of payloads.
    carrier: np.ndarray = dataclasses.field(default_factory=lambda: np.ones(1, np.float32))
    dense_until: int = 0
    alone: Any = None
    place: int = 0
    counters: dict = dataclasses.field(default_factory=lambda: dict.fromkeys(SENT + SPENT, 0))

    @property
    def residual(self) -> Optional[np.ndarray]:
        """The part of gradients that was not sent yet, up to date only after `apply_pending`; None
        where none is kept."""
        return self.compressor.residual(self.state)

    def begin_momentum(self) -> None:
        """Adds u, of which nothing is there yet, where it is missing: a momentum that a scheduler
        changes may begin at 0."""
        residual = self.residual
        if "u" in self.compressor.roles and "u" not in self.state.arrays:
            self.state.arrays["u"] = zeros(self.numel if residual is None else residual.size)

    def count(self, request: Exchanged) -> None:
        """Counts the bytes that go into a collective. As many come back; an allgather's, which are
        more, are counted when they do, without this rank's own."""
        nbytes, counters = request.array.nbytes, self.counters
        counters["bytes_sent"] += nbytes
        counters["bytes_received"] += -nbytes if isinstance(request, Allgather) else nbytes

    @property
    def keeps_gradients(self) -> bool:
        """True if the algorithm's state has parts of this rank's gradients."""
        roles = self.compressor.roles
        return any(roles.get(key) is LOCAL for key in self.state.arrays)
