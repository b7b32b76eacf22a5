"""What tensors send as one message, of which each waits for its part: messages cost more than what
is in them."""

import functools
from typing import Any, Callable, List

import numpy as np

from ..protocol import wire
from ..protocol.requests import Allgather, Allreduce, Exchanged
from .stages import Pending
from .tensor import Tensor

# Starts a request, which counts for a tensor.
Start = Callable[[Exchanged, Tensor], Callable[[], Any]]


def _sort(pendings: List[Pending]) -> Tensor:
    """Brings tensors into an order that is one on all ranks. Returns the first one."""
    pendings.sort(key=lambda pending: pending.tensor.name)
    return pendings[0].tensor


def start_maxima(maxima: List[Pending], start: Start) -> None:
    """Starts all tensors' maxima of a round."""
    first = _sort(maxima)
    together = Allreduce(np.concatenate([each.request.array for each in maxima]), "max")
    wait = functools.lru_cache(maxsize=None)(start(together, first))
    end = 0
    for pending in maxima:
        begin, end = end, end + pending.request.array.size
        pending.wait = lambda begin=begin, end=end: wait()[begin:end]


def start_gathers(
    small: List[Pending], start: Start, frame_length: wire.FrameLength, ranks: int
) -> None:
    """Starts the last gather of all small tensors of a step.

    Args:
        small: the tensors.
        start: starts it.
        frame_length: what messages of all steps are padded to, behind the last frame's body.
        ranks: the number of ranks.
    """
    first = _sort(small)
    frames = [pending.request.request.array for pending in small]
    needed, unpadded = sum(map(len, frames)), len(frames[-1])
    frames[-1] = wire.padded(frames[-1], frame_length(needed) - needed)
    small[-1].tensor.count(Allgather(frames[-1][unpadded:]))
    wait = start(Allgather(np.concatenate(frames)), first)
    arrived = functools.lru_cache(maxsize=None)(lambda: wire.by_tensor(wait(), ranks, len(frames)))
    for number, pending in enumerate(small):
        pending.wait = lambda number=number: arrived()[number]
