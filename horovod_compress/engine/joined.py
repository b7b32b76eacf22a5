"""What tensors send as one message, of which each waits for its part: messages cost more than what
is in them."""

from typing import Any, Callable, List, Optional

import numpy as np

from ..protocol import wire
from ..protocol.requests import Allgather, Allreduce, Exchanged
from .stages import LAST, SMALL, Pending, Stages
from .tensor import Tensor

# Starts a request, which counts for a tensor.
Start = Callable[[Exchanged, Tensor], Callable[[], Any]]


class _Shared:
    """What many wait for: it is waited for once, and a failure is everybody's."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait: Optional[Callable[[], Any]] = wait
        self._found: Any = None
        self._error: Optional[Exception] = None

    def __call__(self) -> Any:
        if self._wait is not None:
            wait, self._wait = self._wait, None
            # For the others, where waiting is interrupted.
            self._error = RuntimeError("its step has failed before: submit it again")
            try:
                self._found, self._error = wait(), None
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return self._found


def _sort(pendings: List[Pending]) -> Tensor:
    """Brings tensors into an order that is one on all ranks. Returns the first one."""
    pendings.sort(key=lambda pending: pending.tensor.name)
    return pendings[0].tensor


def start_maxima(maxima: List[Pending], start: Start) -> None:
    """Starts all tensors' maxima of a round."""
    first = _sort(maxima)
    together = Allreduce(np.concatenate([each.request.array for each in maxima]), "max")
    wait = _Shared(start(together, first))
    end = 0
    for pending in maxima:
        begin, end = end, end + pending.request.array.size
        pending.wait = lambda begin=begin, end=end: wait()[begin:end]


def start_gathers(stages: Stages, start: Start, frame_length: wire.FrameLength, ranks: int) -> None:
    """Starts the last gather of all small tensors of a step, once none is before it.

    Args:
        stages: of the step's tensors.
        start: starts it.
        frame_length: what messages of all steps are padded to, behind the last frame's body.
        ranks: the number of ranks.
    """
    if not stages.at[SMALL] or any(stages.at[:SMALL]):
        return
    small = stages.waiting(SMALL)
    stages.take(small)
    first = _sort(small)
    frames = [pending.request.request.array for pending in small]
    needed, unpadded = sum(map(len, frames)), len(frames[-1])
    frames[-1] = wire.padded(frames[-1], frame_length(needed) - needed)
    small[-1].tensor.count(Allgather(frames[-1][unpadded:]))
    wait = start(Allgather(np.concatenate(frames)), first)
    arrived = _Shared(lambda: wire.by_tensor(wait(), ranks, len(frames)))
    for number, pending in enumerate(small):
        pending.wait = lambda number=number: arrived()[number]
        stages.move(pending, LAST)
