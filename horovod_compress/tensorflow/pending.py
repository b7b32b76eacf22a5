"""Steps of groups that are under way in a graph, and the messages that operations move for them:
one array; of an alltoall the bytes and, int32, how many go to each rank."""

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


def _answer_of(request: Any, arrived: Message) -> Any:
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
        # How many ranks there are.
        self._size = 0
        # Of tensors whose payloads the reducer takes: their steps, and the payloads' lengths.
        self._carried: List[Tuple[GroupStep, int]] = []
        # Of the others, what it waits for until it is finished, and whether that is the last.
        self._step: Any = None
        self.request: Any = None
        self._last = True
        # Of its last message, in a step with fewer than the graph has operations for.
        self._arrived: Optional[Message] = None
        # How many of its messages have been handed out, empty ones included.
        self._stage = 0
        # The step's number, where it has sent that and waits for the sum.
        self.compares: Optional[int] = None
        self.finished = False

    def begin(
        self,
        steps: Sequence[Step],
        features: Callable[[Sequence[Tensor], Sequence[Step]], List[Extension]],
        squared_norm: Optional[float],
    ) -> List[np.ndarray]:
        """Begins the step; returns the array for the reducer, of no elements where it has nothing
        to reduce, and behind it the first message. features: those that tensors and their steps
        have to do with; squared_norm: as of StepNorm."""
        self._size = steps[0].size
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
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays or [_NOTHING])
        return [array, *self._message()]

    def advance(self, brought: Message) -> List[np.ndarray]:
        """Brings what became of a message; returns the next one."""
        if self._last:
            # Such a step has no more to send.
            self._arrived = self._arrived or brought
        else:
            self._wait_for(self._step.send([_answer_of(self.request, brought)]))
        return self._message()

    def _wait_for(self, request: Any) -> None:
        self._last = isinstance(request, Final)
        requests = [request.request] if self._last else request
        if len(requests) > 1:
            raise RuntimeError(
                f"{self.group.compressor.id}: tensors that go together ask for different "
                "collectives, and a graph has one operation for all of them"
            )
        (self.request,) = requests

    def _message(self) -> List[np.ndarray]:
        """The message that the group's next operation is to move. RuntimeError where that is not
        what the compressor has declared."""
        first, stage, request = self.group.tensors[0], self._stage, self.request
        expected = first.declared[stage : stage + 1]
        self._stage += 1
        # What arrived is of its last one.
        if request is None or self._arrived:
            # Of an alltoall, nothing to each of the ranks.
            sizes = 0, self._size
            return [np.zeros(size, dtype) for size, dtype in zip(sizes, dtypes_of(expected))]
        if request.collective not in expected:
            raise RuntimeError(
                f"{first.compressor.id}: message {stage} of a step is "
                f"{request.collective}, but `collectives` declares {first.declared}"
            )
        if isinstance(request, Alltoall):
            return [request.array, np.array(request.splits, np.int32)]
        return [request.array]

    def finish(self, reduced: np.ndarray, brought: Message) -> List[np.ndarray]:
        """Brings what the reducer made of its array, and what became of the last message; returns
        the results, in the gradients' memory."""
        # Until the next step begins they would stay in memory.
        results, self.grads = self.grads, []
        note, end = self.transaction.note, 0
        for step, length in self._carried:
            begin, end = end, end + length
            note(step.send((self._size, reduced[begin:end])).finite)
        if self.request is not None:
            arrived = _answer_of(self.request, self._arrived or brought)
            note(self._step.send((self._factor, arrived)).finite)
        self.request, self._arrived, self.finished = None, None, True
        return results

    def end(self) -> bool:
        """Commits the step, or rolls it back. Returns whether it has succeeded."""
        succeeded = self.transaction.finite and self.finished
        for step in [each for each, _ in self._carried] + [self._step] * (self._step is not None):
            end_step(step, succeeded)
        return succeeded
