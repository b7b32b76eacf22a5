"""The steps of a compression in PyTorch, from the first gradient to the optimizer's use of the
results, whoever hands gradients over."""

from abc import abstractmethod
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from ..adapters.binding import Binding, warn_once
from ..compressors.base import NO_RATE
from ..engine.exchange import Exchange
from ..engine.loss_scale import to_true_units
from ..protocol.handshake import agree
from ..transport.base import Transport
from .lifecycle import Event, Lifecycle, State
from .moments import Moments
from .optimizers import closure_of, in_grad_scaler, skips, with_closure
from .parameters import Slot, Slots, Streams
from .sgd import SGDTakeover


class OptimizerSteps(Binding):
    """The steps of an optimizer's compression. How tensors are compressed is decided in
    `compression`."""

    def __init__(self, grad_scaler: Any, discardable: bool) -> None:
        # The one that uses the results, once it is known.
        self._optimizer: Optional[torch.optim.Optimizer] = None
        # Of the hooks around its steps.
        self._handles: List[Any] = []
        self._grad_scaler = grad_scaler
        self._discardable = bool(discardable or grad_scaler is not None)
        self._step = Lifecycle()
        # The loss scale of the last step, where there is a GradScaler.
        self._scale: Optional[float] = None
        # All ranks' optimizers, since these ranks are together.
        self._options_agreed = False
        # id(parameter) → learning rate of this step, where it is 0 or residuals follow it.
        self._rates: Dict[int, float] = {}
        self._streams = Streams()

    _exchange: Exchange
    _transport: Transport
    _slots: Slots
    _takeover: SGDTakeover
    _moments: Optional[Moments]
    # Goes on with another compression where that was asked for from this step on.
    _switch_where_due: Callable[[], None]

    def _submit(self, slot: Slot, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any, Any]:
        """Takes a parameter's gradient into the step.

        Returns:
            (memory, array, carrier): contiguous float32 with the gradient, where the result will
            be; the flat array of that; and what is to be reduced, which is that array itself where
            the gradient travels densely in float32.
        """
        exchange = self._exchange
        memory, array = slot.load_for(self, tensor)
        squares = self._moments.take(slot.name) if self._moments else None
        carrier = exchange.submit(slot.name, array, squares, self._rates.get(id(slot.param)))
        if memory.is_cuda:
            self._streams.mark(memory)
        return memory, array, carrier

    def _copy_result(self, memory: torch.Tensor, grad: torch.Tensor) -> None:
        """Leaves a result in a gradient of another type."""
        grad.copy_(memory)
        if grad.dtype == torch.float16 and not torch.isfinite(grad).all():
            self._exchange.fail()

    def _begin_step(self) -> None:
        """Before the first gradient of a step."""
        scale = None if self._grad_scaler is None else self._grad_scaler.get_scale()
        if not self._options_agreed:
            # What the user can broadcast or load until the first gradient.
            self.handshake()
            agree(
                self._transport,
                f"{self._label()}.step",
                {**_options(self._optimizer), "loss scale": scale},
                advice=self._advice_on_options,
            )
            self._options_agreed = True
        self._leave_unused()
        self._switch_where_due()
        self._scale = scale
        if scale is not None:
            self._exchange.expect(scale=to_true_units(scale))
        self._meet()
        if self._optimizer is not None:
            groups, follow_lr = self._optimizer.param_groups, self._compressor.policy.follow_lr
            self._rates = {
                id(param): float(group["lr"])
                for group in groups
                # Some optimizers have none, or find their own.
                if follow_lr or group.get("lr") is not None and group["lr"] < NO_RATE
                for param in group["params"]
            }
            for name, options in self._takeover.changes(self._optimizer).items():
                self._exchange.replace(name, **options)
        self._step.take(Event.BEGIN)

    # What to do where ranks' optimizers differ.
    _advice_on_options: str

    # -- around steps of the optimizer

    def _register(self, optimizer: torch.optim.Optimizer) -> None:
        """Has the steps of this optimizer come here."""

        # Not compiled with the step: the compiler would take what these change for constant.
        @torch.compiler.disable
        def before(_: Any, args: tuple, kwargs: Dict[str, Any]) -> Any:
            return self._before_step(optimizer, args, kwargs)

        after = torch.compiler.disable(lambda *_: self._after_step())
        self._handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]

    def _unregister(self) -> None:
        """Has them go on without this."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before_step(self, optimizer: Any, args: tuple, kwargs: Dict[str, Any]) -> Optional[tuple]:
        """Before a step of the optimizer. Returns other (args, kwargs) for it where it is given a
        closure: the gradients that it uses are there after that."""
        closure = closure_of(args, kwargs)
        if closure is None:
            scaled = self._step.is_unused and in_grad_scaler()
            self._use_results(optimizer, Event.SCALED_STEP if scaled else Event.STEP, False)
            return None

        def closed() -> Any:
            with self._step.closure():
                loss = closure()
            self._use_results(optimizer, Event.STEP, True)
            return loss

        return with_closure(args, kwargs, closed)

    @abstractmethod
    def _refuse_unreduced(self, optimizer: Any, in_closure: bool) -> None:
        """RuntimeError where the step that begins, or goes on after its closure, would use
        gradients of one rank alone."""

    def _use_results(
        self, optimizer: torch.optim.Optimizer, event: Event, in_closure: bool
    ) -> None:
        """Prepares the results that are there, if any, for the optimizer to use."""
        self._refuse_unreduced(optimizer, in_closure)
        if not self._step.take(event):
            if self._step.state is State.IDLE and self._takeover.uses_again():
                warn_once(
                    "optimizer.step() comes a second time on the same gradients. "
                    f"{self._compressor.id} has taken over SGD's momentum, and they hold it, so "
                    "this step is not the one that SGD takes without compression: bring new "
                    "gradients before each step, or make the compression with momentum=0"
                )
            return
        keeps = self._exchange.keeps_state
        if keeps and event is Event.SCALED_STEP and self._grad_scaler is None:
            warn_once(
                "a GradScaler scales these gradients: give the compression grad_scaler=…, or "
                "what it keeps does not follow the scale"
            )
        if keeps and not self._exchange.succeeded and not skips(optimizer):
            warn_once(
                "optimizer.step() uses gradients of which some were not finite on some rank: the "
                "compression has undone that step, so what is finite in them counts now, and a "
                "second time later. Skip such a step on all ranks: do not repair its gradients, as "
                "by nan_to_num_()"
            )
        self._before_use(optimizer)

    def _before_use(self, optimizer: torch.optim.Optimizer) -> None:
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
        elif self._exchange.succeeded and self._discardable:
            self.discard()
        else:
            self._step.take(Event.ROLLBACK)


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
