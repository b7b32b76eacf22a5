"""The open step of groups: encode, move, decode."""

import dataclasses
import time
from typing import Any, Callable, Dict, Iterator, List, Sequence, Set, Union

import numpy as np

from .. import kernels
from ..compressors.base import Step
from ..compressors.wrapper import Wrapper
from ..protocol.handshake import check_step_numbers, step_numbers
from ..protocol.requests import Allgather, Allreduce, Alltoall, Final, StepNorm
from ..transport.base import Transport
from .driver import Transaction
from .features import Features
from .group import Group
from .pending import (
    DONE,
    FAILED,
    FILLING,
    JOINT,
    LANDING,
    LAST,
    NORM,
    ROUND,
    CarriedStep,
    Pending,
    Stage,
)
from .tensor import Tensor


class OpenStep:
    """The step of all groups, from the first tensor that comes to the end.

    Args:
        features: beside the algorithm.
        joint_lengths: as of `Joint.exchange`.

    Attributes:
        transaction: the results, which are used together, or not at all.
        submitted: the tensors that have come: {name: the step of its group}.
        open: those of them that are not finished.
        groups: their steps, in the order of their first tensors.
        alone: names of tensors that do not go with their group.
    """

    def __init__(self, features: Features, joint_lengths: Any) -> None:
        self._features, self._joint_lengths = features, joint_lengths
        self.transaction = Transaction()
        self.submitted: Dict[str, Union[Pending, CarriedStep]] = {}
        self.open: Dict[str, Union[Pending, CarriedStep]] = {}
        self.groups: Dict[Group, Union[Pending, CarriedStep]] = {}
        self.alone: Set[str] = set()
        # With sums: waits for the ranks' numbers of this step; False once they were compared.
        self._numbers: Any = None

    def begin(self, now: Step, label: str, transport: Transport) -> None:
        """Comes before the first tensor. now: what is known of the step; label: the beginning of
        names of collectives; transport: moves payloads."""
        self.now, self._label, self._transport = now, label, transport
        self._collectives = transport.in_step(f"{label}:ranks")

    def begin_group(self, group: Group) -> None:
        """Begins the step of a group, of which a first tensor has come."""
        apart = self._features.apart(group, self.now)
        self.alone.update(apart)
        together = [tensor for tensor in group.tensors if tensor.name not in apart]
        self.begin_tensors(group, together, self.now)

    def group_alone(self, tensor: Tensor) -> Group:
        """A tensor's own group, for steps in which it does not go with the others."""
        if tensor.alone is None:
            asks = isinstance(tensor.compressor, Wrapper) and tensor.compressor.dense_asks
            carried = self.now.clip_norm is None and not asks
            tensor.alone = Group(carried, self._transport.frame_length())
            tensor.alone.add(tensor)
        return tensor.alone

    def begin_tensors(self, group: Group, tensors: List[Tensor], step: Step) -> Any:
        """Begins the step of those tensors of a group that are to come together."""
        if group.carried:
            pending: Any = CarriedStep(group, self._features.concerned(tensors, [step]))
        else:
            pending = Pending(group, len(tensors))
            if tensors and tensors[0].declared[-1].verb != "allreduce":
                self._collectives.expect_gather()
        self.groups[group] = pending
        return pending

    def begin_full(self, pending: Pending) -> None:
        """Begins the step of a group that is full, or gets no more tensors."""
        pending.begin(self._features.concerned)
        self._advance(pending, None)

    # -- rounds

    def rounds(self, factor: float) -> Iterator[None]:
        """As of `Exchange`."""
        for pending in self._incomplete():
            self.begin_full(pending)
        if norms := self._at(NORM):
            squared_norm = factor**2 * self._squared_norm(norms)
            for pending in norms:
                self._advance(pending, squared_norm)
        self._land()
        while waiting := self._at(ROUND):
            yield
            self._compare_numbers()
            for pending in waiting:
                self._advance(pending, self._waited(pending))
            self._land()
        if joint := self._at(JOINT):
            step = dataclasses.replace(self.now, gain=factor / self.now.size)
            yield from self._exchange_jointly(joint, step)

    def _land(self) -> None:
        """Waits for payloads that a device has still to bring. Those of all groups are under way
        by then."""
        while landing := self._at(LANDING):
            for pending in landing:
                (found,) = self._waited(pending)
                self._advance(pending, found)

    def _at(self, stage: Stage) -> List[Any]:
        return [pending for pending in self.groups.values() if pending.stage is stage]

    def _incomplete(self) -> List[Pending]:
        """Steps of groups of which not all tensors have come."""
        return [pending for pending in self._at(FILLING) if pending.come]

    def _squared_norm(self, norms: List[Pending]) -> float:
        grads = {
            tensor.name: grad
            for pending in norms
            for tensor, grad in zip(pending.tensors, pending.request.grads)
        }
        squares = dict(zip(grads, kernels.squared_norms(list(grads.values()))))
        # In the order in which tensors came.
        return sum(squares[name] for name in self.submitted if name in squares)

    def _advance(self, pending: Pending, answer: Any) -> None:
        """Sends a step what it has waited for; starts what it asks for next. The first call has it
        encode."""
        started, first = time.perf_counter(), pending.tensors[0]
        pending.stage = FAILED
        request = pending.step.send(answer)
        there = request.there if isinstance(request, kernels.Late) else None
        if there is not None and self._transport.gathers_on_device:
            request = pending.step.send(there)
        pending.request, pending.waits = request, []
        if isinstance(request, Final):
            if isinstance(request.request, list):
                pending.stage = JOINT
            else:
                pending.waits.append(self._start(f".{first.name}", request.request, first))
                pending.stage = LAST
        elif isinstance(request, StepNorm):
            pending.stage = NORM
        elif isinstance(request, kernels.Late):
            pending.waits.append(request.take)
            pending.stage = LANDING
        else:
            for number, each in enumerate(request):
                suffix = f".{first.name}.round" + (f".{number}" if number else "")
                pending.waits.append(self._start(suffix, each, first))
            pending.stage = ROUND
        first.counters["encode_seconds"] += time.perf_counter() - started

    def _exchange_jointly(self, waiting: Sequence[Pending], step: Step) -> Iterator[None]:
        """Makes the last exchange of groups whose payloads travel together. Yields when it has
        started something, before it waits for it."""
        # In an order that is one on all ranks.
        named = sorted(
            (tensor.name, tensor, joint)
            for pending in waiting
            for tensor, joint in zip(pending.tensors, pending.request.request)
        )
        for pending in waiting:
            pending.stage = FAILED
        joints, (_, first, joint) = [joint for _, _, joint in named], named[0]
        exchanging = joint.exchange(joints, step, self._joint_lengths)
        answer: Any = None
        try:
            while True:
                started = time.perf_counter()
                request = exchanging.send(answer)
                wait = self._start(f":{joint.label}.{request.verb}", request, first)
                first.counters["encode_seconds"] += time.perf_counter() - started
                yield
                started = time.perf_counter()
                answer = wait()
                first.counters["exchange_seconds"] += time.perf_counter() - started
        except StopIteration as stop:
            found = {name: arrived for (name, _, _), arrived in zip(named, stop.value)}
        for pending in waiting:
            its = [found[tensor.name] for tensor in pending.tensors]
            for tensor, arrived in zip(pending.tensors, its):
                tensor.counters["bytes_sent"] += arrived.sent
                tensor.counters["bytes_received"] += arrived.received
            pending.waits = [[arrived.result for arrived in its].copy]
            pending.stage = LAST

    def _start(
        self, suffix: str, request: Union[Allreduce, Allgather, Alltoall], tensor: Tensor
    ) -> Callable[[], Any]:
        """Starts an exchange whose name ends with the suffix. tensor: with which the step's numbers
        are counted."""
        name = self._label + suffix
        if isinstance(request, Allgather):
            return self._collectives.allgather(name, request.array)
        if isinstance(request, Alltoall):
            return self._collectives.alltoall(name, request.array, request.splits)
        if self._numbers is None:
            numbers = Allreduce(step_numbers(self.now.index))
            tensor.count(numbers)
            self._numbers = self._collectives.allreduce(f"{self._label}:step", numbers.array)
        there = self._transport.reduces_on_device
        array = request.array if there else np.asarray(request.array)
        return self._collectives.allreduce(name, array, request.op)

    def _compare_numbers(self) -> None:
        """MismatchError where ranks are at different steps. Due before a sum is used."""
        if self._numbers:
            wait, self._numbers = self._numbers, False
            transport = self._transport
            check_step_numbers(wait(), self.now.index, transport.size, transport.error_of_missing)

    def _waited(self, pending: Pending) -> List[Any]:
        """The results that a group waits for."""
        started = time.perf_counter()
        arrived = [wait() for wait in pending.waits]
        pending.tensors[0].counters["exchange_seconds"] += time.perf_counter() - started
        return arrived

    # -- results

    def finish_group(self, pending: Pending, factor: float) -> None:
        """Waits for a group's last exchange, and decodes what has come. factor: what the reducer
        made of a 1."""
        # Something that all groups wait for together comes before the last exchange.
        if any([each.stage < LAST for each in self.groups.values()]):
            for _ in self.rounds(factor):
                pass
        # Until it has succeeded.
        pending.stage = FAILED
        self._compare_numbers()
        (arrived,) = self._waited(pending)
        started = time.perf_counter()
        self.transaction.note(pending.step.send((factor, arrived)).finite)
        pending.tensors[0].counters["decode_seconds"] += time.perf_counter() - started
        pending.stage = DONE
        # Nothing more comes of it until the step ends. Until then its arrays would stay in memory.
        pending.request, pending.waits = None, []

    def fail(self, name: str) -> None:
        """As of `Exchange.fail_tensor`."""
        # What other ranks wait for is still sent.
        for pending in self._incomplete():
            self.begin_full(pending)
        self._land()
        self.open.pop(name, None)
        self.transaction.fail()

    def end(self) -> None:
        """Commits the step where all that was submitted is finished, and finite, else rolls it
        back."""
        transaction = self.transaction
        if self.open:
            transaction.fail()
        succeeded = False
        try:
            # Their gradients are to be in residuals, as those of other unfinished steps are.
            for incomplete in self._incomplete():
                incomplete.begin(self._features.concerned).send(None)
            succeeded = transaction.finite
        except BaseException:
            transaction.give_up()
            raise
        finally:
            for pending in self.groups.values():
                pending.end(succeeded)
            self._collectives.end_step()
