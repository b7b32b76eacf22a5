"""Horovod's Compressor interface, `compress` and `decompress`, over the exchange, and the hooks of
Horovod's optimizer around its steps."""

import itertools
import weakref
from abc import abstractmethod
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import horovod.torch as hvd
import numpy as np
import torch

from ..pytorch.compression import OptimizerCompression
from ..pytorch.lifecycle import CLOSURE, SYNCHRONIZE_FIRST, Event, State
from ..pytorch.optimizers import in_grad_scaler
from ..pytorch.parameters import Slot, flat, is_sparse
from ..transport.horovod import sleep_until_over
from . import horovod_internals, ownership
from .binding import TorchBinding


class StepCompression(OptimizerCompression, TorchBinding):
    """The steps of a compression, from the first gradient that Horovod brings to the optimizer's
    use of the results. How tensors are compressed is decided in `compression`."""

    def __init__(self, process_set: Any, grad_scaler: Any, discardable: bool) -> None:
        TorchBinding.__init__(self, process_set)
        OptimizerCompression.__init__(self, grad_scaler, discardable)
        # Horovod's optimizer also reduces in a process set of one rank.
        self._active = bool(self._process_set.included()) and (hvd.size() > 1 or self._elastic)
        # With the version of its gradient, until the first result of the step comes.
        self._submitted: List[Tuple[Slot, torch.Tensor, int]] = []
        # In this step: id(parameter) → the operation of Horovod's that brings the result after its
        # own.
        self._results_after: Dict[int, int] = {}
        # Others, of optimizers that have some of the same parameters.
        self._sharing: Set["weakref.ref[StepCompression]"] = set()
        # Inside `uneven`: tells ranks that train no more that a step begins.
        self._announce: Optional[Callable[[], None]] = None
        # Numbers of the blocks of `uneven`.
        self._blocks = itertools.count(1)

    _advice_on_options = (
        "Where only some ranks have set or loaded it, call "
        "hvd.broadcast_optimizer_state(optimizer, root_rank=0) before training"
    )

    @abstractmethod
    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins to serve an optimizer of Horovod's.

        Args:
            optimizer: one that was given this compression.
        """

    # -- Horovod's interface

    def compress(self, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """Called by Horovod with a parameter's gradient: returns what Horovod is to reduce, and a
        context."""
        if self._optimizer is None:
            self.serve(horovod_internals.optimizer_of(self))
        submitted = self._exchange.open_tensors()
        if not submitted:
            self._begin_step()
        slot = self._slots.find(tensor, horovod_internals.parameter_under_way)
        if self._sharing and (why := ownership.why_shared(self, slot)):
            self._fail(slot, tensor, why)
            # The other's memory stays as it is.
            tensor = tensor.clone()
        memory, array, carrier = self._submit(slot, tensor)
        sent = memory if carrier is array else slot.tensor_of(carrier)
        grad = slot.param.grad
        assert grad is not None  # `find` has seen it.
        self._submitted.append((slot, tensor, grad._version))
        return sent, (slot, tensor, memory, sent, carrier)

    # A compiled step is left here, and entered again behind it.
    @torch.compiler.disable
    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Called by Horovod with what it reduced: returns the gradient, in its own memory, holding
        the result."""
        # Horovod brings sparse gradients, which it reduces by itself, without a call of compress.
        if ctx is None:
            if any(
                self._takeover.covers(slot.param) and is_sparse(slot.param.grad)
                for slot in self._slots
            ):
                raise ValueError(
                    f"{self._compressor.id} has taken over the optimizer's momentum, which a "
                    f"sparse gradient cannot have: "
                    "give hvd.DistributedOptimizer(sparse_as_dense=True), or bind with momentum=0"
                )
            if self._in_uneven:
                raise ValueError(
                    "ranks without data cannot answer sparse gradients: give "
                    "hvd.DistributedOptimizer(sparse_as_dense=True)"
                )
            return tensor
        slot, grad, memory, sent, carrier = ctx
        if self._submitted:
            self._streams.join()
            self._results_after = horovod_internals.results_after(self._optimizer)
            self._look_for_changes()
        # An exception came after Horovod had handed this result over.
        if tensor is None:
            self._fail(slot, grad, f"the step was interrupted while the result of {slot.name} came")
            self._exchange.fail_tensor(slot.name)
            self._end_where_last()
            return grad
        self._exchange.finish(
            slot.name,
            carrier
            if tensor is sent or tensor.data_ptr() == sent.data_ptr()
            else flat(tensor, not isinstance(carrier, np.ndarray)),
        )
        # Of a sparse one Horovod copies the result at once.
        if memory is not grad or is_sparse(slot.param.grad):
            self._exchange.settle()
        if memory is not grad:
            self._copy_result(memory, grad)
        if id(slot.param) in self._results_after:
            sleep_until_over(self._results_after[id(slot.param)])
        if not self._exchange.open_tensors():
            self._end_where_last()
        return grad

    def _look_for_changes(self) -> None:
        """Fails the step where the user has changed a gradient of it. When its first result comes,
        because then Horovod begins to write results, and gradients may be views of one tensor,
        which share their version."""
        for slot, grad, version in self._submitted:
            if slot.param.grad is None or slot.param.grad._version != version:
                why = f"the gradient of {slot.name} was changed while it was exchanged"
                hint = "(Or another of Horovod's optimizers has this parameter: give it to one)"
                self._fail(slot, grad, f"{why}: {SYNCHRONIZE_FIRST} {hint}")
        self._submitted.clear()

    def _begin_step(self) -> None:
        rank, size = self._process_set.rank(), self._process_set.size()
        if (rank, size) != self._ranks:
            if not self._elastic:
                raise RuntimeError(
                    f"this compression was made for rank {self._ranks[0]} of {self._ranks[1]}, and "
                    f"this is now rank {rank} of {size}: the ranks of "
                    "a compression must stay the same. Make a new one after hvd.init()"
                )
            # Ranks have left, and those that stay are not asked to synchronize.
            self._resize()
        if self._announce is not None:
            self._announce()
        # Not where the optimizer is found: a state that is loaded then replaces what was handed
        # over.
        self._exchange.handover.check_host(horovod_internals.factor_of(self._optimizer))
        self._submitted.clear()
        super()._begin_step()

    def _agree_on_options(self, scale: Optional[float]) -> None:
        self._refuse_unsynced(
            "hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)"
        )
        super()._agree_on_options(scale)

    # -- around steps of Horovod's optimizer

    def _before_use(self, optimizer: torch.optim.Optimizer) -> None:
        ownership.warn_of_unreduced(optimizer, self._slots)
        super()._before_use(optimizer)

    def _before_step(self, optimizer: Any, args: tuple, kwargs: Dict[str, Any]) -> Optional[tuple]:
        # Comes again before the step of the optimizer which Horovod's extends.
        if in_grad_scaler():
            self._step.expect(Event.SCALED_STEP)
        under_way = self._exchange_is_made and self._exchange.under_way
        first = horovod_internals.first_result(optimizer) if under_way else None
        if first is not None:
            sleep_until_over(first)
        return super()._before_step(optimizer, args, kwargs)

    def _refuse_unreduced(self, optimizer: Any, in_closure: bool) -> None:
        """Brings what is under way to its end before, for other ranks wait."""
        # Else Horovod brings results at the beginning of its step.
        skips = in_closure or not horovod_internals.synchronizes(optimizer)
        if not (skips and horovod_internals.has_unreduced_gradients(optimizer)):
            return
        why = f"a step came before its results: {SYNCHRONIZE_FIRST}"
        if in_closure:
            why = CLOSURE.format(what="the step uses them before Horovod has reduced them")
        self._leave_unused()
        self._step.fail(why)
        optimizer.synchronize()
        # Only sparse gradients were under way, which Horovod reduces by itself.
        raise self._step.failure()

    def _fail(self, slot: Slot, grad: torch.Tensor, why: str) -> None:
        """Notes that a result cannot be used, and so the step cannot."""
        self._step.fail(why)
        slot.param.grad = grad  # Horovod puts results there.

    def _end_where_last(self) -> None:
        """After a result. RuntimeError where that was the last one of a step that has failed."""
        if self._exchange.under_way:
            return
        if self._step.state is not State.FAILED:
            self._step.take(Event.ARRIVE)
            return
        self._exchange.fail()
        if self._optimizer is not None:
            horovod_internals.rollback_step(self._optimizer)
        raise self._step.failure()

    # -- for ranks with different numbers of steps: see `uneven.py`

    @property
    def _in_uneven(self) -> bool:
        return self._announce is not None

    def _enter_uneven(self, announce: Callable[[], None]) -> None:
        """From now on announces each step to ranks that train no more."""
        self._announce = announce

    def _leave_uneven(self) -> None:
        self._announce = None

    def _commit(self) -> None:
        """Counts the last step as used, although no optimizer.step() follows."""
        self._step.take(Event.COMMIT)

    def _is_discarded(self) -> bool:
        """Whether the last step is discarded on all ranks, now or when the next one begins."""
        return self._discardable and (self._step.is_unused or not self._exchange.succeeded)

    def _drop_moments(self) -> None:
        """Forgets the squares of backward passes that no step followed."""
        if self._moments:
            for slot in self._slots:
                self._moments.take(slot.name)
