"""Drives the steps of groups that a graph's executor brings in any order, several at a time."""

import copy
import dataclasses
import itertools
import threading
import time
from typing import Any, Callable, Collection, Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ..compressors.base import Compressor, Step
from ..compressors.wrapper import Wrapper
from ..engine import checkpoint
from ..engine.dense_policy import go_dense
from ..engine.driver import Driver, Transaction
from ..engine.feature import Feature
from ..engine.features import Features
from ..engine.group import Group, form
from ..engine.loss_scale import to_true_units
from ..engine.step import GroupStep, end_step, group_step
from ..engine.tensor import Tensor
from ..protocol.handshake import check_step_numbers, first_difference, step_numbers
from ..protocol.machine import Machine
from ..protocol.requests import Allreduce, Alltoall, Collective, Final, StepNorm
from ..protocol.wire import Steady
from ..session.join_error import error_of_joined

# What an operation of a graph moves for a step: one array; of an alltoall the bytes and, int32, how
# many go to each rank.
Message = Sequence[np.ndarray]

_NOTHING = np.empty(0, np.float32)
_KEPT = 100  # calls of functions

# Of tensors that go the same way in a call.
Names = Tuple[str, ...]
# A tensor's arrays, steps taken, dense until, shape.
Saved = Tuple[Dict[str, np.ndarray], int, int, tuple]


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
        self._request: Any = None
        self._last = True
        # Of its last message, in a step with fewer than the graph has operations for.
        self._arrived: Optional[Message] = None
        # How many of its messages have been handed out, empty ones included.
        self._stage = 0
        # The step's number, where it has sent that and waits for the sum.
        self._number: Optional[int] = None
        self.finished = False

    def begin(
        self,
        steps: Sequence[Step],
        features: Callable[[Sequence[Tensor], Sequence[Step]], List[Feature]],
        squared_norm: Optional[float],
        sends_number: bool,
    ) -> List[np.ndarray]:
        """Begins the step; returns the array for the reducer, of no elements where it has nothing
        to reduce, behind it the first message, and where it sends that, the step's number, empty
        where that is not needed. features: those that tensors and their steps have to do with;
        squared_norm: as of StepNorm."""
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
        handed_out = [array, *self._message()]
        if sends_number:
            self._number = steps[0].index if isinstance(self._request, Allreduce) else None
            sent = np.empty(0, np.int64) if self._number is None else step_numbers(self._number)
            self.group.tensors[0].count(Allreduce(sent))
            handed_out.append(sent)
        return handed_out

    def advance(self, brought: Message) -> List[np.ndarray]:
        """Brings what became of a message; returns the next one."""
        self._compare_number(brought)
        if self._last:
            # Such a step has no more to send.
            self._arrived = self._arrived or brought
        else:
            self._wait_for(self._step.send([_answer_of(self._request, brought)]))
        return self._message()

    def _compare_number(self, brought: Message) -> None:
        """Raises as `check_step_numbers` does, where the step's number is behind a message."""
        if self._number is not None:
            number, self._number, size = self._number, None, self._size
            check_step_numbers(
                brought[-1], number, size, lambda count, why: error_of_joined(count, size, [], why)
            )

    def _wait_for(self, request: Any) -> None:
        self._last = isinstance(request, Final)
        requests = [request.request] if self._last else request
        if len(requests) > 1:
            raise RuntimeError(
                f"{self.group.compressor.id}: tensors that go together ask for different "
                "collectives, and a graph has one operation for all of them"
            )
        (self._request,) = requests

    def _message(self) -> List[np.ndarray]:
        """The message that the group's next operation is to move. RuntimeError where that is not
        what the compressor has declared."""
        first, stage, request = self.group.tensors[0], self._stage, self._request
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
        self._compare_number(brought)
        # Until the next step begins they would stay in memory.
        results, self.grads = self.grads, []
        note, end = self.transaction.note, 0
        for step, length in self._carried:
            begin, end = end, end + length
            note(step.send((self._size, reduced[begin:end])).finite)
        if self._request is not None:
            arrived = _answer_of(self._request, self._arrived or brought)
            note(self._step.send((self._factor, arrived)).finite)
        self._request, self._arrived, self.finished = None, None, True
        return results

    def end(self) -> bool:
        """Commits the step, or rolls it back. Returns whether it has succeeded."""
        succeeded = self.transaction.finite and self.finished
        for step in [each for each, _ in self._carried] + [self._step] * (self._step is not None):
            end_step(step, succeeded)
        return succeeded


class GraphExchange(Driver):
    """Drives steps whose payloads are moved by operations of a graph.

    A step is one call of a traced function; it begins with `begin`. Groups of tensors, which are
    known by the names of those, come and go in any order, and in several threads: one may be
    finished before another is submitted. None of the methods waits. `submit` and `advance` return
    the message that an operation is to move next, as its tensors' `collectives` say (empty in a
    step that goes dense), and the next call for that group brings what came of it. The group of one
    tensor also sends the step's number behind its first message, where there are sums.
    """

    def __init__(
        self,
        compressor: Compressor,
        rank: int,
        size: int,
        dense_alone: bool = False,
        machine: Optional[Machine] = None,
    ) -> None:
        super().__init__(compressor, rank, size, Features(dense_alone, _go_dense), machine)
        # For what groups share; each group's own is in one thread at a time.
        self._lock = threading.Lock()
        self._calls = itertools.count()
        # By call: its transaction, what is known of the step, and the last two of `begin`.
        self._begun: Dict[int, Tuple[Transaction, Step, float, Optional[float]]] = {}
        # By the names of their tensors, and the last step of each tensor.
        self._groups: Dict[Names, Group] = {}
        self._pending: Dict[str, Pending] = {}
        self._indices: Dict[str, int] = {}  # steps each tensor has taken
        self.shapes: Dict[str, tuple] = {}
        # Bytes that no tensor counts, as many in as out.
        self._uncounted = 0
        # By name, what a state that was loaded has of tensors that are not known yet.
        self.loaded: Dict[str, Saved] = {}

    def add(self, name: str, shape: tuple, variant: Compressor) -> None:
        """Makes a tensor known, where it is not, with what was loaded for it. ValueError, and
        nothing changed, where that, or the shape, does not fit."""
        if name in self.tensors:
            if self.shapes[name] != shape:
                raise ValueError(
                    f"{name} has the shape {shape}, and {self.shapes[name]} in the state that was "
                    f"loaded: was it this model?"
                )
            return
        tensor = self.tensors.add(name, shape, variant, self.now.size)
        self._indices[name], self.shapes[name] = 0, shape
        if name in self.loaded:
            arrays, self._indices[name], tensor.dense_until, _ = self.loaded[name]
            try:
                checkpoint.restore([tensor], {name: arrays})
            except ValueError:
                self.tensors.remove(name)
                del self._indices[name], self.shapes[name]
                raise
            del self.loaded[name]

    def switch(self, *arguments: Any, **named: Any) -> None:
        # What was loaded for tensors that are not known yet goes on, too.
        for name, (*_, shape) in list(self.loaded.items()):
            self.add(name, shape, self.tensors.compressor)
        super().switch(*arguments, **named)
        # Which hold on to tensors of before.
        self._begun.clear()
        self._groups.clear()

    def groups(self, carriers: Dict[str, str]) -> List[Names]:
        """Groups of tensors that come in one call, {name: dtype of its carrier}."""
        kinds: Dict[Any, List[Tensor]] = {}
        for name, dtype in carriers.items():
            tensor = self.tensors[name]
            # Before the last message only sums and maxima can be joined.
            joins = all(its.verb == "allreduce" for its in tensor.declared[:-1])
            # In what a step has by its number, tensors of a group are alike.
            kinds.setdefault((dtype, self._indices[name], joins or name), []).append(tensor)
        formed = [group for its in kinds.values() for group in form(its, True, Steady, False)]
        return [tuple(tensor.name for tensor in group.tensors) for group in formed]

    def _group(self, names: Names) -> Group:
        if names not in self._groups:
            # It has the last ones first, as `groups` has found it.
            tensors = [self.tensors[name] for name in reversed(names)]
            (self._groups[names],) = form(tensors, True, Steady, False)
        return self._groups[names]

    def begin(
        self,
        rank: int,
        size: int,
        loss_scale: float = 1.0,
        lr: Optional[float] = None,
        factor: float = 1.0,
        squared_norm: Optional[float] = None,
    ) -> int:
        """Begins a step of tensors whose gradients are times `loss_scale`, on this rank of so many;
        returns the number of the call. lr: as in Step; factor: what the reducer makes of a 1 on
        each rank; squared_norm: where gradients are to be clipped, of factor · (all gradients of
        the step). RuntimeError as of `to_true_units`."""
        scale = to_true_units(loss_scale)
        with self._lock:
            self.expect(rank=rank, size=size)
            call = next(self._calls)
            # Nobody knows when all have come: what nobody uses is not computed.
            self._begun.pop(call - _KEPT, None)
            step = dataclasses.replace(self.now, scale=scale, lr=lr)
            self._begun[call] = Transaction(), step, factor, squared_norm
            return call

    def count(self, nbytes: int) -> None:
        """Counts bytes that are no tensor's, as many in as out."""
        with self._lock:
            self._uncounted += nbytes

    def totals(self) -> Dict[str, float]:
        totals = super().totals()
        totals["bytes_sent"] += self._uncounted
        totals["bytes_received"] += self._uncounted
        return totals

    def submit(
        self,
        names: Names,
        call: int,
        grads: List[np.ndarray],
        squares: Sequence[Any] = (),
        sends_number: bool = False,
    ) -> List[np.ndarray]:
        """Takes a group's flat float32 gradients into a step; returns the array for the reducer,
        behind it the first message, and where it sends that, the step's number.

        The gradients' memory belongs to the exchange until `finish`. squares: as in Step, of each
        tensor. Tensors that were never finished have their last step rolled back. RuntimeError
        where the call is forgotten.
        """
        with self._lock:
            for name in names:
                self._end(name)
            try:
                transaction, step, factor, squared_norm = self._begun[call]
            except KeyError:
                raise RuntimeError(
                    f"{names[0]}: its gradient came after {_KEPT} later calls of functions had "
                    "begun, or after compression.switch(), and its step is not known any more. "
                    "Where several threads train with one compression make one for each, and "
                    "switch when all calls have ended"
                ) from None
            self.latest = transaction
        group, started = self._group(names), time.perf_counter()
        for tensor, grad in zip(group.tensors, grads):
            self.tensors.known(tensor.name, grad)
        if step.frozen and group.compressor.policy.m:
            # Keras' momentum holds the learning rate.
            for grad in grads:
                grad.fill(0)
        index = max(self._indices[name] for name in names)
        step = dataclasses.replace(step, index=index)
        apart = self.features.apart(group, step)
        steps = [
            dataclasses.replace(step, dense=name in apart, squares=its)
            if name in apart or its is not None
            else step
            for name, its in itertools.zip_longest(names, squares)
        ]
        pending = Pending(group, grads, call, transaction, factor)
        for tensor in group.tensors:
            self._indices[tensor.name], self._pending[tensor.name] = index + 1, pending
        transaction.tensors += group.tensors
        handed_out = pending.begin(steps, self.features.concerned, squared_norm, sends_number)
        group.tensors[0].counters["encode_seconds"] += time.perf_counter() - started
        return handed_out

    def advance(self, names: Names, call: int, *brought: np.ndarray) -> List[np.ndarray]:
        """Brings what became of a message; returns the next one."""
        return self._open(names, call).advance(brought)

    def finish(
        self, names: Names, call: int, reduced: np.ndarray, brought: Message = ()
    ) -> List[np.ndarray]:
        """Brings what the reducer made of its array, and what became of the last message; returns
        flat float32 results, in the memory of the gradients."""
        pending = self._open(names, call)
        started = time.perf_counter()
        results = pending.finish(reduced, brought)
        seconds = time.perf_counter() - started
        self.tensors[names[0]].counters["decode_seconds"] += seconds
        return results

    def fail(self, name: str) -> None:
        """The reducer could not use this result, on all ranks alike: its step will be rolled
        back."""
        self._pending[name].transaction.fail()

    def counts(self, name: str, call: int) -> bool:
        """Returns whether a tensor's last step was this call's, and its result is to be applied.
        Once it is ended nobody knows."""
        pending = self._pending.get(name)
        return pending is not None and pending.call == call and pending.transaction.finite

    def _open(self, names: Names, call: int) -> Pending:
        pending = self._pending.get(names[0])
        if pending is None or pending.call != call or pending.finished:
            raise RuntimeError(
                f"{names[0]}: another gradient of it came before this one was exchanged. One "
                f"compression serves one model, and one step "
                "at a time: make a compression for each tape or optimizer whose steps may overlap"
            )
        return pending

    def _end(self, name: str) -> None:
        """Ends the last step of a tensor, and those of its group then, where that has not happened
        yet."""
        pending = self._pending.get(name)
        if pending is None:
            return
        for tensor in pending.group.tensors:
            del self._pending[tensor.name]
        transaction, succeeded = pending.transaction, pending.end()
        if not transaction.ended:  # the first of its step
            if not succeeded:
                transaction.fail()
            self._count_step(transaction)

    def open_tensors(self) -> Collection[str]:
        # Other threads submit meanwhile.
        return [name for name, pending in list(self._pending.items()) if not pending.finished]

    def end_step(self) -> None:
        self._refuse_in_step()
        self._end_all(list(self._pending))

    def _end_all(self, names: Collection[str]) -> None:
        with self._lock:
            for name in names:
                self._end(name)

    def steps_taken(self) -> Dict[str, int]:
        return dict(self._indices)

    def state_dict(self, into: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        state = super().state_dict(into)
        state["shapes"] = {name: list(shape) for name, shape in self.shapes.items()}
        for name, saved in copy.deepcopy(self.loaded).items():
            for key, value in zip(("tensors", "step", "dense_until", "shapes"), saved):
                state[key][name] = value
        return state

    def rollback(self) -> None:
        self._end_all(self.open_tensors())

    def go_back_to(self, state: Dict[str, Any]) -> None:
        """As of `Driver`. Tensors that became known after the state was made go back to their
        beginning."""
        saved = checkpoint.read(state)
        for name in self.shapes.keys() - saved.arrays.keys():
            saved.arrays[name] = self.tensors[name].compressor.init(name, self.shapes[name]).arrays
            saved.header["step"] = {**saved.header["step"], name: 0}
        self.rollback()
        self._continue_from(saved)

    def _continue_from(self, saved: checkpoint.Saved) -> None:
        steps, shapes, arrays = saved.header["step"], saved.header["shapes"], saved.arrays
        dense_until = saved.header["dense_until"]
        unknown = [name for name in arrays if name not in self.tensors]
        shaped = [name for name in unknown if name in shapes]
        expected = {"step": dict.fromkeys(arrays), "shapes": dict.fromkeys(unknown)}
        found = {"step": dict.fromkeys(steps), "shapes": dict.fromkeys(shaped)}
        checkpoint.refuse(first_difference(expected, found))
        self.arrays()
        known = {name: arrays[name] for name in arrays if name in self.tensors}
        checkpoint.restore(self.tensors, known)
        self.latest = Transaction()
        for name in known:
            self._indices[name] = steps[name]
            self.tensors[name].dense_until = dense_until.get(name, 0)
        self.loaded = copy.deepcopy(
            {
                name: (arrays[name], steps[name], dense_until.get(name, 0), tuple(shapes[name]))
                for name in unknown
            }
        )


def _go_dense(group: Group, step: Step) -> Collection[str]:
    # A graph has no operation for a sum that a feature around the algorithm asks for.
    return () if isinstance(group.compressor, Wrapper) else go_dense(group, step)


def first_with_sums(tensors: Iterable[Tensor]) -> Optional[str]:
    """The name of the first tensor whose steps have sums, which do not carry a step's number: its
    group sends that besides. None where there is none."""
    adding = (each.name for each in tensors if any(its.op == "sum" for its in each.declared))
    return next(adding, None)


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
