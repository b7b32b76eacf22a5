"""A communication hook for a model and an optimizer that others make later."""

import weakref
from typing import Any, Callable, List, Tuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..adapters.binding import NotBoundError, Unbound
from ..pytorch.optimizers import before_closures
from ..pytorch.search import objects_of
from .checks import optimizers_of
from .compression import DDPCompression, hook
from .factories import is_auto, make


class HookState(Unbound):
    """The state of a communication hook: the compression of the model that has the hook, once that
    model's first gradients come. It finds the optimizer of the model's parameters by itself."""

    _bound_class = DDPCompression

    def __init__(self, spec: Any, **options: Any) -> None:
        super().__init__("none" if is_auto(spec) else spec, **options)
        moments = self._compressor.policy.moments
        if moments != "minibatch":
            raise ValueError(
                f"{self._compressor.id}: moments={moments} begin with a forward "
                "pass, before a communication hook is called: use ddp.compress(model, optimizer, …)"
            )
        self._asked = spec
        self._bound: List[DDPCompression] = []
        _unbound.add(self)

    def the_only(self) -> DDPCompression:
        if not self._bound:
            models = self._models()
            if len(models) != 1:
                raise NotBoundError(
                    f"{len(models)} DistributedDataParallel models have this communication hook: "
                    "register it with one, by model.register_comm_hook(state, hook)"
                )
            self._bind(models[0], optimizers_of(models[0]))
        return self._bound[0]

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future:
        """As of `DDPCompression`."""
        if self._bound and not self._bound[0].serves(bucket.parameters()[0]):
            raise ValueError(
                "this communication hook has served another model, and keeps what that has not "
                "sent: give each model a pair of its own, by ddp.comm_hook(…)"
            )
        return self.the_only().exchange(bucket)

    def serve(self, optimizer: Any) -> None:
        """Binds to the model that this optimizer steps, if one has this hook."""
        for model in self._models():
            if optimizer in optimizers_of(model):
                self._bind(model, [optimizer])

    def _models(self) -> List[DistributedDataParallel]:
        models = objects_of(DistributedDataParallel)
        return [model for model in models if any(self is its for _, its in model._comm_hooks)]

    def _bind(self, model: DistributedDataParallel, optimizers: List[Any]) -> None:
        if len(optimizers) > 1:
            raise ValueError(
                "several optimizers step the parameters of this model: use "
                "ddp.compress(model, optimizer, …), which is told of one"
            )
        optimizer = optimizers[0] if optimizers else None
        self._bound.append(make(self._asked, model, optimizer, **self._options))
        _unbound.discard(self)


def comm_hook(
    spec: Any, *, grad_scaler: Any = None, discardable: bool = False
) -> Tuple[HookState, Callable]:
    """The pair that model.register_comm_hook takes, and Lightning's
    DDPStrategy(ddp_comm_state=…, ddp_comm_hook=…), where model and optimizer are not there yet.

    Args:
        spec: as of `ddp.compress`.
        grad_scaler: as of `ddp.compress`.
        discardable: as of `ddp.compress`.

    Returns:
        (state, hook). The state is a `DDPCompression` from the first gradients on, for one model.

    Raises:
        ValueError: bad options.
    """
    return HookState(spec, grad_scaler=grad_scaler, discardable=discardable), hook


_unbound: "weakref.WeakSet[HookState]" = weakref.WeakSet()


def _serve(optimizer: torch.optim.Optimizer) -> None:
    for state in list(_unbound):
        state.serve(optimizer)


before_closures(_serve)
