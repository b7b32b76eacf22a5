"""The steps of an optimizer whose gradients are exchanged, from the first gradient to the use of
the results, whoever hands gradients over."""

import contextlib
import logging
import weakref
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Protocol, Tuple

import torch

from ..compressors import get_compressor
from ..compressors.base import NO_RATE
from ..engine.exchange import Exchange
from ..engine.loss_scale import to_true_units
from ..kernels.landing import landing
from ..protocol.handshake import agree
from ..session.auto import Auto, Controller, default_candidates, refuse_begun_within_step
from ..session.choice import Choice, requested_compressor
from ..session.notices import warn_once
from ..session.port import Port
from ..session.ranks import Ranks, is_elastic
from ..session.session import Session
from ..session.step_lifecycle import Event, State
from . import shards
from .moments import Moments, moments_of
from .optimizers import closure_of, in_grad_scaler, skips, with_closure
from .parameters import NamedParameters, Slot, Slots, Streams, places_of, tensor_of
from .state_names import renamed
from .takeover import SGDTakeover, can_take_over, is_plain_sgd, warn_of_changed

_log = logging.getLogger("horovod_compress")


class Host(Protocol):
    """The part that whoever hands gradients over has in an optimizer's steps."""

    # What to do where ranks' optimizers differ.
    advice_on_options: str

    def reduced(self, steps: "Steps") -> List[Slot]:
        """The parameters whose gradients come, of those that have a slot, where ranks exchange."""

    def factor(self) -> Optional[float]:
        """As of `Port`."""

    def look_for_optimizer(self) -> None:
        """As of `Port`."""

    def before_step(self, optimizer: Any) -> None:
        """Comes before each step of an optimizer, also before one with a closure."""

    def before_use(self, optimizer: Any, in_closure: bool) -> None:
        """Comes where a step begins without closure, or goes on after it, and uses results where
        they are there. RuntimeError where it would use gradients of one rank alone."""

    def before_unused(self) -> None:
        """Comes where a step begins and no optimizer has used the results of the last one."""


class _Held(NamedTuple):
    """The objects that serve a choice. takeover: of an SGD's momentum; moments: of samples."""

    takeover: SGDTakeover
    moments: Optional[Moments]


class Steps(Port):
    """The steps of one optimizer on this rank.

    Args:
        host: who hands gradients over.
        ranks: those that share the compression.
        spec: as for `horovod_compress.get_compressor`, or an `Auto`.
        optimizer: the one whose momentum may be taken over.
        pairs: the named parameters.
        grad_scaler: the one that scales the loss.
        discardable: True where steps can be forgotten.

    Attributes:
        session: the compression's dealings with its ranks.
        slots: the parameters.
        hooks: those around the optimizer's steps; `close()` removes them.
        optimizer: the one that uses the results, once it is known.
        takeover, moments: as of the choice in force.
        streams: those of a GPU that gradients were encoded on.
        scale: the loss scale of the last step, where there is a GradScaler.
        options_agreed: True since ranks that are together have compared their optimizers.
    """

    def __init__(
        self,
        host: Host,
        ranks: Ranks,
        spec: Any,
        optimizer: Optional[torch.optim.Optimizer],
        pairs: NamedParameters,
        grad_scaler: Any,
        discardable: bool,
    ) -> None:
        # Weak, because the host has these steps.
        self._host, self._ranks = weakref.proxy(host), ranks
        self.slots, self.bound_optimizer, self.grad_scaler = Slots(pairs), optimizer, grad_scaler
        self._params = {slot.name: slot.param for slot in self.slots}
        self.optimizer: Optional[torch.optim.Optimizer] = None
        self.takeover = SGDTakeover(None, None, {})
        self.moments: Optional[Moments] = None
        self.streams = Streams()
        self.scale: Optional[float] = None
        self.options_agreed = False
        self.hooks = contextlib.ExitStack()
        # What users were told last of an SGD's takeover.
        self._announced: Optional[str] = None
        # Of the smallest parameter whose momentum is taken over: its last result.
        self._result: Optional[Tuple[torch.Tensor, torch.Tensor]] = None
        # What could not be looked for without waiting for a device.
        self._to_look_for: List[Callable[[], None]] = []
        # id(parameter) → learning rate of this step, where it is 0 or residuals follow it.
        self._rates: Dict[int, float] = {}
        specs = self._candidates(spec) if isinstance(spec, Auto) else [spec]
        discardable = bool(discardable or grad_scaler is not None)
        # A trial begins with the last one.
        self.session = Session(ranks, self, specs[-1], discardable)
        if isinstance(spec, Auto):
            for each in specs:
                # What cannot be is refused now, not when its turn comes.
                self.session.choose(each)
            self.session.trial = Controller(self.session, specs, spec)

    def _candidates(self, auto: Auto) -> List[str]:
        if is_elastic():
            raise ValueError(
                "in an elastic job ranks that join would not know what was chosen: let auto() "
                "choose in a job of constant size, and use plan['spec']"
            )
        is_sgd = isinstance(self.bound_optimizer, torch.optim.SGD)
        takes_over = can_take_over(self.bound_optimizer)
        return list(auto.candidates or default_candidates(is_sgd=is_sgd, takes_over=takes_over))

    # -- for the session

    @property
    def _stepping(self) -> Optional[torch.optim.Optimizer]:
        """The bound optimizer, or the one around it, which has parameter groups of its own once it
        has loaded a state. None where none was bound."""
        return self.bound_optimizer and (self.optimizer or self.bound_optimizer)

    def choose(self, spec: Any) -> Choice:
        """As of `Port`, with the bound optimizer's momentum."""
        optimizer, active = self._stepping, self._ranks.active
        reduced = self._host.reduced(self) if active else []
        compressor = requested = requested_compressor(spec, optimizer, is_plain_sgd(optimizer))
        names = {id(slot.param): slot.name for slot in reduced}
        takeover = SGDTakeover(optimizer if active else None, compressor, names)
        variants = takeover.variants
        if (
            compressor.traits.corrects_momentum
            and optimizer is not None
            and compressor.momentum is None
        ):
            # Other momentum stays with the optimizer.
            compressor = compressor.bound(0.0, bool(compressor.nesterov and not variants))
        moments = moments_of(compressor, {slot.name: slot.param for slot in reduced})
        tensors = {slot.name: (slot.shape, variants.get(slot.name, compressor)) for slot in reduced}
        described = {
            slot.name: {
                "shape": list(slot.param.shape),
                **shards.place_of(slot.param),
                "compressor": repr(tensors[slot.name][1]),
            }
            for slot in reduced
        }
        chosen = next(iter(variants.values()), compressor)
        places = places_of(self._ranks, [slot.param for slot in reduced], chosen)
        return Choice(
            requested,
            chosen,
            tensors,
            {"tensors": described, **places},
            _Held(takeover, moments),
            takeover.follows,
        )

    def gains(self, choice: Choice) -> Dict[str, float]:
        return choice.held.takeover.gains(self._stepping)

    def use(self, choice: Choice) -> None:
        if self.takeover is not choice.held.takeover:
            self.takeover.give_back(self._stepping)
        self.takeover, self.moments = choice.held
        said = self.takeover.announcement
        if said not in (None, self._announced) and self._ranks.rank_and_size()[0] == 0:
            self._announced = said
            _log.warning("%s", said)

    def look_for_optimizer(self) -> None:
        self._host.look_for_optimizer()

    def before_switch(self) -> None:
        self.leave_unused()
        self._host.look_for_optimizer()
        self.takeover.restore()

    def switch(self, spec: Any, at: Optional[int]) -> None:
        """As of `Bound`; with `at` from that step on, counted from 0 since training began. auto()
        takes it for its choice, and tries nothing any more."""
        session, compressor = self.session, get_compressor(spec)
        if session.trial is not None and (not isinstance(spec, str) or at is not None):
            raise ValueError(
                "auto() keeps specs as text, and changes them itself: say "
                "switch('dgc:ratio=0.01'), without at"
            )
        if at is not None:
            if isinstance(at, bool) or not isinstance(at, int) or at < 0:
                raise ValueError(f"at must be a step, counted from 0, not {at!r}")
            refuse_begun_within_step(compressor)
            later = [*session.switches, (at, compressor.config)]
            session.switches = sorted(later, key=lambda switch: switch[0])
            return
        session.switch(compressor)
        if session.trial is not None:
            session.trial.resume(spec, True)

    def factor(self) -> Optional[float]:
        return self._host.factor()

    def as_here(self, state: Any) -> Any:
        tensors = self.session.choice.tensors
        state = renamed(state, tensors, {slot.name for slot in self.slots} - tensors.keys())
        here = self.session.exchange.tensors
        return shards.as_here(state, self._params, here, self._ranks.refused_alone)

    def as_saved(self, state: Dict[str, Any]) -> Dict[str, Any]:
        return shards.as_saved(state, self._params, self.session.exchange.tensors)

    # -- of a step

    def begin(self) -> None:
        """Begins a step: compares optimizers once, brings an unused step to its end, takes switches
        that are due, and notes rates and momentum. Before the first gradient."""
        session, ranks, scaler = self.session, self._ranks, self.grad_scaler
        scale = None if scaler is None else scaler.get_scale()
        if not self.options_agreed:
            # What the user can broadcast or load until the first gradient.
            session.handshake()
            agree(
                ranks.transport,
                f"{ranks.label()}.step",
                {**_options(self.optimizer), "loss scale": scale},
                advice=self._host.advice_on_options,
            )
            self.options_agreed = True
        self._look()
        self.leave_unused()
        session.step_begins()
        exchange, self.scale = session.exchange, scale
        if scale is not None:
            exchange.expect(scale=to_true_units(scale))
        session.meet()
        if self.optimizer is not None:
            groups, follow_lr = self.optimizer.param_groups, session.compressor.policy.follow_lr
            self._rates = {
                id(param): float(group["lr"])
                for group in groups
                # Some optimizers have none, or find their own.
                if follow_lr or group.get("lr") is not None and group["lr"] < NO_RATE
                for param in group["params"]
            }
            changes = self.takeover.changes(self.optimizer)
            if changes:
                exchange.end_step()
            for name, options in changes.items():
                exchange.tensors.replace(name, **options)
        session.lifecycle.take(Event.BEGIN)

    def submit(self, slot: Slot, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any, Any]:
        """Takes a parameter's gradient into the step.

        Returns:
            (memory, array, carrier): a contiguous tensor that holds the gradient, and later the
            result; the same memory as a flat array; and the array to reduce, which is that one
            itself where the gradient goes densely. float32, or float64 where the algorithm carries
            that.
        """
        memory, array = slot.load_for(self.session, tensor)
        squares = self.moments.take(slot.name) if self.moments else None
        rate = self._rates.get(id(slot.param))
        carrier = self.session.exchange.submit(slot.name, array, squares, rate)
        if memory.is_cuda:
            self.streams.mark(memory)
        return memory, array, carrier

    def copy_result(self, memory: torch.Tensor, grad: torch.Tensor) -> None:
        """Leaves a result in a gradient of another type."""
        grad.copy_(memory)
        if grad.dtype == torch.float16 and not torch.isfinite(grad).all():
            self.session.exchange.fail()

    def must_be_skipped(self) -> bool:
        """True where results that a GradScaler looks at are to be NaN, so that all optimizers skip
        the step. Each looks at its own gradients only: one that found them finite would use what is
        rolled back where another one has skipped its step, and comes again."""
        exchange = self.session.exchange
        scaled = self.grad_scaler is not None
        return scaled and exchange.tensors.keep_state and not exchange.succeeded

    def was_skipped(self) -> bool:
        """True where a GradScaler has skipped the last step."""
        return self.scale is not None and self.grad_scaler.get_scale() < self.scale

    def note_results(self, results: Iterable[Tuple[Slot, torch.Tensor]]) -> None:
        """Keeps what tells at the optimizer's step whether gradients with a momentum were changed,
        for hosts whose results are gradients from then on. Not with a GradScaler, which takes its
        scale off them.

        Args:
            results: the parameters, and their results on this rank.
        """
        self._result, latest = None, self.session.exchange.latest
        if not self.takeover.variants or self.grad_scaler or latest.settled and not latest.finite:
            return
        covered = [its for its in results if its[1].numel() and self.takeover.covers(its[0].param)]
        if covered:
            slot, result = min(covered, key=lambda each: each[1].numel())
            self._result = slot.param, result.clone()

    # -- around steps of the optimizer

    def register(self, optimizer: torch.optim.Optimizer, host: Host) -> None:
        """Hooks this optimizer's steps. The hooks keep the host alive."""
        self.optimizer = optimizer

        # Not compiled with the step: the compiler would take what these change for constant.
        @torch.compiler.disable
        def before(_: Any, args: tuple, kwargs: Dict[str, Any]) -> Any:
            host.before_step(optimizer)
            return self._before_step(optimizer, args, kwargs)

        after = torch.compiler.disable(lambda *_: self._after_step())
        self.hooks.callback(optimizer.register_step_pre_hook(before).remove)
        self.hooks.callback(optimizer.register_step_post_hook(after).remove)

    def _before_step(self, optimizer: Any, args: tuple, kwargs: Dict[str, Any]) -> Optional[tuple]:
        """Before a step of the optimizer. Returns other (args, kwargs) for it where it is given a
        closure: the gradients that it uses are there after that."""
        lifecycle, closure = self.session.lifecycle, closure_of(args, kwargs)
        if closure is None:
            scaled = lifecycle.is_unused and in_grad_scaler()
            self._use_results(optimizer, Event.SCALED_STEP if scaled else Event.STEP, False)
            return None

        def closed() -> Any:
            with lifecycle.closure():
                loss = closure()
            self._use_results(optimizer, Event.STEP, True)
            return loss

        return with_closure(args, kwargs, closed)

    def _use_results(
        self, optimizer: torch.optim.Optimizer, event: Event, in_closure: bool
    ) -> None:
        """Prepares the results that are there, if any, for the optimizer to use."""
        self._host.before_use(optimizer, in_closure)
        lifecycle = self.session.lifecycle
        if not lifecycle.take(event):
            if lifecycle.state is State.IDLE and self.takeover.uses_again():
                warn_once(
                    "optimizer.step() comes a second time on the same gradients. "
                    f"{self.session.compressor.id} has taken over SGD's momentum, and they hold "
                    "it, so this step is not the one that SGD takes without compression: bring new "
                    "gradients before each step, or make the compression with momentum=0"
                )
            return
        exchange = self.session.exchange
        if exchange.tensors.keep_state and event is Event.SCALED_STEP and self.grad_scaler is None:
            warn_once(
                "a GradScaler scales these gradients: give the compression grad_scaler=…, or "
                "what it keeps does not follow the scale"
            )
        looks, latest = self._to_look_for, exchange.latest
        if exchange.tensors.keep_state and not skips(optimizer):
            looks.append(lambda: _warn_of_undone(latest))
        if self._result is not None and self._result[0].grad is not None:
            looks.append(self._look_for_changes(*self._result))
        if latest.settled:
            self._look()
        self.takeover.before_step(optimizer)

    def _look(self) -> None:
        """Looks for faults in how the last results were used, once that needs no wait."""
        looks, self._to_look_for = self._to_look_for, []
        for look in looks:
            look()

    def _look_for_changes(self, param: torch.Tensor, result: torch.Tensor) -> Callable[[], None]:
        """Compares a result with the gradient that is used. Returns what warns where it differs."""
        grad, latest = shards.local(param.grad), self.session.exchange.latest
        changed, scaled = lambda: not torch.equal(grad, result), in_grad_scaler
        if not latest.settled:
            same, in_scaler = landing((grad == result).all()), in_grad_scaler()
            changed, scaled = lambda: not same(), lambda: in_scaler

        def look() -> None:
            # What is not finite equals nothing.
            if latest.finite and changed() and not scaled():
                whole = not shards.is_shard(param)
                warn_of_changed(str(self.session.compressor.id), "backward()", whole)

        return look

    def _after_step(self) -> None:
        self.session.lifecycle.take(Event.STEP_ENDED)
        self.takeover.restore()

    def leave_unused(self) -> None:
        """Discards a step whose results no optimizer.step() has used, or commits it and warns that
        its effects stay."""
        session, lifecycle = self.session, self.session.lifecycle
        if not lifecycle.is_unused:
            return
        self._host.before_unused()
        if not lifecycle.is_unused:
            return
        exchange, discardable = session.exchange, session.discardable
        if exchange.succeeded and exchange.tensors.keep_state and not discardable:
            lifecycle.take(Event.COMMIT)
            warn_once(
                "the gradients of a step were exchanged, and no optimizer.step() has used them; "
                "what was not sent of them is kept, and "
                "comes in later steps. To forget such steps, make the compression with "
                "discardable=True"
            )
        elif exchange.succeeded and discardable:
            session.discard()
        else:
            lifecycle.take(Event.ROLLBACK)


def _warn_of_undone(transaction: Any) -> None:
    if not (transaction.finite or transaction.discarded):
        warn_once(
            "optimizer.step() uses gradients of which some were not finite on some rank: the "
            "compression has undone that step, so what is finite in them counts now, and a "
            "second time later. Skip such a step on all ranks: do not repair its gradients, as "
            "by nan_to_num_()"
        )


def bring_means(exchange: Exchange, ranks: Any, carriers: Dict[str, Any]) -> None:
    """Brings the results of all gradients of a step at once.

    Args:
        exchange: has had all of them.
        ranks: `ranks.mean(tensor, name)` starts the mean over them in the tensor's own memory, and
            returns a function that waits for it.
        carriers: what `exchange.submit` has returned, by name.
    """
    waits = {
        name: ranks.mean(tensor_of(carrier), f"{ranks.label()}.{name}.mean")
        for name, carrier in carriers.items()
        if exchange.tensors.is_payload(name, carrier)
    }
    exchange.flush()
    for name, carrier in carriers.items():
        if name in waits:
            waits[name]()
        exchange.finish(name, carrier, now=False)


def _options(optimizer: Optional[torch.optim.Optimizer]) -> Dict[str, Dict[str, Any]]:
    """The options of an optimizer's groups that are plain values: what all ranks must have
    alike."""
    groups = {}
    for i, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        plain = {
            k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v
            for k, v in group.items()
        }
        groups[f"parameter group {i}"] = {
            k: v for k, v in plain.items() if isinstance(v, (bool, int, float, str))
        }
    return groups


def check_types(optimizer: Any, grad_scaler: Any) -> None:
    """Raises TypeError for a first argument or a `grad_scaler` of the wrong kind."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"a compression is bound to a torch optimizer, its first argument, not to an "
            f"object of {type(optimizer)}"
        )
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, not {grad_scaler!r}")
