"""Drives the steps of tensors that a graph's executor brings in any order, several at a time."""

import copy
import dataclasses
import itertools
import threading
import time
from typing import Any, Collection, Dict, List, Optional, Tuple

import numpy as np

from ..compressors.base import Compressor, Step
from ..compressors.wrapper import Wrapper
from ..engine import checkpoint
from ..engine.carried import CarriedStep, end
from ..engine.driver import Driver, Transaction
from ..engine.extension import Extension
from ..engine.group import Group
from ..engine.loss_scale import to_true_units
from ..engine.step import group_step
from ..engine.tensor import Tensor
from ..protocol.handshake import check_step_numbers, first_difference, step_numbers
from ..protocol.requests import FLOAT32, Allreduce, Final, StepNorm
from ..protocol.wire import Steady
from .messages import Message, answer_of, empty, message_of

_KEPT = 100  # calls of functions

# A tensor's arrays, steps taken, dense until, shape.
Saved = Tuple[Dict[str, np.ndarray], int, int, tuple]


@dataclasses.dataclass
class _Pending:
    """A tensor's last step, in a group of its own, until the next one begins."""

    grad: np.ndarray
    call: int
    transaction: Transaction
    index: int
    # A GroupStep, or CarriedStep.
    step: Any = None
    # What it waits for until it is finished, and whether that is the last.
    request: Any = None
    last: bool = True
    # Of its last message, in a step with fewer than the graph has operations for.
    arrived: Optional[Message] = None
    finished: bool = False
    # How many of its messages have been handed out, empty ones included.
    stage: int = 0
    # Whether it has sent the step's number and waits for the sum.
    compares: bool = False

    def begin(
        self, tensor: Tensor, step: Step, features: List[Extension], squared_norm: Optional[float]
    ) -> np.ndarray:
        """Begins the step; returns the carrier. squared_norm: as of StepNorm."""
        if step.dense or tensor.declared[0].verb == "reducer":
            self.step = CarriedStep(tensor.alone, features)
            return self.step.carry(tensor, self.grad, step, squared_norm)
        self.step = group_step(tensor.alone, [tensor], [self.grad], [step], features)
        request = self.step.send(None)
        if isinstance(request, StepNorm):
            request = self.step.send(squared_norm)
        self.wait_for(request)
        return np.ones(1, np.float32)

    def wait_for(self, request: Any) -> None:
        """Takes what the step asks for next."""
        self.last = isinstance(request, Final)
        self.request = request.request if self.last else request[0]


class GraphExchange(Driver):
    """Drives steps whose payloads are moved by operations of a graph.

    A step is one call of a traced function; it begins with `begin`. Tensors come and go in any
    order, and in several threads: one may be finished before another is submitted. None of the
    methods waits. `submit` and `advance` return the message that an operation is to move next, as
    the tensor's `collectives` say (empty in a step that goes dense), and the next call for that
    tensor brings what came of it. One tensor, `sends_number`, also sends the step's number behind
    its first message, where there are sums.
    """

    def __init__(
        self, compressor: Compressor, rank: int, size: int, dense_alone: bool = False
    ) -> None:
        super().__init__(compressor, rank, size, dense_alone)
        # For what tensors share; each tensor's own is in one thread at a time.
        self._lock = threading.Lock()
        self._calls = itertools.count()
        # By call: its transaction, what is known of the step, and the squared norm for `begin`.
        self._begun: Dict[int, Tuple[Transaction, Step, Optional[float]]] = {}
        self._pending: Dict[str, _Pending] = {}
        self._indices: Dict[str, int] = {}  # steps each tensor has taken
        self.shapes: Dict[str, tuple] = {}
        self.sends_number: Optional[str] = None
        self._counted = 0  # bytes that are no tensor's
        # By name, what a state that was loaded has of tensors that are not known yet.
        self.loaded: Dict[str, Saved] = {}

    def add(self, name: str, shape: tuple, variant: Compressor) -> None:
        """Makes a tensor known, where it is not, with what was loaded for it. ValueError, and
        nothing changed, where that, or the shape, does not fit."""
        if name in self._tensors:
            if self.shapes[name] != shape:
                raise ValueError(
                    f"{name} has the shape {shape}, and {self.shapes[name]} in the state that was "
                    f"loaded: was it this model?"
                )
            return
        tensor = self._add(name, shape, variant)
        self._indices[name], self.shapes[name] = 0, shape
        if name in self.loaded:
            arrays, self._indices[name], tensor.dense_until, _ = self.loaded[name]
            try:
                checkpoint.restore([tensor], {name: arrays})
            except ValueError:
                del self._tensors[name], self._indices[name], self.shapes[name]
                raise
            del self.loaded[name]
        if self.sends_number is None and _adds_up(tensor):
            self.sends_number = name

    def switch(self, *arguments: Any, **named: Any) -> None:
        super().switch(*arguments, **named)
        # Which hold on to tensors of before.
        self._begun.clear()
        self.sends_number = next((tensor.name for tensor in self.tensors if _adds_up(tensor)), None)

    def _add(self, name: str, shape: tuple, variant: Compressor) -> Tensor:
        tensor = super()._add(name, shape, variant)
        tensor.alone = Group(False, Steady())
        tensor.alone.add(tensor)
        return tensor

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name, which is known."""
        return self._tensors[name]

    def _go_dense(self, group: Group, step: Step) -> Collection[str]:
        # A graph has no operation for a sum that a feature around the algorithm asks for.
        return () if isinstance(group.compressor, Wrapper) else super()._go_dense(group, step)

    def begin(
        self,
        rank: int,
        size: int,
        loss_scale: float = 1.0,
        lr: Optional[float] = None,
        squared_norm: Optional[float] = None,
    ) -> int:
        """Begins a step of tensors whose gradients are times `loss_scale`, on this rank of so many;
        returns the number of the call. lr: as in Step; squared_norm: where gradients are to be
        clipped, of factor · (all gradients of the step), factor being what the reducer makes of a 1
        on each rank. RuntimeError as of `to_true_units`."""
        scale = to_true_units(loss_scale)
        with self._lock:
            self.expect(rank=rank, size=size)
            call = next(self._calls)
            # Nobody knows when all have come: what nobody uses is not computed.
            self._begun.pop(call - _KEPT, None)
            step = dataclasses.replace(self._now, scale=scale, lr=lr)
            self._begun[call] = Transaction(), step, squared_norm
            return call

    def count(self, nbytes: int) -> None:
        """Counts bytes of a sum that a step needs for all its tensors."""
        with self._lock:
            self._counted += nbytes

    def totals(self) -> Dict[str, float]:
        summed = super().totals()
        more = {key: summed[key] + self._counted for key in ("bytes_sent", "bytes_received")}
        return {**summed, **more}

    def submit(
        self, name: str, grad: np.ndarray, call: int, squares: Optional[np.ndarray] = None
    ) -> List[np.ndarray]:
        """Takes a tensor's flat float32 gradient into a step; returns the carrier, and behind it
        the first message.

        grad's memory belongs to the exchange until `finish`. squares: as in Step. A tensor that was
        never finished has its last step rolled back. RuntimeError where the call is forgotten.
        """
        self._end(name)
        with self._lock:
            try:
                transaction, step, squared_norm = self._begun[call]
            except KeyError:
                raise RuntimeError(
                    f"{name}: its gradient came after {_KEPT} later calls of functions had begun, "
                    "or after compression.switch(), and its step is not known any more. Where "
                    "several threads train with one compression make one for each, and switch when "
                    "all calls have ended"
                ) from None
            self._latest = transaction
        tensor, started = self._known(name, grad), time.perf_counter()
        index = self._indices[name]
        step = dataclasses.replace(step, index=index, squares=squares)
        if step.frozen and tensor.compressor.policy.m:
            # Keras' momentum holds the learning rate.
            grad.fill(0)
        step = dataclasses.replace(step, dense=name in self._apart(tensor.alone, step))
        self._indices[name] += 1
        transaction.tensors.append(tensor)
        features = self._features([tensor], [step])
        pending = self._pending[name] = _Pending(grad, call, transaction, index)
        carrier = pending.begin(tensor, step, features, squared_norm)
        tensor.counters["encode_seconds"] += time.perf_counter() - started
        handed_out = [carrier, *self._message(name, pending)]
        if name == self.sends_number:
            pending.compares = isinstance(pending.request, Allreduce)
            number = Allreduce(step_numbers(index) if pending.compares else np.empty(0, np.int64))
            tensor.count(number)
            handed_out.append(number.array)
        return handed_out

    def advance(self, name: str, call: int, brought: Message) -> List[np.ndarray]:
        """Brings what became of a message; returns the next one."""
        pending = self._arrive(name, call, brought)
        if pending.last:
            # Such a step has no more to send.
            pending.arrived = pending.arrived or brought
        else:
            pending.wait_for(pending.step.send([answer_of(pending.request, brought)]))
        return self._message(name, pending)

    def finish(
        self, name: str, call: int, reduced: np.ndarray, brought: Message = ()
    ) -> np.ndarray:
        """Brings the carrier as the reducer reduced it, and what became of the last message;
        returns the flat float32 result, in the memory of the gradient or of the carrier."""
        pending = self._arrive(name, call, brought)
        started, result = time.perf_counter(), pending.grad
        if isinstance(pending.step, CarriedStep):
            result = reduced if reduced.dtype == FLOAT32 else result
            pending.step.arrived.append((0, reduced, result))
            finite = pending.step.decode()
        else:
            arrived = answer_of(pending.request, pending.arrived or brought)
            finite = pending.step.send((float(reduced[0]), arrived)).finite
        self._tensors[name].counters["decode_seconds"] += time.perf_counter() - started
        pending.request, pending.arrived, pending.finished = None, None, True
        # Until the next step begins it would stay in memory.
        pending.grad = np.empty(0, np.float32)
        if not finite:
            pending.transaction.finite = False
        return result

    def step_alone(
        self, name: str, grad: np.ndarray, call: int, squares: Optional[np.ndarray] = None
    ) -> np.ndarray:
        """A tensor's whole step on a rank that is alone, to which all that it sends comes back:
        `submit` to `finish`."""
        carrier, *message = self.submit(name, grad, call, squares)
        for _ in self._tensors[name].declared[1:]:
            message = self.advance(name, call, message)
        return self.finish(name, call, carrier, message)

    def fail(self, name: str) -> None:
        """The reducer could not use this result, on all ranks alike: its step will be rolled
        back."""
        self._pending[name].transaction.finite = False

    def counts(self, name: str, call: int) -> bool:
        """Returns whether a tensor's last step was this call's, and its result is to be applied.
        Once it is ended nobody knows."""
        pending = self._pending.get(name)
        return pending is not None and pending.call == call and pending.transaction.finite

    def _arrive(self, name: str, call: int, brought: Message) -> _Pending:
        pending = self._pending.get(name)
        if pending is None or pending.call != call or pending.finished:
            raise RuntimeError(
                f"{name}: another gradient of it came before this one was exchanged. One "
                f"compression serves one model, and one step "
                "at a time: make a compression for each tape or optimizer whose steps may overlap"
            )
        if pending.compares:
            pending.compares = False
            check_step_numbers(brought[-1], pending.index, self._now.size)
        return pending

    def _message(self, name: str, pending: _Pending) -> List[np.ndarray]:
        """The message that the tensor's next operation is to move. RuntimeError where that is not
        what the compressor has declared."""
        declared, stage = self._tensors[name].declared, pending.stage
        expected = declared[stage : stage + 1]
        pending.stage += 1
        # What arrived is of its last one.
        request = None if pending.arrived else pending.request
        if request is None:
            return empty(expected, self._now.size)
        if request.collective not in expected:
            raise RuntimeError(
                f"{self._tensors[name].compressor.id}: message {stage} of a step is "
                f"{request.collective}, but `collectives` declares {declared}"
            )
        return message_of(request)

    def _end(self, name: str) -> None:
        """Ends a tensor's last step where that has not happened yet."""
        pending = self._pending.pop(name, None)
        if pending is None:
            return
        transaction = pending.transaction
        succeeded = transaction.finite and pending.finished
        end(pending.step, succeeded)
        with self._lock:
            if not transaction.ended:  # the first of its step
                transaction.finite = succeeded
                self._count_step(transaction)

    def open_tensors(self) -> Collection[str]:
        # Other threads submit meanwhile.
        return [name for name, pending in list(self._pending.items()) if not pending.finished]

    def end_step(self) -> None:
        self._refuse_in_step()
        for name in list(self._pending):
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
        for name in self.open_tensors():
            self._end(name)

    def go_back_to(self, state: Dict[str, Any]) -> None:
        """As of `Driver`. Tensors that became known after the state was made go back to their
        beginning."""
        saved = checkpoint.read(state)
        for name in self._tensors.keys() - saved.arrays.keys():
            saved.arrays[name] = self._tensors[name].compressor.init(name, self.shapes[name]).arrays
            saved.header["step"] = {**saved.header["step"], name: 0}
        self.rollback()
        self._continue_from(saved)

    def _continue_from(self, saved: checkpoint.Saved) -> None:
        steps, shapes, arrays = saved.header["step"], saved.header["shapes"], saved.arrays
        dense_until = saved.header["dense_until"]
        checkpoint.refuse(
            first_difference(dict.fromkeys(arrays, "there"), dict.fromkeys(steps, "there"), "step")
        )
        unknown = {name: "there" for name in arrays if name not in self._tensors}
        checkpoint.refuse(
            first_difference(
                unknown, {name: "there" for name in unknown if name in shapes}, "shapes"
            )
        )
        self.arrays()
        known = {name: arrays[name] for name in arrays if name in self._tensors}
        checkpoint.restore(self._tensors.values(), known)
        self._latest = Transaction()
        for name in known:
            self._indices[name] = steps[name]
            self._tensors[name].dense_until = dense_until.get(name, 0)
        self.loaded = copy.deepcopy(
            {
                name: (arrays[name], steps[name], dense_until.get(name, 0), tuple(shapes[name]))
                for name in unknown
            }
        )


def _adds_up(tensor: Tensor) -> bool:
    """Returns whether a step of this tensor has sums, which do not carry its number."""
    return any(c.verb == "allreduce" and c.op == "sum" for c in tensor.declared)
