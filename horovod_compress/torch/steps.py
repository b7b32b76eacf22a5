"""Horovod's Compressor interface, `compress` and `decompress`, over the exchange, and the hooks of
Horovod's optimizer around its steps."""

import functools
import itertools
import weakref
from abc import abstractmethod
from typing import Any, Callable, Dict, List, NoReturn, Optional, Tuple

import horovod.torch as hvd
import numpy as np
import torch

from ..binding import warn_once
from ..handshake import agree
from ..loss_scale import to_true_units
from ..snapshot import discard
from ..transport.horovod import sleep_until_over
from . import horovod_internals, ownership
from .binding import TorchBinding
from .lifecycle import CLOSURE, SYNCHRONIZE_FIRST, Event, Lifecycle, State
from .moments import Moments
from .parameters import Slot, Slots, Streams, flat, is_sparse, loses_numbers
from .sgd import SGDTakeover


class StepCompression(TorchBinding):
    """The steps of a compression, from the first gradient that Horovod brings to the optimizer's
    use of the results. How tensors are compressed is decided in `compression`."""

    def __init__(self, process_set: Any, grad_scaler: Any, discardable: bool) -> None:
        super().__init__(process_set)
        # Horovod's optimizer also reduces in a process set of one rank.
        self._active = bool(self._process_set.included()) and (hvd.size() > 1 or self._elastic)
        # Horovod's, once it is known.
        self._optimizer: Optional[torch.optim.Optimizer] = None
        self._grad_scaler = grad_scaler
        self._discardable = bool(discardable or grad_scaler is not None)
        self._step = Lifecycle()
        # All ranks' optimizers, since these ranks are together.
        self._options_agreed = False
        # id(parameter) → learning rate of this step, where residuals follow it.
        self._rates: Dict[int, float] = {}
        # With the version of its gradient, until the first result of the step comes.
        self._submitted: List[Tuple[Slot, torch.Tensor, int]] = []
        # In this step: id(parameter) → the operation of Horovod's that brings the result after its
        # own.
        self._results_after: Dict[int, int] = {}
        self._streams = Streams()
        # Others, of optimizers that have some of the same parameters.
        self._sharing: "weakref.WeakSet[StepCompression]" = weakref.WeakSet()
        # Inside `uneven`: tells ranks that train no more that a step begins.
        self._announce: Optional[Callable[[], None]] = None
        # Numbers of the blocks of `uneven`.
        self._blocks = itertools.count(1)

    _slots: Slots
    _takeover: SGDTakeover
    _moments: Optional[Moments]

    @property
    def _exchange_is_made(self) -> bool:
        return "_exchange" in vars(self)

    @abstractmethod
    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins to serve an optimizer of Horovod's.

        Args:
            optimizer: one that was given this compression.
        """

    @abstractmethod
    def _switch_where_due(self) -> None:
        """Goes on with another compression where that was asked for from this step on."""

    # -- Horovod's interface

    def compress(self, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """Called by Horovod with a parameter's gradient: returns what Horovod is to reduce, and a
        context."""
        if self._optimizer is None:
            self.serve(horovod_internals.optimizer_of(self))
        if not self._exchange.under_way:
            self._begin_step()
        slot = self._find(tensor)
        if self._sharing and (why := ownership.why_shared(self, slot)):
            self._fail(slot, tensor, why)
            # The other's memory stays as it is.
            tensor = tensor.clone()
        exchange = self._exchange
        carries_float64 = exchange.carries_float64(slot.name)
        memory, array = slot.load(tensor, exchange.on_device(slot.name), carries_float64)
        if not self._has_told_of_float32 and loses_numbers(tensor, memory):
            self._tell_of_float32(slot.name)
        squares = self._moments.take(slot.name) if self._moments else None
        carrier = exchange.submit(slot.name, array, squares, self._rates.get(id(slot.param)))
        self._streams.mark(memory)
        sent = (
            memory
            if carrier is array
            else torch.from_numpy(carrier)
            if isinstance(carrier, np.ndarray)
            else carrier.tensor
        )
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
        self._streams.join()
        if self._submitted:
            self._results_after = horovod_internals.results_after(self._optimizer)
            self._look_for_changes()
        # An exception came after Horovod had handed this result over.
        if tensor is None:
            self._fail(slot, grad, f"the step was interrupted while the result of {slot.name} came")
            self._exchange.give_up(slot.name)
            self._end_where_last()
            return grad
        self._exchange.finish(
            slot.name,
            carrier
            if tensor.data_ptr() == sent.data_ptr()
            else flat(tensor, not isinstance(carrier, np.ndarray)),
        )
        # Of a sparse one Horovod copies the result at once.
        if memory is not grad or is_sparse(slot.param.grad):
            self._exchange.settle()
        if memory is not grad:
            grad.copy_(memory)
            if grad.dtype == torch.float16 and not torch.isfinite(grad).all():
                self._exchange.reject()
        if id(slot.param) in self._results_after:
            sleep_until_over(self._results_after[id(slot.param)])
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

    def _find(self, tensor: torch.Tensor) -> Slot:
        return self._slots.find(tensor, self._exchange.open_tensors())

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
        scale = None if self._grad_scaler is None else self._grad_scaler.get_scale()
        optimizer = self._optimizer
        assert optimizer is not None
        if not self._options_agreed:
            self._agree_on_options(optimizer, scale)
        self._leave_unused()
        self._submitted.clear()
        self._switch_where_due()
        if scale is not None:
            self._exchange.expect(scale=to_true_units(scale))
        self._meet()
        if self._compressor.policy.follow_lr:
            self._rates = {
                id(param): float(group["lr"])
                for group in optimizer.param_groups
                for param in group["params"]
            }
        for name, options in self._takeover.changes(optimizer).items():
            self._exchange.replace(name, **options)
        self._step.take(Event.BEGIN)

    def _agree_on_options(self, optimizer: torch.optim.Optimizer, scale: Optional[float]) -> None:
        """Compares what the user can broadcast or load until the first gradient."""
        self._refuse_unsynced(
            "hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)"
        )
        self.handshake()
        agree(
            self._transport,
            f"{self._label}.step",
            {**_options(optimizer), "loss scale": scale},
            advice="Where only some ranks have set or loaded it, call "
            "hvd.broadcast_optimizer_state(optimizer, root_rank=0) before training",
        )
        self._options_agreed = True

    # -- around steps of Horovod's optimizer

    def _register(self, optimizer: torch.optim.Optimizer) -> None:
        """Has the steps of this optimizer of Horovod's come here."""

        # Not compiled with the step: the compiler would take what these change for constant.
        @torch.compiler.disable
        def before(_: Any, args: tuple, kwargs: Dict[str, Any]) -> Any:
            return self._before_step(optimizer, args, kwargs)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(torch.compiler.disable(lambda *_: self._after_step()))

    def _before_step(self, optimizer: Any, args: tuple, kwargs: Dict[str, Any]) -> Optional[tuple]:
        """Before a step of Horovod's optimizer, and again before that of the optimizer which it
        extends. Returns other (args, kwargs) for it where it is given a closure: the gradients that
        it uses are there after that."""
        event = Event.SCALED_STEP if horovod_internals.in_grad_scaler() else Event.STEP
        self._step.expect(event)
        under_way = self._exchange_is_made and self._exchange.under_way
        first = horovod_internals.first_result(optimizer) if under_way else None
        if first is not None:
            sleep_until_over(first)
        closure = horovod_internals.closure_of(args, kwargs)
        if closure is not None:
            closure = functools.partial(self._in_closure, optimizer, closure)
            return horovod_internals.with_closure(args, kwargs, closure)
        skips = not horovod_internals.synchronizes(optimizer)
        if skips and horovod_internals.has_unreduced_gradients(optimizer):
            self._refuse_step(optimizer, f"a step came before its results: {SYNCHRONIZE_FIRST}")
        self._use_results(optimizer, event)
        return None

    def _in_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
        """A step's closure, and then what comes before a step without one. RuntimeError where its
        gradients are not reduced."""
        with self._step.closure():
            loss = closure()
        if horovod_internals.has_unreduced_gradients(optimizer):
            why = "the step uses them before Horovod has reduced them"
            self._refuse_step(optimizer, CLOSURE.format(what=why))
        self._use_results(optimizer, Event.STEP)
        return loss

    def _refuse_step(self, optimizer: Any, why: str) -> NoReturn:
        """Brings what is under way to its end, for other ranks wait, and raises RuntimeError."""
        self._leave_unused()
        self._step.fail(why)
        optimizer.synchronize()
        # Only sparse gradients were under way, which Horovod reduces by itself.
        raise self._step.failure()

    def _use_results(self, optimizer: torch.optim.Optimizer, event: Event) -> None:
        """Prepares the results that are there, if any, for the optimizer to use."""
        if not self._step.take(event):
            return
        keeps = self._grad_scaler is None and self._exchange.keeps_state
        if keeps and event is Event.SCALED_STEP:
            warn_once(
                "a GradScaler scales these gradients: give the compression grad_scaler=…, or "
                "what it keeps does not follow the scale"
            )
        ownership.warn_of_unreduced(optimizer, self._slots)
        self._takeover.before_step(optimizer)

    def _after_step(self) -> None:
        self._step.take(Event.STEP_ENDED)
        self._takeover.restore()

    def _leave_unused(self) -> None:
        """Discards a step whose results no optimizer.step() has used, or commits it and warns that
        its effects stay."""
        if not self._step.is_unused:
            return
        keeps = self._exchange.succeeded and self._exchange.keeps_state
        if keeps and not self._discardable:
            self._step.take(Event.COMMIT)
            warn_once(
                "the gradients of a step were exchanged, and no optimizer.step() has used them; "
                "what was not sent of them is kept, and "
                "comes in later steps. To forget such steps, make the compression with "
                "discardable=True"
            )
        else:
            if self._exchange.succeeded and self._discardable:
                discard(self._exchange)
            self._step.take(Event.ROLLBACK)

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
        self._exchange.reject()
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


def _options(optimizer: torch.optim.Optimizer) -> Dict[str, Dict[str, Any]]:
    """The options of an optimizer's groups that are plain values: what all ranks must have
    alike."""
    groups = {}
    for i, group in enumerate(optimizer.param_groups):
        plain = {
            k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v
            for k, v in group.items()
        }
        groups[f"parameter group {i}"] = {
            k: v for k, v in plain.items() if isinstance(v, (bool, int, float, str))
        }
    return groups
