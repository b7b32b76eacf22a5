"""Momentum and weight decay of an SGD that a momentum-correcting compression has taken over."""

import contextlib
import inspect
import weakref
from typing import Any, Dict, List, Optional, Set, Tuple

import torch

from ..session.choice import momentum_of
from ..session.notices import warn_once
from .optimizers import own_class, skips
from .shards import is_shard, local

# Steps between two looks at what an SGD's own momentum still holds, where it was taken over.
LOOK = 64
# Of the largest element that it ever held: what is less is far below what rounding takes from a
# parameter.
DECAYED = 2.0**-30


def is_plain_sgd(optimizer: Any) -> bool:
    """Returns whether this is an SGD without momentum: it adds the learning rate times the result
    to parameters."""
    return isinstance(optimizer, torch.optim.SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    )


def can_take_over(optimizer: Any) -> bool:
    """Returns whether this is an SGD with a momentum that a compression can take over."""
    return (
        isinstance(optimizer, torch.optim.SGD)
        and not is_plain_sgd(optimizer)
        and _steps_as_sgd(optimizer)
        and not any(group["dampening"] for group in optimizer.param_groups)
    )


def _steps_as_sgd(optimizer: torch.optim.SGD) -> bool:
    cls: Any = own_class(optimizer)
    return inspect.unwrap(cls.step) is inspect.unwrap(torch.optim.SGD.step)


def warn_of_changed(algorithm: str, since: str, whole: bool = True) -> None:
    """Warns that gradients were changed while they hold a momentum. since: the call that brought
    them, as users write it; whole: False for shards."""
    clip = "Clip with clip_norm=…, or make" if whole else "Make"
    warn_once(
        f"gradients were changed between {since} and the step. {algorithm} has taken over SGD's "
        "momentum, and they hold it then: with a momentum m norms are up to 1/(1 - m) times as "
        f"large as those that clip_grad_norm_ sees otherwise. {clip} the compression with "
        "momentum=0"
    )


def momentum_buffer(state: Dict[str, Any], param: torch.Tensor) -> torch.Tensor:
    """SGD's own momentum of a parameter, in the state that it keeps of that; zeros from now on
    where there is none."""
    if state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(param, requires_grad=False)
    return state["momentum_buffer"]


class SGDTakeover:
    """Momentum and weight decay of a torch.optim.SGD, applied exactly once. With any other
    optimizer, or None, it takes nothing over.

    The compression corrects momentum (DGC section 3.2), so SGD must not apply it again. SGD also
    runs the weight-decay term λ·p through its momentum; that term is the same on all ranks and has
    no place in the compressed stream. So for the time of a step whose gradients have come through
    the compression, the groups' momentum and weight decay are 0, and the term w ← m·w + λ·p is
    added to the gradient instead: after a GradScaler has unscaled it, and not at all when that
    skips the step. w is SGD's own momentum buffer, which nothing else uses then. It is broadcast,
    saved and loaded with the optimizer, and momentum from a plain run lives on in it.

    Outside such steps the groups are the user's: schedulers, checkpoints and
    hvd.broadcast_optimizer_state find what they expect, and what they change counts from the next
    gradient on.
    """

    def __init__(
        self, optimizer: Optional[torch.optim.Optimizer], compressor: Any, names: Dict[int, str]
    ) -> None:
        # Name → the compressor with its group's momentum.
        self.variants: Dict[str, Any] = {}
        # id(parameter) → name, of those whose gradients come.
        self._names = names
        self._compressor = compressor
        # One of the gradients that the last step has used: its parameter, itself and its version.
        self._used: Optional[Tuple[torch.Tensor, Any, int]] = None
        # Gives groups back what the step under way has suspended.
        self._suspended = contextlib.ExitStack()
        # Of buffers of parameters without weight decay that were found to hold something:
        # id(parameter) → their largest element, then.
        self._largest: Dict[int, float] = {}
        self._until_look = LOOK
        logged: Set[str] = set()
        groups = (
            optimizer.param_groups
            if isinstance(optimizer, torch.optim.SGD) and compressor.traits.corrects_momentum
            else ()
        )
        # Whether the groups' momentum counts, also where it is 0 now.
        self.follows = bool(groups) and compressor.momentum is None
        for group in groups:
            momentum, nesterov = momentum_of(compressor, group)
            if momentum == 0:
                continue
            self._refuse(optimizer, group)
            self.variants.update(
                (name, compressor.bound(momentum, nesterov)) for name in self._names_of(group)
            )
            decay = f" and weight_decay={group['weight_decay']:g}" if group["weight_decay"] else ""
            logged.add(f"momentum={momentum:g}{' (nesterov)' if nesterov else ''}{decay}")
        # What users are to know; None where nothing is taken over.
        self.announcement = (
            f"{compressor.id} applies {'; '.join(sorted(logged))} in place of SGD"
            if logged
            else None
        )

    def _names_of(self, group: Dict[str, Any]) -> List[str]:
        """Those of a group's parameters whose gradients come."""
        return [self._names[id(p)] for p in group["params"] if id(p) in self._names]

    def _refuse(self, optimizer: Any, group: Dict[str, Any]) -> None:
        """Raises ValueError where the momentum of a group cannot be taken over."""
        if not _steps_as_sgd(optimizer):
            raise ValueError(
                f"{own_class(optimizer).__name__} has a step() of its own, so its momentum cannot "
                f"be taken over as SGD's can: bind "
                f"{self._compressor.id} with momentum=0, which leaves momentum to it"
            )
        if group["dampening"] != 0:
            raise ValueError(
                f"{self._compressor.id} cannot take over SGD's dampening={group['dampening']}: set "
                f"it to 0"
            )

    def gains(self, optimizer: Optional[torch.optim.Optimizer]) -> Dict[str, float]:
        """The sum in the end of an SGD's moves by a result of 1, by name: 1/(1 − m), and 1 where
        its momentum is taken over."""
        groups = optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else ()
        return {
            name: 1 / (1 - float(group["momentum"]))
            for group in groups
            if group["momentum"] < 1
            for name in self._names_of(group)
            if name not in self.variants
        }

    def covers(self, param: torch.Tensor) -> bool:
        """Returns whether this parameter's momentum is taken over."""
        return self._names.get(id(param)) in self.variants

    def changes(self, optimizer: torch.optim.Optimizer) -> Dict[str, Dict[str, Any]]:
        """{name: options} of the parameters whose momentum the optimizer's groups have changed
        since the last call."""
        self.restore()
        changed: Dict[str, Dict[str, Any]] = {}
        for group in optimizer.param_groups if self.variants or self.follows else ():
            momentum, nesterov = momentum_of(self._compressor, group)
            for name in self._names_of(group):
                known = self.variants.get(name)
                before = (0.0, False) if known is None else (known.momentum, known.nesterov)
                # The parameters of a group have one momentum.
                if before == (momentum, nesterov):
                    break
                if known is None:
                    self._refuse(optimizer, group)
                self.variants[name] = self._compressor.bound(momentum, nesterov)
                changed[name] = {"momentum": momentum, "nesterov": nesterov}
        return changed

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepares gradients and groups for the step of SGD that comes now, whose gradients have
        come through the compression. A step with nothing exchanged is left alone:
        hvd.broadcast_optimizer_state makes one."""
        self._until_look = (self._until_look or LOOK) - 1
        # A GradScaler leaves unscaling to a fused step, and tells it so.
        grad_scale = getattr(optimizer, "grad_scale", None) if self.variants else None
        scale = 1.0 if grad_scale is None else float(grad_scale)
        skipped = bool(self.variants) and skips(optimizer)
        for group in list(optimizer.param_groups) if self.variants else ():
            momentum, nesterov = momentum_of(self._compressor, group)
            with_gradient = [p for p in group["params"] if p.grad is not None]
            params = [p for p in with_gradient if self.covers(p)]
            # Where it is 0, SGD leaves its buffer as it is.
            if not params or not momentum:
                continue
            if not skipped:
                self._add_decay(optimizer.state, group, params, momentum, nesterov, scale)
            grad: Any = params[0].grad
            self._used = params[0], weakref.ref(grad), grad._version
            suspended: Dict[str, Any] = {"momentum": 0, "nesterov": False, "weight_decay": 0}
            if len(params) < len(with_gradient):
                # The others' do not: SGD does all of these, in a group of their own.
                others = [p for p in with_gradient if not self.covers(p)]
                optimizer.param_groups.append({**group, "params": others})
                self._suspended.callback(optimizer.param_groups.pop)
                suspended["params"] = params
            before = {key: group[key] for key in suspended}
            self._suspended.callback(group.update, before)
            group.update(suspended)

    def uses_again(self) -> bool:
        """Looks whether the last step has used the same gradients, with a momentum in them."""
        if self._used is None:
            return False
        param, used, version = self._used
        grad = param.grad
        return grad is not None and grad is used() and grad._version == version

    def restore(self) -> None:
        """Gives the groups back what a step has suspended."""
        self._suspended.close()

    def give_back(self, optimizer: Any) -> None:
        """Comes before SGD may apply momentum again. Its fused step needs buffers of all parameters
        of a group, or of none."""
        for group in optimizer.param_groups if self.variants else ():
            states = [(p, optimizer.state[p]) for p in group["params"] if p in optimizer.state]
            if any(state.get("momentum_buffer") is not None for _, state in states):
                for p in filter(self.covers, group["params"]):
                    momentum_buffer(optimizer.state[p], p)

    @torch.no_grad()
    def _add_decay(
        self,
        state: Any,
        group: Dict[str, Any],
        params: List[torch.Tensor],
        momentum: float,
        nesterov: bool,
        scale: float,
    ) -> None:
        """Adds what SGD would to gradients, which are times `scale`."""
        decay = group["weight_decay"]
        # Where it maximizes, SGD negates the gradient, and its buffer is of the negated one.
        sign = -scale if group["maximize"] else scale
        if decay and any(p.grad is not None and p.grad.is_sparse for p in params):
            raise RuntimeError("weight_decay option is not compatible with sparse gradients")
        if not decay:
            # torch.distributed.checkpoint asks for what a plain SGD of this momentum would have.
            for p in filter(is_shard, params):
                momentum_buffer(state[p], p)
            params = [p for p in params if self._holds_momentum(state[p], p)]
        if not params:
            return
        buffers = [momentum_buffer(state[p], p) for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        torch._foreach_mul_(buffers, momentum)
        if decay:
            torch._foreach_add_(buffers, params, alpha=decay)
        if decay and nesterov:
            torch._foreach_add_(grads, params, alpha=sign * decay)
        torch._foreach_add_(grads, buffers, alpha=sign * momentum if nesterov else sign)

    def _holds_momentum(self, state: Dict[str, Any], param: torch.Tensor) -> bool:
        """Returns whether a buffer without weight decay is worth keeping:
        hvd.broadcast_optimizer_state makes empty ones, and the momentum of a plain run decays, down
        to denormal numbers, which are slow and never become 0."""
        buffer = state.get("momentum_buffer")
        if buffer is None or self._until_look and id(param) in self._largest:
            return buffer is not None
        # Not over all shards, of which some may have none.
        its = local(buffer)
        now = float(its.abs().max()) if its.numel() else 0.0
        largest = self._largest[id(param)] = max(now, self._largest.get(id(param), 0.0))
        if now > DECAYED * largest:
            return True
        del self._largest[id(param)]
        if is_shard(buffer):
            its.zero_()
        else:
            del state["momentum_buffer"]
        return False
