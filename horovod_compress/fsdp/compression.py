"""An exchange between replicas of shards, when a backward pass has ended."""

import functools
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch
from torch import nn

from ..engine.names import bare_name
from ..protocol.handshake import agree
from ..session.step_lifecycle import Event
from ..torch_common import shards
from ..torch_common.backward import at_end, in_backward
from ..torch_common.parameters import NamedParameters, Slot, checksum
from ..torch_common.search import has_others
from ..torch_common.shards import any_not_zero
from ..torch_common.steps import bring_means
from ..torch_distributed.checks import OTHER_OPTIMIZER
from ..torch_distributed.compression import GroupCompression
from .checks import refuse_hooks
from .internals import Unit
from .ranks import ReplicaRanks

_PASSES = (
    "backward_passes_per_step=n of fsdp.compress, or model.set_requires_gradient_sync(False) "
    "before all passes but the last"
)
_ADDS_UP = (
    "gradients of several backward passes add up, and each pass was exchanged: a momentum would "
    f"count in each, and a step that is discarded be the last of them. Announce them, by {_PASSES}"
)
_UNREDUCED = (
    "optimizer.step() would use gradients that replicas have not exchanged. {passes} of {every} "
    "backward passes have ended since the last exchange; those that failed, and those announced as "
    "not the last (set_requires_all_reduce, set_is_last_backward), do not count. After a failure "
    "call model.reset_iter_state() and optimizer.zero_grad(), on all ranks"
)
_SAME_START = (
    "FSDP broadcasts nothing between replicas: seed all ranks alike, or load one checkpoint, "
    "before the first backward pass. And replicate_group must be the ranks that keep the same "
    "shard on other hosts, mesh['replicate']"
)


class _Sent(NamedTuple):
    """A gradient that is under way. grad: this rank's part; memory: where the result will be."""

    slot: Slot
    grad: torch.Tensor
    memory: torch.Tensor
    carrier: Any


class FSDPCompression(GroupCompression):
    """A compression of the gradients that replicas of a model exchange, as `compress` makes it.

    Its residuals are this rank's own: save `state_dict()` on every rank, or with portable=True one
    of DTensors, for torch.distributed.checkpoint, which serves other numbers of replicas and
    shards.

    Args:
        spec: as of `compress`, or what a trial is asked for.
        model: as of `compress`.
        optimizer: as of `compress`, without wrappers.
        units: of the model.
        pairs: the trained parameters by name.
        ranks: the replicas.
        passes: backward passes of a step.
        grad_scaler: as of `compress`.
        discardable: as of `compress`.
    """

    def __init__(
        self,
        spec: Any,
        model: nn.Module,
        optimizer: Optional[torch.optim.Optimizer],
        units: List[Unit],
        pairs: NamedParameters,
        ranks: ReplicaRanks,
        passes: int,
        grad_scaler: Any,
        discardable: bool,
    ) -> None:
        super().__init__(ranks, spec, optimizer, pairs, grad_scaler, discardable)
        self._model, self._units, self._every = model, units, passes
        # Whether replicas have compared their parameters.
        self._compared = False
        # Backward passes since the last exchange that have ended.
        self._passes = 0
        # Whether gradients came since that replicas do not share.
        self._unreduced = False
        # Whether gradients may be results of the last exchange, and those that are, by name, while
        # others come.
        self._reduced = False
        self._aside: Dict[str, torch.Tensor] = {}
        # What `_versions` were when the last pass ended.
        self._left: List[Optional[int]] = []
        # Whether a backward pass goes on, and whether that was announced as not the last.
        self._goes_on: Callable[[], bool] = bool
        self._waits = True
        if ranks.active:
            for unit in units:
                unit.set_hook(self._came)
            if optimizer is not None:
                self._steps.register(optimizer, self)

    # -- around steps of the optimizer

    def before_use(self, optimizer: Any, in_closure: bool) -> None:
        if self._unreduced:
            raise RuntimeError(_UNREDUCED.format(passes=self._passes, every=self._every))

    def before_unused(self) -> None:
        session, steps = self._session, self._steps
        if self._steps.was_skipped() or not session.exchange.succeeded:
            return
        if any_not_zero(self._aside.values()):
            # They are added up, and used in the end.
            session.lifecycle.take(Event.COMMIT)
        elif self._counts_once and has_others(self._model, steps.bound_optimizer):
            entry, renew = "fsdp.compress", "make a new model"
            raise RuntimeError(OTHER_OPTIMIZER.format(entry=entry, renew=renew))

    @property
    def _counts_once(self) -> bool:
        """True where results of several exchanges do not add up to those of one."""
        return bool(self._session.discardable or self._session.compressor.policy.m)

    # -- FSDP's interface

    def _came(self, unit: Unit) -> None:
        """Comes in backward passes with each unit, before its gradients are in `param.grad`."""
        if not in_backward():
            raise RuntimeError(
                "FSDP reduces gradients outside of a backward pass, as in pipelines: compress "
                "updates by fsdp.UpdateOptimizer in place of gradients"
            )
        self._unreduced = True
        if not self._goes_on():
            there = [slot for slot in self._steps.slots if slot.param.grad is not None]
            if self._reduced:
                self._reduced = False
                for slot in there:
                    self._aside[slot.name], slot.param.grad = slot.param.grad, None
            # Not because they are zero: those of a pass may be, on this rank alone. And looking
            # waits for a device.
            elif not there or (
                self._versions() != self._left
                and not any_not_zero(slot.param.grad for slot in there)
            ):
                # Users have begun anew, as after a pass that has failed.
                self._passes = 0
                self._aside.clear()
            self._waits, self._goes_on = True, at_end(self._end_pass)
        self._waits = self._waits and unit.waits

    def _versions(self) -> List[Optional[int]]:
        """Numbers that change where users write into gradients; FSDP writes into their shards."""
        grads = (slot.param.grad for slot in self._steps.slots)
        return [None if grad is None else grad._version for grad in grads]

    @torch.no_grad()
    def _end_pass(self, again: bool = False) -> None:
        self._goes_on, self._left = bool, self._versions()
        if self._waits:
            return
        if any(unit.in_backward for unit in self._units):
            if not again:
                # After what FSDP has to do for parts that are in no other part.
                self._goes_on = at_end(functools.partial(self._end_pass, True))
                return
            raise RuntimeError(
                "gradients came in a backward pass within another one, as of activation "
                "checkpointing with use_reentrant=True: give it use_reentrant=False"
            )
        self._passes += 1
        if self._passes >= self._every:
            self._exchange()

    def _exchange(self) -> None:
        """Brings the means over replicas of all gradients."""
        known = {id(slot.param) for slot in self._steps.slots}
        new = {id(p) for unit in self._units for p in unit.params if p.grad is not None} - known
        if new:
            name = next(name for name, p in self._model.named_parameters() if id(p) in new)
            raise ValueError(
                f"a gradient came of {bare_name(name)}, which was frozen, or not there, when the "
                "compression was made: make it after the model is as it will be trained, and after "
                "load_state_dict(assign=True)"
            )
        if self._counts_once and any_not_zero(self._aside.values()):
            raise RuntimeError(_ADDS_UP)
        self._drop_interrupted()
        self._compare()
        self._steps.begin()
        exchange = self._session.exchange
        exchange.end_step()
        with exchange.held():
            here = [slot.param.grad is not None for slot in self._steps.slots]
            sent = [self._submit(slot) for slot in self._used_by_any(here)]
            self._steps.streams.join()
            bring_means(exchange, self._ranks, {each.slot.name: each.carrier for each in sent})
        self._hand_over(sent)
        self._session.lifecycle.take(Event.ARRIVE)
        if self._steps.optimizer is None:
            self._session.lifecycle.take(Event.COMMIT)

    def _compare(self) -> None:
        """MismatchError where replicas have not begun alike."""
        if self._compared:
            return
        refuse_hooks((slot.name, slot.param) for slot in self._steps.slots)
        its = {
            slot.name: {**shards.place_of(slot.param), "values": checksum(shards.local(slot.param))}
            for slot in self._steps.slots
        }
        ranks = self._ranks
        agree(ranks.beside, f"{ranks.label()}.parameters", its, advice=_SAME_START)
        self._compared = True

    def _submit(self, slot: Slot) -> _Sent:
        param: Any = slot.param
        if param.grad is None:
            # Of this replica, which has not reached it.
            param.grad = shards.like(torch.zeros_like(shards.local(param)), param)
        grad = shards.local(param.grad)
        memory, _, carrier = self._steps.submit(slot, grad)
        return _Sent(slot, grad, memory, carrier)

    def _hand_over(self, sent: List[_Sent]) -> None:
        """Leaves results in gradients."""
        steps = self._steps
        skipped = steps.must_be_skipped()
        sums = {id(param) for unit in self._units if unit.adds_up for param in unit.params}
        for each in sent:
            if each.memory is not each.grad:
                steps.copy_result(each.memory, each.grad)
            if id(each.slot.param) in sums:
                each.grad.mul_(self._ranks.beside.size)
            if skipped:
                each.grad.fill_(float("nan"))
        steps.note_results((each.slot, each.grad) for each in sent)
        for slot in steps.slots:
            earlier = self._aside.pop(slot.name, None)
            if earlier is not None and slot.param.grad is not None:
                shards.local(slot.param.grad).add_(shards.local(earlier))
            elif earlier is not None:
                slot.param.grad = earlier
        self._reduced, self._unreduced, self._passes = True, False, 0
