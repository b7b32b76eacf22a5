"""Drives the steps of one compression on one rank: encode, move, decode, and commit or roll back.

Of each tensor the reducer (Horovod's optimizer, DDP, or `simulate`) takes a carrier, sums or
averages it over ranks as its user asked, and brings it back. A dense payload is its own carrier.
Any other payload travels beside a carrier that holds a single 1: what came back, divided by the
number of ranks, is the factor for the sum of the payloads, whatever the reducer's op, scale factors
or predivision are.
"""

import dataclasses
import time
from typing import Any, Callable, Collection, Dict, Iterator, Optional, Tuple, Union

import numpy as np

from .. import kernels
from ..compressors.base import Compressor
from ..compressors.wrapper import with_options
from ..kernels import DeviceCall
from ..protocol.handshake import check_step_numbers, step_numbers
from ..protocol.machine import Machine
from ..protocol.requests import (
    FLOAT32,
    Allgather,
    Allreduce,
    Alltoall,
    Final,
    Joint,
    StepNorm,
    ToReducer,
)
from ..transport.base import Transport
from . import checkpoint, stages
from .driver import Driver, Transaction
from .joined import exchange_jointly, start_gathers, start_maxima
from .momentum import follow, matched
from .stages import (
    AT_WORK,
    CALL,
    DECODE,
    ENCODE,
    JOINT,
    LAST,
    NORM,
    ROUND,
    SMALL,
    Pending,
    Stage,
    Stages,
    first_of,
)
from .step import commit_or_rollback
from .tensor import Tensor


class Exchange(Driver):
    """Drives steps eagerly: what a step asks for is started at once, and waited for when the
    reducer has its carriers back.

    compressor: the configuration that is in force; tensors: {name: (shape, compressor)}, the
    compressor being this one or a variant (other momentum for another parameter group). Every
    tensor of a step is submitted before the first is finished; a step ends when all that was
    submitted is finished. Others: as in Driver.
    """

    def __init__(
        self,
        compressor: Compressor,
        transport: Transport,
        tensors: Dict[str, Tuple[tuple, Compressor]],
        dense_alone: bool = False,
        machine: Optional[Machine] = None,
    ) -> None:
        super().__init__(compressor, transport.rank, transport.size, dense_alone, machine)
        self.transport = transport
        for name, (shape, variant) in tensors.items():
            self._add(name, shape, variant)
        self._joint_lengths = transport.frame_length(), transport.frame_length()
        self._small_length = transport.frame_length()
        self._collectives = transport  # of the transaction
        # Whether an optimizer's momentum may begin while training.
        self.follows_momentum = False
        self._to_call = 0  # elements of those at CALL
        self._begin_at(0)

    def _begin_at(self, index: int) -> None:
        self.expect(index=index, rank=self.transport.rank, size=self.transport.size)
        self._transaction, self._stages = Transaction(), Stages()
        # With sums: waits for the ranks' numbers of this step; False once they were compared.
        self._numbers: Any = None

    def switch(self, *arguments: Any, **named: Any) -> None:
        earlier = self.transport
        super().switch(*arguments, **named)
        self._small_length = self.transport.frame_length()
        if self.transport is not earlier:
            self.transport.count(earlier.bytes_sent, earlier.bytes_received)

    def submit(
        self,
        name: str,
        grad: np.ndarray,
        squares: Optional[np.ndarray] = None,
        lr: Optional[float] = None,
        base: Optional[np.ndarray] = None,
    ) -> np.ndarray:
        """Takes a tensor's flat float32 gradient into the step; returns the carrier for the reducer
        to reduce, in place.

        squares, lr, base: as in Step, where known: the sums over this rank's samples of their
        squared gradients, the learning rate of this step, and what the gradient counts from. grad's
        memory belongs to the exchange until `finish`. A tensor that is submitted again although its
        step was never finished has that rolled back: what it took out of residuals goes back.
        """
        if self._stages.all and (not self._stages.open or name in self._stages.all):
            self._end()
        if not self._stages.all:
            self._collectives = self.transport.in_step(f"{self.label}:ranks")
        step = self._now
        if not (squares is None and lr is None and base is None):
            step = dataclasses.replace(step, squares=squares, lr=lr, base=base)
        tensor, transaction = self._known(name, grad), self._transaction
        pending = Pending(tensor, self._begin(tensor, grad, step), grad)
        self._stages.add(pending)
        self._latest = transaction
        transaction.tensors.append(tensor)
        self._advance(pending, None)
        if self._to_call >= stages.TOGETHER:
            self._call(CALL, self._advance)
        # No tensor of the step is still to come: so these are alike on all ranks.
        if len(self._stages.all) == len(self._tensors):
            self._start_small()
        return pending.carrier

    def is_payload(self, name: str, carrier: np.ndarray) -> bool:
        """Whether the carrier that `submit` returned is what ranks have to send, and not the single
        1 that goes beside it."""
        return carrier is not self._tensors[name].carrier.array

    def flush(self, factor: float = 1.0) -> None:
        """Takes every step to its last exchange, and starts that; `finish` does so by itself.
        factor: what the reducer makes of a 1 on each rank: 1 where it averages, the number of ranks
        where it sums; clipping limits what comes out."""
        for _ in self.rounds(factor):
            pass

    def rounds(self, factor: float = 1.0) -> Iterator[None]:
        """`flush` by rounds, for a driver of several ranks: yields when it has started something,
        before it waits for it."""
        self._encode_small()
        self._call(CALL, self._advance)
        norms = self._stages.waiting(NORM)
        squared_norm = factor**2 * sum(
            kernels.of(pending.grad).squared_norm(pending.grad) for pending in norms
        )
        self._stages.take(norms)
        for pending in norms:
            self._advance(pending, (squared_norm, True))
        self._call(CALL, self._advance)
        while self._stages.at[ROUND]:
            waiting = self._stages.waiting(ROUND)
            maxima = [each for each in waiting if each.wait is None]
            if maxima:
                start_maxima(maxima, self._start)
            yield
            started = time.perf_counter()
            self._stages.take(waiting)
            self._compare_numbers()
            answers = [pending.wait() for pending in waiting]
            waiting[0].tensor.counters["exchange_seconds"] += time.perf_counter() - started
            for pending, answer in zip(waiting, answers):
                self._advance(pending, answer)
            self._call(CALL, self._advance)
        self._start_small()
        if self._stages.at[JOINT]:
            step = dataclasses.replace(self._now, gain=factor / self._now.size)
            yield from exchange_jointly(self._stages, self._start, step, self._joint_lengths)

    def finish(self, name: str, reduced: np.ndarray) -> None:
        """Leaves the step's result in the memory of the gradient that was submitted; where that is
        on a device, once the last tensor of the step is finished, or by `settle`. reduced: the
        carrier as the reducer brought it back. A result that is not finite on some rank is not
        finite on all of them."""
        pending, at = self._stages.open.get(name), self._stages.at
        # Something that all tensors wait for together comes before the last exchange.
        if pending is not None and (any(at[:JOINT]) or pending.stage is JOINT):
            self.flush(1.0 if self.is_payload(name, pending.carrier) else float(reduced[0]))
        if pending is None or pending.stage is not LAST:
            raise RuntimeError(f"{name}: its step has failed before: submit it again")
        arrived = None
        if pending.wait is not None:
            started = time.perf_counter()
            self._compare_numbers()
            arrived = pending.wait()
            pending.tensor.counters["exchange_seconds"] += time.perf_counter() - started
        elif reduced.dtype == FLOAT32 and reduced is not pending.grad:
            np.copyto(pending.grad, reduced)
            reduced = pending.grad
        self._stages.move(pending, AT_WORK)
        self._decode(pending, (reduced, arrived))
        if at[DECODE] and self._stages.brought:
            self.settle()

    def settle(self) -> None:
        """Has the results of all tensors that were finished in their gradients' memory."""
        try:
            self._call(DECODE, self._decode)
        except BaseException:
            # Calls that are made a second time would add a second time.
            self.fail()
            raise

    def _decode(self, pending: Pending, answer: Any) -> None:
        """Sends a step, which is at work, what came of its last exchange, or of a kernel's call.
        Its result is there then, or it has a kernel's call to make."""
        started = time.perf_counter()
        outcome = pending.step.send(answer)
        if isinstance(outcome, DeviceCall):
            pending.request = outcome
            self._stages.move(pending, DECODE)
        else:
            if outcome.result is not pending.grad:
                np.copyto(pending.grad, outcome.result)
            if not outcome.finite:
                self._transaction.finite = False
            self._stages.let_go(pending)
        pending.tensor.counters["decode_seconds"] += time.perf_counter() - started

    def _advance(self, pending: Pending, answer: Any) -> None:
        """Sends a step, which is at work, what it has waited for; starts what it asks for next."""
        started, send = time.perf_counter(), pending.step.send
        request = send(answer)
        if isinstance(request, ToReducer):
            pending.carrier = request.array
            if request is pending.tensor.carrier and pending.tensor.waits(pending.grad):
                if not self._stages.at[ENCODE]:
                    self._collectives.expect_gather()
                self._stages.move(pending, ENCODE)
                return
            request = send(None)
        pending.request, pending.wait, stage = request, None, LAST
        if isinstance(request, Final):
            if request.request is not None:
                stage = self._start_last(pending, request.request)
        elif isinstance(request, DeviceCall):
            stage = CALL
            self._to_call += pending.grad.size
        elif isinstance(request, StepNorm):
            stage = NORM
            pending.carrier = request.carrier.array
        else:
            stage = ROUND
            if request.op != "max":
                pending.wait = self._start(f".{pending.tensor.name}.round", request, pending.tensor)
        self._stages.move(pending, stage)
        pending.tensor.counters["encode_seconds"] += time.perf_counter() - started

    def _start_last(self, pending: Pending, request: Any) -> Stage:
        """Starts a last exchange, unless tensors make it together. Returns what it waits for."""
        small = isinstance(request, Allgather) and pending.tensor.joins
        if small or isinstance(request, Joint):
            if not self._stages.at[SMALL]:
                self._collectives.expect_gather()
            return SMALL if small else JOINT
        pending.wait = self._start(f".{pending.tensor.name}", request, pending.tensor)
        return LAST

    def _call(self, stage: Stage, answered: Callable[[Pending, Any], Any]) -> None:
        """Makes the calls of all tensors at a stage, as many together as are worth it. Each gets
        its answer, also where another one fails: it has to know what was taken out of its state."""
        counter = "decode_seconds" if stage is DECODE else "encode_seconds"
        while self._stages.at[stage]:
            calling = first_of(self._stages.waiting(stage))
            self._stages.take(calling)
            started, failure = time.perf_counter(), None
            answers = kernels.together([pending.request for pending in calling])
            calling[0].tensor.counters[counter] += time.perf_counter() - started
            for pending, answer in zip(calling, answers):
                try:
                    answered(pending, answer)
                except BaseException as error:
                    failure = failure or error
            if failure is not None:
                raise failure
        self._to_call = 0

    def _start(
        self, suffix: str, request: Union[Allreduce, Allgather, Alltoall], tensor: Tensor
    ) -> Callable[[], Any]:
        """Starts an exchange whose name ends with the suffix. tensor: with which the step's numbers
        are counted."""
        name = self.label + suffix
        if isinstance(request, Allgather):
            return self._collectives.allgather(name, request.array)
        if isinstance(request, Alltoall):
            return self._collectives.alltoall(name, request.array, request.splits)
        if self._numbers is None:
            numbers = Allreduce(step_numbers(self._now.index))
            tensor.count(numbers)
            self._numbers = self._collectives.allreduce(f"{self.label}:step", numbers.array)
        return self._collectives.allreduce(name, request.array, request.op)

    def _encode_small(self) -> None:
        """Encodes small tensors one after the other, while code and arrays stay in the caches."""
        for pending in self._stages.waiting(ENCODE) if self._stages.at[ENCODE] else ():
            self._stages.move(pending, AT_WORK)
            self._advance(pending, None)

    def _start_small(self) -> None:
        self._encode_small()
        start_gathers(self._stages, self._start, self._small_length, self._now.size)

    def _compare_numbers(self) -> None:
        """MismatchError where ranks are at different steps. Due before a sum is used."""
        if self._numbers:
            wait, self._numbers = self._numbers, False
            check_step_numbers(wait(), self._now.index, self.transport.size, self.transport.joined)

    def _end(self) -> None:
        """Ends the step: commits it where all that was submitted is finished, and finite, else
        rolls it back."""
        transaction = self._transaction
        transaction.finite &= not self._stages.open
        with self.held():
            # Their gradients are to be in the residuals, as those of other unfinished steps are.
            for pending in self._stages.waiting(ENCODE):
                pending.step.send(None)
            self._call(CALL, lambda pending, answer: pending.step.send(answer))
            for pending in self._stages.all.values():
                commit_or_rollback(pending.step, transaction.finite)
        self._collectives.end_step()
        self._count_step(transaction)
        self._begin_at(self._now.index + 1)
        for extension in self.extensions.values():
            extension.step_ended()

    def fail(self) -> None:
        """The reducer could not use a result of this step, on all ranks alike: the step will be
        rolled back."""
        self._transaction.finite = False

    def fail_tensor(self, name: str) -> None:
        """In place of a `finish` that was interrupted: the step will be rolled back."""
        # What other ranks wait for is still sent.
        self._start_small()
        pending = self._stages.open.pop(name, None)
        if pending is not None and pending.stage in (DECODE, AT_WORK):
            self._stages.let_go(pending)
        self.fail()
        if self._stages.brought:
            self.settle()

    def _add(self, name: str, shape: tuple, variant: Compressor) -> Tensor:
        tensor = super()._add(name, shape, variant)
        tensor.frame_length = self.transport.frame_length()
        tensor.joins_up_to = self.transport.joins_up_to
        return tensor

    def open_tensors(self) -> Collection[str]:
        return self._stages.open

    def end_step(self) -> None:
        self._refuse_in_step()
        if self._stages.all:
            self._end()

    def replace(self, name: str, **options: Any) -> None:
        """Changes options of a tensor's compressor: a momentum that a scheduler has changed."""
        self.end_step()
        tensor = self._tensors[name]
        follow(tensor, with_options(tensor.compressor, **options))

    def steps_taken(self) -> int:
        return self._now.index

    def totals(self) -> Dict[str, float]:
        sent, received = self.transport.bytes_sent, self.transport.bytes_received
        return {**super().totals(), "bytes_sent": sent, "bytes_received": received}

    def rollback(self) -> None:
        if self._stages.open:
            self._end()

    def _continue_from(self, saved: checkpoint.Saved) -> None:
        self.arrays()
        tensors, arrays = self._tensors.values(), saved.arrays
        checkpoint.restore(tensors, matched(tensors, arrays) if self.follows_momentum else arrays)
        for name, tensor in self._tensors.items():
            tensor.dense_until = saved.header["dense_until"].get(name, 0)
            tensor.state.factor = saved.header["factors"].get(name, tensor.state.factor)
        self._begin_at(saved.header["step"])
        self._latest = Transaction()
