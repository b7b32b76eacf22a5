"""Steps of groups that are under way in a graph, and the messages that operations move for them: one
array; of an alltoall the bytes and, int32, how many go to each rank."""

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from ..compressors.base import Step
from ..engine.driver import Transaction
from ..engine.extension import Extension
from ..engine.group import Group
from ..engine.step import GroupStep, end_step, group_step
from ..engine.tensor import Tensor
from ..protocol.requests import Alltoall, Collective, Final, StepNorm

Message = Sequence[np.ndarray]

_NOTHING = np.empty(0, np.float32)


def dtypes_of(collectives: Sequence[Collective]) -> List[str]:
    """The dtypes of the arrays in messages of these collectives. What the reducer reduces is in
    none."""
    return [
        dtype
        for c in collectives
        if c.verb != "reducer"
        for dtype in ((c.dtype, "int32") if c.verb == "alltoall" else (c.dtype,))
    ]


def message_of(request: Any) -> List[np.ndarray]:
    """The message of a request."""
    if isinstance(request, Alltoall):
        return [request.array, np.array(request.splits, np.int32)]
    return [request.array]


def empty(collectives: Sequence[Collective], size: int) -> List[np.ndarray]:
    """A message of one of these collectives, if any, that brings nothing. size: how many ranks
    there are."""
    # Of an alltoall, nothing to each of the ranks.
    return [np.zeros(size if i else 0, dtype) for i, dtype in enumerate(dtypes_of(collectives))]


def answer_of(request: Any, arrived: Message) -> Any:
    """A request's result, from what its operation brought."""
    if isinstance(request, Alltoall):
        payload, splits = arrived[:2]
        return np.split(payload, np.cumsum(splits)[:-1])
    return arrived[0]


class Pending:
    """A group's last step, until the next one of one of its tensors begins."""

    def __init__(
        self,
        group: Group,
        grads: List[np.ndarray],
        call: int,
        transaction: Transaction,
        factor: float,
    ) -> None:
        self.group, self.grads, self.call = group, grads, call
        # factor: what the reducer makes of a 1 on each rank.
        self.transaction, self._factor = transaction, factor
        # Of tensors whose payloads the reducer takes: their steps, and the payloads' lengths.
        self._carried: List[Tuple[GroupStep, int]] = []
        # Of the others, what it waits for until it is finished, and whether that is the last.
        self._step: Any = None
        self.request: Any = None
        self.last = True
        # Of its last message, in a step with fewer than the graph has operations for.
        self.arrived: Optional[Message] = None
        self.finished = False
        # How many of its messages have been handed out, empty ones included.
        self.stage = 0
        # The step's number, where it has sent that and waits for the sum.
        self.compares: Optional[int] = None
        # Bytes of this rank's last message.
        self.sent = 0

    def begin(
        self,
        steps: Sequence[Step],
        features: Callable[[Sequence[Tensor], Sequence[Step]], List[Extension]],
        squared_norm: Optional[float],
    ) -> np.ndarray:
        """Begins the step; returns the array for the reducer, of no elements where it has nothing
        to reduce. features: those that tensors and their steps have to do with; squared_norm: as
        of StepNorm."""
        parts: Dict[bool, List[Tuple[Tensor, np.ndarray, Step]]] = {}
        for its in zip(self.group.tensors, self.grads, steps):
            parts.setdefault(its[-1].dense, []).append(its)
        arrays = []
        for dense, part in parts.items():
            tensors, grads, known = map(list, zip(*part))
            step = group_step(self.group, tensors, grads, known, features(tensors, known))
            request = step.send(None)
            if isinstance(request, StepNorm):
                request = step.send(squared_norm)
            if self.group.carried or dense:
                arrays.append(request.request.array)
                self._carried.append((step, arrays[-1].size))
            else:
                self._step = step
                self._wait_for(request)
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays or [_NOTHING])

    def advance(self, brought: Message) -> None:
        """Brings what became of a message."""
        if self.last:
            # Such a step has no more to send.
            self.arrived = self.arrived or brought
        else:
            self._wait_for(self._step.send([answer_of(self.request, brought)]))

    def _wait_for(self, request: Any) -> None:
        self.last = isinstance(request, Final)
        requests = [request.request] if self.last else request
        if len(requests) > 1:
            raise RuntimeError(
                f"{self.group.compressor.id}: tensors that go together ask for different "
                "collectives, and a graph has one operation for all of them"
            )
        (self.request,) = requests

    def finish(self, reduced: np.ndarray, brought: Message, size: int) -> List[np.ndarray]:
        """Brings what the reducer made of its array, and what became of the last message; returns
        the results, in the gradients' memory. size: how many ranks there are."""
        # Until the next step begins they would stay in memory.
        results, self.grads = self.grads, []
        finite, end = [], 0
        for step, length in self._carried:
            begin, end = end, end + length
            finite += step.send((size, reduced[begin:end])).finite
        if self.request is not None:
            arrived = answer_of(self.request, self.arrived or brought)
            finite += self._step.send((self._factor, arrived)).finite
        self.request, self.arrived, self.finished = None, None, True
        self.transaction.note(finite)
        return results

    def end(self) -> bool:
        """Commits the step, or rolls it back. Returns whether it has succeeded."""
        succeeded = self.transaction.finite and self.finished
        for step in [each for each, _ in self._carried] + [self._step] * (self._step is not None):
            end_step(step, succeeded)
        return succeeded
