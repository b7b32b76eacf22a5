"""How PyTorch's optimizers and GradScalers are called."""

from typing import Any, Callable, Dict, Optional

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..session.callers import owners
from ..session.versions import check_version

check_version("torch", torch.__version__)

# Before PyTorch 2.3 only the second.
GradScaler = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)


def closure_of(args: tuple, kwargs: Dict[str, Any]) -> Optional[Callable[[], Any]]:
    """The closure among the arguments of an optimizer's step, as step hooks get them."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def with_closure(args: tuple, kwargs: Dict[str, Any], closure: Callable[[], Any]) -> tuple:
    """(args, kwargs) with another closure in the place of theirs."""
    if len(args) > 1:
        return (*args[:1], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def before_closures(bind: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Has bind(optimizer) called before each step whose closure brings its first gradients."""

    @torch.compiler.disable
    def before(optimizer: torch.optim.Optimizer, args: tuple, kwargs: Dict[str, Any]) -> None:
        if closure_of(args, kwargs) is not None:
            bind(optimizer)

    register_optimizer_step_pre_hook(before)


def is_made_by_torch(optimizer: Any) -> bool:
    """Returns whether PyTorch's own step() calls hooks around this optimizer's steps: not of a
    wrapper that has another optimizer's attributes, as accelerate and Lightning make them."""
    return bool(getattr(type(optimizer).step, "hooked", False))


def without_wrappers(optimizer: Any) -> Any:
    """The optimizer within such wrappers."""
    while not is_made_by_torch(optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def own_class(optimizer: Any) -> type:
    """The class of an optimizer, or of the one that Horovod's extends."""
    return type(optimizer).__mro__[1] if hasattr(optimizer, "_compression") else type(optimizer)


def in_grad_scaler() -> bool:
    """Returns whether an enabled GradScaler is taking the step that has come to this point."""
    scalers = (owner for owner in owners("step") if isinstance(owner, GradScaler))
    return next((scaler.is_enabled() for scaler in scalers), False)


def skips(optimizer: Any) -> bool:
    """Returns whether a GradScaler has told this optimizer, whose fused step leaves parameters
    alone then, that it has found gradients that are not finite."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)
