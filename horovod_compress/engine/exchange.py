"""Drives the steps of one compression on one rank, one after the other.

Of each tensor the reducer (Horovod's optimizer, DDP, or `simulate`) takes a carrier, sums or
averages it over ranks as its user asked, and brings it back. A dense payload is its own carrier.
Any other payload travels with those of its group beside a carrier that holds a single 1: what came
back, divided by the number of ranks, is the factor for the sum of the payloads, whatever the
reducer's op, scale factors or predivision are.
"""

import dataclasses
import time
from typing import Any, Collection, Dict, Iterator, Optional, Tuple

import numpy as np

from ..compressors.base import Compressor
from ..protocol.machine import Machine
from ..transport.base import Transport
from . import checkpoint
from .driver import Driver, Transaction
from .features import Features
from .group import Group, form
from .open_step import OpenStep
from .pending import DONE, FAILED, CarriedStep

_CARRIER = 4  # bytes of a single 1


class Exchange(Driver):
    """Drives steps eagerly. A group's collectives start when its last tensor has come, and are
    waited for when the reducer returns the first carrier of the group.

    compressor: the configuration that is in force; tensors: {name: (shape, compressor)}, the
    compressor being this one or a variant (other momentum for another parameter group), in an order
    that is alike on all ranks. Every tensor of a step is submitted before the first is finished; a
    step ends when all that was submitted is finished. dense_alone: as of `Features`; others: as in
    Driver.
    """

    def __init__(
        self,
        compressor: Compressor,
        transport: Transport,
        tensors: Dict[str, Tuple[tuple, Compressor]],
        dense_alone: bool = False,
        machine: Optional[Machine] = None,
    ) -> None:
        rank, size = transport.rank, transport.size
        super().__init__(compressor, rank, size, Features(dense_alone), machine)
        self.transport = transport
        for name, (shape, variant) in tensors.items():
            self.tensors.add(name, shape, variant, size)
        self._joint_lengths = transport.frame_length(), transport.frame_length()
        # Whether an optimizer's momentum may begin while training.
        self.follows_momentum = False
        # By name; none until the first gradient says where they are.
        self._group_of: Dict[str, Group] = {}
        self._begin_at(0)

    def _begin_at(self, index: int) -> None:
        self.expect(index=index, rank=self.transport.rank, size=self.transport.size)
        # Of which nothing has come yet.
        self._step = OpenStep(self.features, self._joint_lengths)

    def switch(self, *arguments: Any, **named: Any) -> None:
        earlier = self.transport
        super().switch(*arguments, **named)
        self._group_of = {}
        if self.transport is not earlier:
            # One that comes back has its own bytes among those of the earlier one.
            self.transport.bytes_sent = earlier.bytes_sent
            self.transport.bytes_received = earlier.bytes_received

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
        if self._step.submitted and (not self._step.open or name in self._step.submitted):
            self._end()
        tensor = self.tensors.known(name, grad)
        if not self._group_of:
            # On a device gradients are on all ranks, or on none.
            carries, on_device = self.now.clip_norm is None, type(grad) is not np.ndarray
            groups = form(self.tensors, carries, self.transport.frame_length, on_device)
            self._group_of = {its.name: group for group in groups for its in group.tensors}
        open_step, step = self._step, self.now
        if not open_step.submitted:
            open_step.begin(step, self.label, self.transport)
        if not (squares is None and lr is None and base is None):
            step = dataclasses.replace(step, squares=squares, lr=lr, base=base)
        group = self._group_of[name]
        if group not in open_step.groups:
            open_step.begin_group(group)
        if name in open_step.alone:
            group, step = open_step.group_alone(tensor), dataclasses.replace(step, dense=True)
        elif group.carried and step is not self.now:
            group = open_step.group_alone(tensor)
        pending = open_step.groups.get(group) or open_step.begin_tensors(group, [tensor], step)
        self.latest = open_step.transaction
        self.latest.tensors.append(tensor)
        open_step.submitted[name] = open_step.open[name] = pending
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
            open_step.begin_full(pending)
        return tensor.carrier

    def flush(self, factor: float = 1.0) -> None:
        """Takes every group to its last exchange, and starts that; `finish` does so by itself.
        factor: what the reducer makes of a 1 on each rank: 1 where it averages, the number of ranks
        where it sums; clipping limits what comes out."""
        for _ in self.rounds(factor):
            pass

    def rounds(self, factor: float = 1.0) -> Iterator[None]:
        """`flush` by rounds, for a driver of several ranks: yields when it has started something,
        before it waits for it."""
        return self._step.rounds(factor)

    def finish(self, name: str, reduced: np.ndarray, now: bool = True) -> None:
        """Decodes results into the gradients that were submitted. All of a group that was gathered
        or summed are there after the first call for one of its tensors; all of a group of carriers
        after the last call, or with `now` each after its own. reduced: the carrier as the reducer
        brought it back. A result that is not finite on some rank is not finite on all of them."""
        step = self._step
        pending = step.open.get(name)
        if pending is None or pending.stage is FAILED:
            raise RuntimeError(f"{name}: its step has failed before: submit it again")
        if isinstance(pending, CarriedStep):
            pending.arrived[pending.reducing.pop(name)] = reduced
            if now or not pending.reducing:
                started = time.perf_counter()
                pending.decode(step.transaction.note)
                first = pending.group.tensors[0]
                first.counters["decode_seconds"] += time.perf_counter() - started
        elif pending.stage is not DONE:
            step.finish_group(pending, float(reduced[0]))
        del step.open[name]

    def _end(self) -> None:
        """Ends the step, and begins the next one."""
        step = self._step
        with self.held():
            try:
                step.end()
            finally:
                self._count_step(step.transaction)
                self._begin_at(self.now.index + 1)
        for feature in self.features.values():
            feature.step_ended()

    def fail(self) -> None:
        """Marks this step as failed, on all ranks alike: the reducer could not use a result. It is
        rolled back when it ends."""
        self._step.transaction.fail()

    def fail_tensor(self, name: str) -> None:
        """In place of a `finish` that was interrupted: the step will be rolled back."""
        self._step.fail(name)

    def open_tensors(self) -> Collection[str]:
        return self._step.open

    def end_step(self) -> None:
        self._refuse_in_step()
        if self._step.submitted:
            self._end()

    def steps_taken(self) -> int:
        return self.now.index

    def totals(self) -> Dict[str, float]:
        sent, received = self.transport.bytes_sent, self.transport.bytes_received
        return {**super().totals(), "bytes_sent": sent, "bytes_received": received}

    def rollback(self) -> None:
        if self._step.open:
            self._end()

    def _continue_from(self, saved: checkpoint.Saved) -> None:
        self.arrays()
        tensors, arrays = self.tensors, saved.arrays
        if self.follows_momentum:
            arrays = checkpoint.with_momentum(tensors, arrays)
        checkpoint.restore(tensors, arrays)
        for tensor in tensors:
            tensor.dense_until = saved.header["dense_until"].get(tensor.name, 0)
            tensor.state.factor = saved.header["factors"].get(tensor.name, tensor.state.factor)
        self._begin_at(saved.header["step"])
        self.latest = Transaction()
