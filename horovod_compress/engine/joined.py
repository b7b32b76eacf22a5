"""Small tensors' payloads as one message, of which each tensor waits for its part: messages cost
more than their bytes."""

import time
from typing import Any, Callable, Iterator, List, Optional, Tuple, Union

import numpy as np

from ..compressors.base import Step
from ..protocol import wire
from ..protocol.requests import Allgather, Allreduce, Alltoall
from .stages import JOINT, LAST, SMALL, Pending, Stages
from .tensor import Tensor

# Starts a request, under a name that ends so, which counts for a tensor.
Start = Callable[[str, Union[Allreduce, Allgather, Alltoall], Tensor], Callable[[], Any]]


class _Shared:
    """A result for many tensors: it is waited for once, and a failure is everybody's."""

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
    wait = _Shared(start(":agree", together, first))
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
    needed = sum(map(len, frames))
    frames[-1] = wire.padded(frames[-1], frame_length(needed) - needed)
    wait = start(":small", Allgather(np.concatenate(frames)), first)
    arrived = _Shared(lambda: wire.by_tensor(wait(), ranks, len(frames)))
    for number, pending in enumerate(small):
        pending.wait = lambda number=number: arrived()[number]
        stages.move(pending, LAST)


def exchange_jointly(
    stages: Stages, start: Start, step: Step, lengths: Tuple[wire.FrameLength, wire.FrameLength]
) -> Iterator[None]:
    """Makes the last exchange of all tensors that have one together.

    Args:
        stages: of the step's tensors.
        start: starts what that exchange consists of.
        step: with the gain of its results.
        lengths: what its messages of all steps are padded to.

    Yields:
        When it has started something, before it waits for it.
    """
    waiting = stages.waiting(JOINT)
    stages.take(waiting)
    first = _sort(waiting)
    joints = [pending.request.request for pending in waiting]
    exchanging = joints[0].exchange(joints, step, lengths)
    answer: Any = None
    try:
        while True:
            started = time.perf_counter()
            request = exchanging.send(answer)
            wait = start(f":{joints[0].label}.{request.verb}", request, first)
            first.counters["encode_seconds"] += time.perf_counter() - started
            yield
            started = time.perf_counter()
            answer = wait()
            first.counters["exchange_seconds"] += time.perf_counter() - started
    except StopIteration as stop:
        for pending, arrived in zip(waiting, stop.value):
            pending.tensor.counters["bytes_sent"] += arrived.sent
            pending.tensor.counters["bytes_received"] += arrived.received
            pending.wait = lambda result=arrived.result: result
            stages.move(pending, LAST)
