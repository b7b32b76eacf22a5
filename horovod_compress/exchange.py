"""Drives the steps of one compression on one rank: encode, move, decode, and commit or roll back.

Of each tensor the host (Horovod's optimizer, or `simulate`) takes a carrier, sums or averages it
over ranks as its user asked, and brings it back. A dense payload is its own carrier. Any other
payload travels beside a carrier that holds a single 1: what came back, divided by the number of
ranks, is the factor for the sum of the payloads, whatever the host's op, scale factors or
predivision are.
"""

import dataclasses
import functools
import time
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    Iterator,
    List,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

import numpy as np

from . import checkpoint, kernels
from .compressors.base import Compressor
from .driver import Driver, Transaction
from .hosts import Host
from .kernels import DeviceCall
from .requests import (
    FLOAT32,
    Allgather,
    Allreduce,
    Alltoall,
    Final,
    HostReduce,
    SelectAgain,
    StepNorm,
    TensorStep,
)
from .split import split_step
from .step import Tensor, check_step_numbers, conclude, step_numbers
from .transport.base import Transport
from .wire import FrameLength

# Elements on a device that are worth launches of their own: passes over so many take some 100 µs,
# and as much to launch.
_TOGETHER = 1 << 24


@dataclasses.dataclass
class _Pending:
    """A tensor's step that is under way."""

    tensor: Tensor
    grad: np.ndarray
    step: TensorStep
    # An array, from the first request on.
    carrier: Any = None
    request: Any = None  # the Request that it waits for
    # A function that waits for the collective of that request, where one was started.
    wait: Any = None


def _first_of(pendings: Iterable[_Pending]) -> List[_Pending]:
    """As many as have calls worth making together, so that more take no more memory."""
    chosen, numel = [], 0
    for pending in pendings:
        chosen.append(pending)
        numel += pending.grad.size
        if numel >= _TOGETHER:
            break
    return chosen


def _answer_calls(
    pendings: Sequence[_Pending],
    answered: Callable[[_Pending, Any], Any],
    counter: str = "encode_seconds",
) -> None:
    """Makes the kernels' calls of steps, and gives each its answer, also where another one fails:
    it has to know what was taken out of its state."""
    started = time.perf_counter()
    answers = kernels.together([pending.request for pending in pendings])
    pendings[0].tensor.counters[counter] += time.perf_counter() - started
    failure = None
    for pending, answer in zip(pendings, answers):
        try:
            answered(pending, answer)
        except BaseException as error:
            failure = failure or error
    if failure is not None:
        raise failure


class Exchange(Driver):
    """Drives steps eagerly: what a step asks for is started at once, and waited for when the host
    has its carriers back.

    compressor: the configuration that is in force; tensors: {name: (shape, compressor)}, the
    compressor being this one or a variant (other momentum for another parameter group). Every
    tensor of a step is submitted before the first is finished; a step ends when all that was
    submitted is finished. label: what its collectives' names begin with; dense_alone,
    host: as in Driver.
    """

    def __init__(
        self,
        compressor: Compressor,
        transport: Transport,
        tensors: Dict[str, Tuple[tuple, Compressor]],
        label: str = "hvdc",
        dense_alone: bool = False,
        host: Optional[Host] = None,
    ) -> None:
        super().__init__(compressor, transport.rank, transport.size, label, dense_alone, host)
        self.transport = transport
        for name, (shape, variant) in tensors.items():
            self._add(name, shape, variant)
        # Of both hops of what is split.
        self._split_lengths = transport.frame_length(), transport.frame_length()
        self._transaction = Transaction(0)
        self._collectives = transport  # of the transaction
        self._steps: Dict[str, TensorStep] = {}  # of the transaction
        # Of those, submitted and not finished.
        self._open: Dict[str, _Pending] = {}
        # Of those, with exchanges to come before they have a payload.
        self._in_rounds: List[_Pending] = []
        # Of those, with entries that are exchanged when all are there.
        self._to_split: Dict[str, _Pending] = {}
        # Of those, with a kernel's call that waits for other tensors', before the last exchange.
        self._calling: List[_Pending] = []
        self._to_call = 0  # elements of those
        # Of those submitted, whose results the host has not brought.
        self._awaited: Set[str] = set()
        # Of those submitted, with a kernel's call after it.
        self._decoding: Dict[str, _Pending] = {}
        # With sums: waits for the ranks' numbers of this step; False once they were compared.
        self._numbers: Any = None

    def submit(
        self,
        name: str,
        grad: np.ndarray,
        squares: Optional[np.ndarray] = None,
        lr: Optional[float] = None,
        base: Optional[np.ndarray] = None,
    ) -> np.ndarray:
        """Takes a tensor's flat float32 gradient into the step; returns the carrier for the host to
        reduce, in place.

        squares, lr, base: as in Step, where known: the sums over this rank's samples of their
        squared gradients, the learning rate of this step, and what the gradient counts from. grad's
        memory belongs to the exchange until `finish`. A tensor that is submitted again although its
        step was never finished abandons that step: what it took out of residuals goes back.
        """
        if self._steps and (not self._open or name in self._steps):
            self._end()
        if not self._steps:
            self._collectives = self.transport.in_step(f"{self._label}:ranks")
        plain = squares is None and lr is None and base is None
        step = (
            self._now
            if plain
            else dataclasses.replace(self._now, squares=squares, lr=lr, base=base)
        )
        tensor, transaction = self._known(name, grad), self._transaction
        pending = self._open[name] = _Pending(tensor, grad, self._begin(tensor, grad, step))
        self._steps[name] = pending.step
        self._awaited.add(name)
        self._latest = transaction
        transaction.tensors.append(tensor)
        self._advance(pending, None)
        if self._to_call >= _TOGETHER:
            self._call()
        return pending.carrier

    def is_payload(self, name: str, carrier: np.ndarray) -> bool:
        """Whether the carrier that `submit` returned is what ranks have to send, and not the single
        1 that goes beside it."""
        return carrier is not self._tensors[name].carrier.array

    def flush(self, factor: float = 1.0) -> None:
        """Takes every step to its last exchange, and starts that; `finish` does so by itself.
        factor: what the host makes of a 1 on each rank: 1 where it averages, the number of ranks
        where it sums; clipping limits what comes out."""
        for _ in self.rounds(factor):
            pass

    def rounds(self, factor: float = 1.0) -> Iterator[None]:
        """`flush` by rounds, for a driver of several ranks: yields when it has started something,
        before it waits for it."""
        self._call()
        norms = [pending for pending in self._in_rounds if isinstance(pending.request, StepNorm)]
        if norms:
            self._in_rounds.clear()
            squared_norm = factor**2 * sum(
                kernels.of(pending.grad).squared_norm(pending.grad) for pending in norms
            )
            for pending in norms:
                self._advance(pending, (squared_norm, True))
            self._call()
        while self._in_rounds:
            waiting, self._in_rounds = self._in_rounds, []
            self._start_maxima([pending for pending in waiting if pending.wait is None])
            yield
            started = time.perf_counter()
            self._compare_step_numbers()
            answers = [pending.wait() for pending in waiting]
            waiting[0].tensor.counters["exchange_seconds"] += time.perf_counter() - started
            for pending, answer in zip(waiting, answers):
                self._advance(pending, answer)
            self._call()
        if self._to_split:
            yield from self._split(factor)

    def finish(self, name: str, reduced: np.ndarray) -> None:
        """Leaves the step's result in the memory of the gradient that was submitted; where that is
        on a device, once the last tensor of the step is finished, or by `settle`. reduced: the
        carrier as the host brought it back. A result that is not finite on some rank is not finite
        on all of them."""
        self._awaited.discard(name)
        pending = self._open.get(name) or self._refuse_given_up(name)
        if self._in_rounds or self._calling or name in self._to_split:
            self.flush(1.0 if self.is_payload(name, pending.carrier) else float(reduced[0]))
        arrived = None
        if pending.wait is not None:
            started = time.perf_counter()
            self._compare_step_numbers()
            arrived = pending.wait()
            pending.tensor.counters["exchange_seconds"] += time.perf_counter() - started
        elif reduced.dtype == FLOAT32 and reduced is not pending.grad:
            np.copyto(pending.grad, reduced)
            reduced = pending.grad
        self._decode(pending, (reduced, arrived))
        self._settle_the_last()

    def settle(self) -> None:
        """Has the results of all tensors that were finished in their gradients' memory."""
        try:
            while self._decoding:
                _answer_calls(_first_of(self._decoding.values()), self._decode, "decode_seconds")
        except BaseException:
            # Calls that are made a second time would add a second time.
            self.reject()
            raise

    def _settle_the_last(self) -> None:
        if not self._awaited:
            self.settle()

    def _decode(self, pending: _Pending, answer: Any) -> None:
        """Sends a step what came of its last exchange, or of a kernel's call. Its result is there
        then, or it has a kernel's call to make."""
        counters, started, name = pending.tensor.counters, time.perf_counter(), pending.tensor.name
        self._decoding.pop(name, None)
        try:
            outcome = pending.step.send(answer)
        except StopIteration:
            self._refuse_given_up(name)
        if isinstance(outcome, DeviceCall):
            pending.request = outcome
            self._decoding[name] = pending
        else:
            if outcome.result is not pending.grad:
                np.copyto(pending.grad, outcome.result)
            if not outcome.finite:
                self._transaction.finite = False
            del self._open[name]
        counters["decode_seconds"] += time.perf_counter() - started

    @staticmethod
    def _refuse_given_up(name: str) -> NoReturn:
        raise RuntimeError(f"{name}: its step has failed before: submit it again")

    def _advance(self, pending: _Pending, answer: Any) -> None:
        """Sends a step what it waits for, and starts what it asks for next."""
        started = time.perf_counter()
        send = pending.step.send
        request = send(answer)
        if isinstance(request, HostReduce):
            pending.carrier = request.array
            request = send(None)
        pending.request, pending.wait = request, None
        if isinstance(request, DeviceCall):
            self._calling.append(pending)
            self._to_call += pending.grad.size
            pending.wait = functools.partial(self._refuse_given_up, pending.tensor.name)
        elif isinstance(request, Final):
            if isinstance(request.request, SelectAgain):
                self._to_split[pending.tensor.name] = pending
                self._collectives.expect_gather()
                pending.wait = functools.partial(self._refuse_given_up, pending.tensor.name)
            elif request.request is not None:
                pending.wait = self._start_own(pending, request.request, "")
        else:
            self._in_rounds.append(pending)
            if isinstance(request, StepNorm):
                pending.carrier = request.carrier.array
            elif getattr(request, "op", "") != "max":
                pending.wait = self._start_own(pending, request, ".round")
        pending.tensor.counters["encode_seconds"] += time.perf_counter() - started

    def _call(self) -> None:
        """Makes the kernels' calls that tensors wait for, before their last exchange, together."""
        while self._calling:
            calling = _first_of(self._calling)
            del self._calling[: len(calling)]
            self._to_call -= sum(pending.grad.size for pending in calling)
            _answer_calls(calling, self._advance)

    def _start_own(
        self, pending: _Pending, request: Union[Allreduce, Allgather, Alltoall], suffix: str
    ) -> Callable[[], Any]:
        if isinstance(request, Allreduce):
            self._start_step_numbers(pending)
        return self._start(f"{self._label}.{pending.tensor.name}{suffix}", request)

    def _start(
        self, name: str, request: Union[Allreduce, Allgather, Alltoall]
    ) -> Callable[[], Any]:
        if isinstance(request, Allgather):
            return self._collectives.allgather(name, request.array)
        if isinstance(request, Alltoall):
            return self._collectives.alltoall(name, request.array, request.splits)
        return self._collectives.allreduce(name, request.array, request.op)

    def _split(self, factor: float) -> Iterator[None]:
        """Exchanges the entries of all tensors that wait for that. Yields as `rounds` does."""
        waiting = [self._to_split[name] for name in sorted(self._to_split)]
        self._to_split.clear()
        counters, size = waiting[0].tensor.counters, self.transport.size
        requests = [pending.request.request for pending in waiting]
        hops = split_step(
            requests, self.transport.rank, size, self._now.index, factor / size, self._split_lengths
        )
        answer: Any = None
        try:
            while True:
                started = time.perf_counter()
                request = hops.send(answer)
                wait = self._start(f"{self._label}:split.{request.verb}", request)
                counters["encode_seconds"] += time.perf_counter() - started
                yield
                started = time.perf_counter()
                answer = wait()
                counters["exchange_seconds"] += time.perf_counter() - started
        except StopIteration as stop:
            for pending, selected in zip(waiting, stop.value):
                pending.wait = lambda selected=selected: selected

    def _start_maxima(self, maxima: List[_Pending]) -> None:
        """Starts all tensors' maxima of a round, as one message, of which each waits for its
        part."""
        if not maxima:
            return
        self._start_step_numbers(maxima[0])
        # An order that is one on all ranks.
        maxima.sort(key=lambda pending: pending.tensor.name)
        together = np.concatenate([pending.request.array for pending in maxima])
        wait = functools.lru_cache(maxsize=None)(
            self._collectives.allreduce(f"{self._label}:agree", together, "max")
        )
        end = 0
        for pending in maxima:
            start, end = end, end + pending.request.array.size
            pending.wait = lambda start=start, end=end: wait()[start:end]

    def _start_step_numbers(self, pending: _Pending) -> None:
        if self._numbers is None:
            numbers = Allreduce(step_numbers(self._transaction.number))
            pending.tensor.count(numbers)
            self._numbers = self._collectives.allreduce(f"{self._label}:step", numbers.array)

    def _compare_step_numbers(self) -> None:
        if self._numbers:
            wait, self._numbers = self._numbers, False
            check_step_numbers(
                wait(), self._transaction.number, self.transport.size, self.transport.joined
            )

    def _end(self) -> None:
        """Ends the step: commits it where all that was submitted is finished, and finite, else
        rolls it back."""
        transaction = self._transaction
        transaction.finite = transaction.finite and not self._open
        # Their gradients are to be in the residuals, as those of other steps are that were not
        # finished.
        while self._calling:
            calling = _first_of(self._calling)
            del self._calling[: len(calling)]
            _answer_calls(calling, lambda pending, answer: pending.step.send(answer))
        for step in self._steps.values():
            conclude(step, transaction.finite)
        self._collectives.end_step()
        self._count_step(transaction)
        self._steps.clear()
        self._open.clear()
        self._in_rounds.clear()
        self._awaited.clear()
        self._to_split.clear()
        self._decoding.clear()
        self._to_call = 0
        self._begin_at(self._now.index + 1)
        for extension in self.extensions.values():
            extension.step_ended()

    def _begin_at(self, index: int) -> None:
        self.expect(index=index, rank=self.transport.rank, size=self.transport.size)
        self._transaction, self._numbers = Transaction(index), None

    def reject(self) -> None:
        """The host could not use a result of this step, on all ranks alike: the step will be rolled
        back."""
        self._transaction.finite = False

    def give_up(self, name: str) -> None:
        """In place of a `finish` that was interrupted: the step will be rolled back."""
        self._awaited.discard(name)
        for those in (self._open, self._decoding):
            those.pop(name, None)
        self.reject()
        self._settle_the_last()

    def _frame_length(self) -> FrameLength:
        return self.transport.frame_length()

    def open_tensors(self) -> Collection[str]:
        return self._open

    def end_step(self) -> None:
        self._refuse_in_step()
        if self._steps:
            self._end()

    def replace(self, name: str, **options: Any) -> None:
        """Changes options of one tensor's compressor between steps (a momentum that a scheduler has
        changed)."""
        tensor = self._tensors[name]
        tensor.compressor = tensor.compressor.with_options(**options)

    def steps_taken(self) -> int:
        return self._now.index

    def _wrong_steps(self, steps: Any) -> checkpoint.Difference:
        return checkpoint.wrong_count("step", steps)

    def abandon(self) -> None:
        if self._open:
            self._end()

    def _continue_from(self, saved: checkpoint.Saved) -> None:
        self.arrays()
        checkpoint.restore(self._tensors.values(), saved.arrays)
        for name, tensor in self._tensors.items():
            tensor.dense_until = saved.header["dense_until"].get(name, 0)
        self._begin_at(saved.header["step"])
        self._latest = Transaction()
