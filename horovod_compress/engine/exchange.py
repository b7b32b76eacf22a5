"""Drives the steps of one compression on one rank: encode, move, decode, and commit or roll back.

Of each tensor the reducer (Horovod's optimizer, DDP, or `simulate`) takes a carrier, sums or
averages it over ranks as its user asked, and brings it back. A dense payload is its own carrier.
Any other payload travels with those of its group beside a carrier that holds a single 1: what came
back, divided by the number of ranks, is the factor for the sum of the payloads, whatever the
reducer's op, scale factors or predivision are.
"""

import dataclasses
import time
from typing import Any, Callable, Collection, Dict, Iterator, List, Optional, Tuple, Union

import numpy as np

from .. import kernels
from ..compressors.base import Compressor, Step
from ..compressors.wrapper import Wrapper, with_options
from ..protocol.handshake import check_step_numbers, step_numbers
from ..protocol.machine import Machine
from ..protocol.requests import Allgather, Allreduce, Alltoall, Final, StepNorm
from ..transport.base import Transport
from . import checkpoint
from .carried import CarriedStep
from .driver import Driver, Transaction
from .group import Group, form
from .joint import exchange_jointly
from .momentum import follow, matched
from .pending import DONE, FAILED, FILLING, JOINT, LAST, NORM, ROUND, Pending, Stage
from .tensor import Tensor

_CARRIER = 4  # bytes of a single 1


class Exchange(Driver):
    """Drives steps eagerly: what a group asks for is started when the last of its tensors has come,
    and waited for when the reducer has a carrier of its back.

    compressor: the configuration that is in force; tensors: {name: (shape, compressor)}, the
    compressor being this one or a variant (other momentum for another parameter group), in an order
    that is alike on all ranks. Every tensor of a step is submitted before the first is finished; a
    step ends when all that was submitted is finished. Others: as in Driver.
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
        self._collectives = transport  # of the transaction
        # Whether an optimizer's momentum may begin while training.
        self.follows_momentum = False
        # By name; none until the first gradient says where they are.
        self._group_of: Dict[str, Group] = {}
        self._begin_at(0)

    def _form(self, on_device: bool) -> None:
        """Forms groups. Gradients are on a device on all ranks, or on none."""
        carries, lengths = self._now.clip_norm is None, self.transport.frame_length
        for group in form(self._tensors.values(), carries, lengths, on_device):
            for tensor in group.tensors:
                tensor.alone = None
                self._group_of[tensor.name] = group

    def _begin_at(self, index: int) -> None:
        self.expect(index=index, rank=self.transport.rank, size=self.transport.size)
        self._transaction = Transaction()
        # Of this step: what was submitted by name, and what of that is not finished.
        self._submitted: Dict[str, Union[Pending, CarriedStep]] = {}
        self._open: Dict[str, Union[Pending, CarriedStep]] = {}
        # By group, in the order of their first tensors; and names that are not in their group's.
        self._steps: Dict[Group, Union[Pending, CarriedStep]] = {}
        self._alone: set = set()
        # With sums: waits for the ranks' numbers of this step; False once they were compared.
        self._numbers: Any = None

    def switch(self, *arguments: Any, **named: Any) -> None:
        earlier = self.transport
        super().switch(*arguments, **named)
        self._group_of = {}
        if self.transport is not earlier:
            self.transport.count(earlier.bytes_sent, earlier.bytes_received)

    def resize(self, rank: int, size: int) -> None:
        super().resize(rank, size)
        self._group_of = {}

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
        if self._submitted and (not self._open or name in self._submitted):
            self._end()
        if not self._submitted:
            self._collectives = self.transport.in_step(f"{self.label}:ranks")
        tensor = self._known(name, grad)
        if not self._group_of:
            self._form(type(grad) is not np.ndarray)
        group, step = self._group_of[name], self._now
        if not (squares is None and lr is None and base is None):
            step = dataclasses.replace(step, squares=squares, lr=lr, base=base)
        if group not in self._steps:
            self._begin_group(group)
        if name in self._alone:
            group, step = self._group_alone(tensor), dataclasses.replace(step, dense=True)
        elif group.carried and step is not self._now:
            group = self._group_alone(tensor)
        pending = self._steps.get(group) or self._begin_pending(group, [tensor], step)
        self._latest = self._transaction
        self._transaction.tensors.append(tensor)
        self._submitted[name] = self._open[name] = pending
        if isinstance(pending, CarriedStep):
            started = time.perf_counter()
            carrier = pending.carry(tensor, grad, step)
            tensor.counters["encode_seconds"] += time.perf_counter() - started
            return carrier
        tensor.carrier[0] = 1
        tensor.counters["bytes_sent"] += _CARRIER
        tensor.counters["bytes_received"] += _CARRIER
        pending.come.append((tensor.place, tensor, grad, step))
        if type(grad) is not np.ndarray:
            pending.follow(grad)
        pending.left -= 1
        if not pending.left:
            self._begin(pending)
        return tensor.carrier

    def _begin_group(self, group: Group) -> None:
        """Begins the step of a group, of which a first tensor has come."""
        apart = self._apart(group, self._now)
        self._alone.update(apart)
        together = [tensor for tensor in group.tensors if tensor.name not in apart]
        self._begin_pending(group, together, self._now)

    def _group_alone(self, tensor: Tensor) -> Group:
        """A tensor's own group, for steps in which it does not go with the others."""
        if tensor.alone is None:
            asks = isinstance(tensor.compressor, Wrapper) and tensor.compressor.dense_asks
            carried = self._now.clip_norm is None and not asks
            tensor.alone = Group(carried, self.transport.frame_length())
            tensor.alone.add(tensor)
        return tensor.alone

    def _begin_pending(self, group: Group, tensors: List[Tensor], step: Step) -> Any:
        if group.carried:
            pending: Any = CarriedStep(group, self._features(tensors, [step]))
        else:
            pending = Pending(group, len(tensors))
            if tensors and tensors[0].declared[-1].verb != "allreduce":
                self._collectives.expect_gather()
        self._steps[group] = pending
        return pending

    def is_payload(self, name: str, carrier: np.ndarray) -> bool:
        """Returns whether the carrier that `submit` returned is what ranks have to send, and not
        the single 1 that goes beside it."""
        return carrier is not self._tensors[name].carrier

    def flush(self, factor: float = 1.0) -> None:
        """Takes every step to its last exchange, and starts that; `finish` does so by itself.
        factor: what the reducer makes of a 1 on each rank: 1 where it averages, the number of ranks
        where it sums; clipping limits what comes out."""
        for _ in self.rounds(factor):
            pass

    def rounds(self, factor: float = 1.0) -> Iterator[None]:
        """`flush` by rounds, for a driver of several ranks: yields when it has started something,
        before it waits for it."""
        for pending in self._incomplete():
            self._begin(pending)
        if norms := self._at(NORM):
            squared_norm = factor**2 * self._squared_norm(norms)
            for pending in norms:
                self._advance(pending, squared_norm)
        while waiting := self._at(ROUND):
            yield
            self._compare_numbers()
            for pending in waiting:
                self._advance(pending, self._waited(pending))
        if joint := self._at(JOINT):
            step = dataclasses.replace(self._now, gain=factor / self._now.size)
            yield from exchange_jointly(joint, step, self._joint_lengths, self._start)

    def _at(self, stage: Stage) -> List[Any]:
        return [pending for pending in self._steps.values() if pending.stage is stage]

    def _incomplete(self) -> List[Pending]:
        """Steps of groups of which not all tensors have come."""
        return [pending for pending in self._at(FILLING) if pending.come]

    def _squared_norm(self, norms: List[Pending]) -> float:
        # By place.
        grads: Dict[Any, Dict[str, Any]] = {}
        for pending in norms:
            for tensor, grad in zip(pending.tensors, pending.request.grads):
                grads.setdefault(getattr(grad, "device", None), {})[tensor.name] = grad
        squares: Dict[str, float] = {}
        for named in grads.values():
            its = list(named.values())
            squares.update(zip(named, kernels.of(its[0]).squared_norm(its)))
        # In the order in which tensors came.
        return sum(squares[name] for name in self._submitted if name in squares)

    def finish(self, name: str, reduced: np.ndarray, now: bool = True) -> None:
        """Decodes results into the gradients that were submitted. All of a group that was gathered
        or summed are there after the first call for one of its tensors; all of a group of carriers
        after the last call, or with `now` each after its own. reduced: the carrier as the reducer
        brought it back. A result that is not finite on some rank is not finite on all of them."""
        pending = self._open.get(name)
        if pending is None or pending.stage is FAILED:
            raise RuntimeError(f"{name}: its step has failed before: submit it again")
        if isinstance(pending, CarriedStep):
            number, grad = pending.reducing.pop(name)
            pending.arrived.append((number, reduced, grad))
            if now or not pending.reducing:
                self._decode_carried(pending)
        elif pending.stage is not DONE:
            self._finish_group(pending, float(reduced[0]))
        del self._open[name]

    def _decode_carried(self, pending: CarriedStep) -> None:
        started = time.perf_counter()
        self._transaction.finite &= pending.decode()
        first = pending.group.tensors[0]
        first.counters["decode_seconds"] += time.perf_counter() - started

    def _finish_group(self, pending: Pending, factor: float) -> None:
        """Waits for a group's last exchange, and decodes what has come. factor: what the reducer
        made of a 1."""
        # Something that all groups wait for together comes before the last exchange.
        if any([each.stage < LAST for each in self._steps.values()]):
            self.flush(factor)
        # Until it has succeeded.
        pending.stage = FAILED
        self._compare_numbers()
        (arrived,) = self._waited(pending)
        started = time.perf_counter()
        self._transaction.finite &= pending.step.send((factor, arrived)).finite
        pending.tensors[0].counters["decode_seconds"] += time.perf_counter() - started
        pending.stage = DONE
        # Nothing more comes of it until the step ends. Until then its arrays would stay in memory.
        pending.request, pending.waits = None, []

    def _waited(self, pending: Pending) -> List[Any]:
        """The results of the collectives that a group waits for."""
        started = time.perf_counter()
        arrived = [wait() for wait in pending.waits]
        pending.tensors[0].counters["exchange_seconds"] += time.perf_counter() - started
        return arrived

    def _begin(self, pending: Pending) -> None:
        """Begins the step of a group that is full, or gets no more tensors."""
        pending.begin(self._features)
        self._advance(pending, None)

    def _advance(self, pending: Pending, answer: Any) -> None:
        """Sends a step what it has waited for; starts what it asks for next."""
        started, first = time.perf_counter(), pending.tensors[0]
        pending.stage = FAILED
        request = pending.request = pending.step.send(answer)
        pending.waits = []
        if isinstance(request, Final):
            if isinstance(request.request, list):
                pending.stage = JOINT
            else:
                pending.waits.append(self._start(f".{first.name}", request.request, first))
                pending.stage = LAST
        elif isinstance(request, StepNorm):
            pending.stage = NORM
        else:
            for number, each in enumerate(request):
                suffix = f".{first.name}.round" + (f".{number}" if number else "")
                pending.waits.append(self._start(suffix, each, first))
            pending.stage = ROUND
        first.counters["encode_seconds"] += time.perf_counter() - started

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

    def _compare_numbers(self) -> None:
        """MismatchError where ranks are at different steps. Due before a sum is used."""
        if self._numbers:
            wait, self._numbers = self._numbers, False
            check_step_numbers(wait(), self._now.index, self.transport.size, self.transport.joined)

    def _end(self) -> None:
        """Ends the step: commits it where all that was submitted is finished, and finite, else
        rolls it back."""
        transaction = self._transaction
        transaction.finite &= not self._open
        with self.held():
            try:
                # Their gradients are to be in residuals, as those of other unfinished steps are.
                for incomplete in self._incomplete():
                    incomplete.begin(self._features).send(None)
            finally:
                for pending in self._steps.values():
                    pending.end(transaction.finite)
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
        for pending in self._incomplete():
            self._begin(pending)
        self._open.pop(name, None)
        self.fail()

    def open_tensors(self) -> Collection[str]:
        return self._open

    def end_step(self) -> None:
        self._refuse_in_step()
        if self._submitted:
            self._end()

    def replace(self, name: str, **options: Any) -> None:
        """Changes options of a tensor's compressor: a momentum that a scheduler has changed."""
        self.end_step()
        tensor = self._tensors[name]
        changed = with_options(tensor.compressor, **options)
        # Tensors of a group have the same one.
        known = next((each for each in self._kins if each == changed), changed)
        if known is changed:
            self._kins[tensor.kin] = changed
        follow(tensor, known)

    def steps_taken(self) -> int:
        return self._now.index

    def totals(self) -> Dict[str, float]:
        sent, received = self.transport.bytes_sent, self.transport.bytes_received
        return {**super().totals(), "bytes_sent": sent, "bytes_received": received}

    def rollback(self) -> None:
        if self._open:
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
