"""A communication hook for a model and an optimizer that others make later."""

import weakref
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..compressors.base import Compressor
from ..engine.exchange import Exchange
from ..session.auto import auto_of
from ..session.unbound import NotBoundError, Unbound
from ..torch_common.optimizers import before_closures
from ..torch_common.search import objects_of, optimizers_of
from ..transport.loopback import Loopback
from .compression import DDPCompression, hook
from .factories import make


class Waiting:
    """Answers for a compression that is not there yet, and notes what that is to be told first.
    Whoever asks, on one rank alone or before there is an optimizer, changes nothing."""

    def __init__(self, compressor: Compressor) -> None:
        self.config = compressor.config
        nothing = Exchange(compressor, Loopback.group(1)[0], {})
        self.stats, self.stats_by_tensor = nothing.stats, nothing.tensors.stats_by_name
        self.told: List[Tuple[str, tuple, Dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("record", "switch", "load_state_dict"):
            return lambda *given, **named: self.told.append((name, given, named))
        raise NotBoundError(
            f"{name}: no gradients have come to this communication hook yet. Register it by "
            "model.register_comm_hook(state, hook), and ask after the first backward pass. "
            "stats(), config, record(), switch() and load_state_dict() may come before"
        )


class HookState(Unbound):
    """The state of a communication hook: the compression of the model that has the hook, once that
    model's first gradients come. It finds the optimizer of the model's parameters by itself.
    Before, stats() are 0, and record(), switch() and load_state_dict() wait for the gradients."""

    _bound_class = DDPCompression

    def __init__(self, spec: Any, **options: Any) -> None:
        super().__init__("none" if auto_of(spec) else spec, **options)
        moments = self._compressor.policy.moments
        if moments != "minibatch":
            raise ValueError(
                f"{self._compressor.id}: moments={moments} begin with a forward "
                "pass, before a communication hook is called: use ddp.compress(model, optimizer, …)"
            )
        self._asked = spec
        self._bound: List[DDPCompression] = []
        self._waiting = Waiting(self._compressor)
        _unbound.add(self)

    def the_only(self) -> Any:
        return self._bound[0] if self._bound else self._waiting

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future:
        param = bucket.parameters()[0]
        if not self._bound:
            models = [its for its in self._models() if any(param is p for p in its.parameters())]
            if len(models) != 1:
                raise NotBoundError(
                    f"{len(models)} DistributedDataParallel models of these parameters have this "
                    "communication hook: register the pair that ddp.comm_hook has returned, with "
                    "one, and let go of an earlier wrapper"
                )
            self._bind(models[0], optimizers_of(models[0].module))
        if not self._bound[0].serves(param):
            raise ValueError(
                "this communication hook has served another model, and keeps what that has not "
                "sent: give each model a pair of its own, by ddp.comm_hook(…)"
            )
        return self._bound[0].exchange(bucket)

    def serve(self, optimizer: Any) -> None:
        """Binds to the model that this optimizer steps, if one has this hook."""
        for model in self._models():
            # Not to be asked for within a hook, where DDP would wait for itself.
            known_as = model._get_ddp_logging_data().get("comm_hook")
            if known_as == hook.__qualname__ and optimizer in optimizers_of(model.module):
                self._bind(model, [optimizer])

    def _models(self) -> List[DistributedDataParallel]:
        """Those that may have this hook: before PyTorch 2.3 models do not tell it."""
        unknown = [(hook, self)]
        return [
            model
            for model in objects_of(DistributedDataParallel)
            if any(self is its for _, its in getattr(model, "_comm_hooks", unknown))
        ]

    def _bind(self, model: DistributedDataParallel, optimizers: List[Any]) -> None:
        if len(optimizers) > 1:
            raise ValueError(
                "several optimizers step the parameters of this model: use "
                "ddp.compress(model, optimizer, …), which is told of one"
            )
        optimizer = optimizers[0] if optimizers else None
        bound = make(self._asked, model, optimizer, **self._options)
        for name, given, named in self._waiting.told:
            getattr(bound, name)(*given, **named)
        self._bound.append(bound)
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
