"""Sums over samples of squared gradients: what a compressor's `moments=microbatch` and
`moments=per_sample` ask for."""

import functools
import inspect
import weakref
from typing import Any, Callable, Dict, List, MutableMapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..compressors.base import Compressor
from ..engine.dense_policy import compressor_for
from . import samples
from .search import objects_of
from .uses import (
    ADVICE,
    FOLLOWED,
    RECURRENT,
    References,
    Tap,
    Watched,
    collectors,
    followed,
    record_module,
)

# With which samples cannot be told apart.
_OPTIONS = ("sparse", "scale_grad_by_freq", "track_running_stats")


# PyTorch hands over keywords, where it is asked to, from 2.6 on.
_KEYWORDS: Dict[str, Any] = (
    {"with_kwargs": True}
    if "with_kwargs" in inspect.signature(register_module_forward_hook).parameters
    else {}
)


class Moments:
    """Collects Σ_z g_z² of parameters, where the g_z add up to the gradient that Horovod submits.

    moments: "microbatch": z is one backward pass. "per_sample": z is an index into the batch: the
    first dimension of what the
        parameter's module is called with; recurrent, attention and transformer layers know their
        own. Where calls share a parameter, g_z is the sum over them. What else reaches a parameter,
        such as a penalty on weights, is not seen.
    params: {name: parameter}. Their modules are found by searching the process.

    The model is left as it is, and the hooks go with this object. While it lives, recurrent layers
    in training run as `recurrent.py` has them, and convolutions find their weights' gradients
    sample by sample. Raises ValueError for parameters of modules in which samples cannot be told
    apart (BatchNorm), or of classes that are not known here.
    """

    def __init__(self, moments: str, params: Dict[str, Tensor]) -> None:
        self._params = {name: Watched(name, param) for name, param in params.items()}
        self.watched = {id(watched.param): watched for watched in self._params.values()}
        self._per_sample = moments == "per_sample"
        self._modules, self._layouts = _modules_of(self.watched) if self._per_sample else ({}, {})
        # (backward pass, samples in it, name of a parameter that was used with as many).
        self._batch: Tuple[Optional[int], int, str] = None, 0, ""
        # The node that adds to param.grad gets a pass's gradient summed over all uses, ahead of
        # Horovod.
        hooks = [
            w.node.register_prehook(functools.partial(_weakly(self._on_gradient), w))
            for w in self._params.values()
        ]
        # The hooks are for all modules, because a module's own would be copied and pickled with it.
        if self._per_sample:
            # They break compiled graphs; torch.compile(model, fullgraph=True) says so.
            before, after = (
                torch.compiler.disable(_weakly(method))
                for method in (self._before_forward, self._after_forward)
            )
            hooks += [
                register_module_forward_pre_hook(before),
                register_module_forward_hook(after, **_KEYWORDS),
            ]
            collectors.add(self)
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    def take(self, name: str) -> Optional[np.ndarray]:
        """The flat float32 sums of a parameter since they were last asked for; None if it got no
        gradient. The next gradient reuses their memory. RuntimeError where the parameter was moved,
        and gradients are not seen any more."""
        watched = self._params.get(name)
        if watched is None:
            return None
        if watched.total is None:
            watched.refuse_moved()
            return None
        watched.spare, watched.total = watched.total, None
        return watched.spare.cpu().numpy().reshape(-1)

    def _before_forward(self, module: nn.Module, args: tuple) -> Optional[tuple]:
        """Has the functions of torch's that the forward pass of such a layer calls end in
        `_Followed`."""
        if (
            type(module) not in FOLLOWED
            or module not in self._modules
            or not torch.is_grad_enabled()
        ):
            return None
        # Attention looks whether key, value and query are the same.
        seen: Dict[int, Any] = {}
        return tuple(seen.setdefault(id(arg), followed(arg)) for arg in args)

    def _after_forward(self, module: nn.Module, args: tuple, *rest: Any) -> None:
        """Makes the backward pass through a module's output record the uses of its parameters.
        rest: keywords, where there can be any, and the output."""
        if type(module) not in samples.KINDS:
            return
        *keywords, output = rest
        inputs = (*args, *(value for its in keywords for value in its.values()))
        if not inputs:
            raise ValueError(
                f"moments=per_sample: {type(module).__name__} is called by keyword, which PyTorch "
                "before 2.6 does not tell: call it by position"
            )
        (x,) = inputs
        owned = self._modules.get(module, ())
        uses = [
            (name, References([watched]))
            for watched, name in owned
            if watched.param.requires_grad and not watched.followed
        ]
        for watched, _ in owned:
            watched.followed = False
        if uses and output.requires_grad:
            Tap.apply(
                output,
                x.detach(),
                functools.partial(record_module, module, uses, self._layouts.get(module)),
            )

    @torch.no_grad()
    def _on_gradient(self, watched: "Watched", grads: Sequence[Optional[Tensor]]) -> None:
        """Adds the squares of a parameter's gradient of one backward pass, in which all its uses
        are recorded."""
        grad, before = grads[0], watched.param.grad
        if grad is None:
            return
        # The gradient was zeroed without a step, so the sums are void.
        if watched.total is None or before is None or not before.any():
            watched.spare = (
                torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
                if watched.spare is None
                else watched.spare
            )
            watched.total = watched.spare.zero_()
        with torch.autocast(grad.device.type, enabled=False):
            if self._per_sample:
                self._agree(watched, watched.add_uses(watched.total))
            else:
                grad = (grad.to_dense() if grad.is_sparse else grad).float()
                watched.total.addcmul_(grad, grad)

    def _agree(self, watched: "Watched", batch: int) -> None:
        """All parameters must mean the same samples: elsewhere a batch's first dimension is not the
        samples'."""
        if self._batch[0] != torch._C._current_graph_task_id():
            self._batch = torch._C._current_graph_task_id(), batch, watched.name
        _, others, name = self._batch
        if batch != others:
            raise ValueError(
                f"{watched.name} is used for {batch} samples and {name} for {others} in one "
                f"backward pass: samples are "
                f"told apart by the first dimension of what a module gets; {ADVICE}"
            )


def moments_of(compressor: Compressor, params: Dict[str, Tensor]) -> Optional[Moments]:
    """The collector of squared gradients; None where no parameter's compressor needs one, as none
    does that asks for a minibatch's."""
    moments = compressor.policy.moments
    if moments == "minibatch":
        return None
    needing = {
        name: param
        for name, param in params.items()
        if compressor_for(compressor, name, tuple(param.shape)).policy.moments == moments
    }
    return Moments(moments, needing) if needing else None


def _weakly(method: Callable) -> Callable:
    """A hook that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call


_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)


def _modules_of(
    by_id: Dict[int, Watched],
) -> Tuple[MutableMapping[nn.Module, List[Tuple[Watched, str]]], MutableMapping[nn.Module, int]]:
    """({module: [(a parameter, its name in the module)]}, {module in a transformer: the dimension
    of its samples}). Nobody hands modules over, so the process is searched."""
    modules: MutableMapping[nn.Module, List[Tuple[Watched, str]]] = weakref.WeakKeyDictionary()
    layouts: MutableMapping[nn.Module, int] = weakref.WeakKeyDictionary()
    unknown = []
    for module in objects_of(nn.Module):
        if isinstance(module, (*_STACKS, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            layer: Any = module.layers[0] if isinstance(module, _STACKS) else module
            layouts.update(
                (inner, 0 if layer.self_attn.batch_first else 1) for inner in module.modules()
            )
        for name, watched in (
            (name, by_id.get(id(param)))
            for name, param in vars(module).get("_parameters", {}).items()
        ):
            if watched is not None:
                modules.setdefault(module, []).append((watched, name))
                if not _is_known(module, name):
                    option = next(
                        (f", {option}" for option in _OPTIONS if getattr(module, option, False)), ""
                    )
                    unknown.append(
                        f"{watched.name} (of {watched.name.rpartition('.')[0] or 'the model'}, "
                        f"{type(module).__name__}{option})"
                    )
    found = {watched for owned in modules.values() for watched, _ in owned}
    unknown += [
        f"{watched.name} (which no module owns)"
        for watched in by_id.values()
        if watched not in found
    ]
    if unknown:
        raise ValueError(
            f"moments=per_sample cannot tell samples apart in {', '.join(unknown)}: {ADVICE}"
        )
    return modules, layouts


def _is_known(module: nn.Module, name: str) -> bool:
    """Whether samples can be told apart in the parameter of that name. A subclass may use its
    parameters otherwise, so classes are exact."""
    if type(module) in RECURRENT:
        return True
    if type(module) is nn.MultiheadAttention:
        return name not in ("bias_k", "bias_v")
    return (
        type(module) in samples.KINDS
        and name in ("weight", "bias")
        and not any(getattr(module, o, False) for o in _OPTIONS)
    )
