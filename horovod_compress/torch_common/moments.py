"""Sums over samples of squared gradients: what a compressor's `moments=microbatch` and
`moments=per_sample` ask for."""

import functools
import inspect
import weakref
from typing import Any, Callable, Dict, List, MutableMapping, Optional, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ..compressors.base import Compressor
from ..engine.dense_policy import compressor_for
from .samples import KINDS, Use, add_squares, use_of
from .search import objects_of
from .shards import is_shard

_ADVICE = "leave it dense (exclude=…), or choose moments=microbatch"
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

    moments: "microbatch": z is one backward pass. "per_sample": z is an index into the first
        dimension of what the parameter's module is called with. Where calls share a parameter, g_z
        is the sum over them. What else reaches a parameter, such as a penalty on weights, is not
        seen.
    params: {name: parameter}. Their modules are found by searching the process.

    The model is left as it is, and the hooks go with this object. Raises ValueError for parameters
    of modules in which samples cannot be told apart (BatchNorm), or of classes that are not known
    here.
    """

    def __init__(self, moments: str, params: Dict[str, Tensor]) -> None:
        self._params = {name: _Watched(name, param) for name, param in params.items()}
        # By the parameter's id.
        self.watched = {id(watched.param): watched for watched in self._params.values()}
        self._per_sample = moments == "per_sample"
        # {module: [(a parameter, its name in the module)]}
        self._modules: MutableMapping[nn.Module, List[Tuple[_Watched, str]]] = (
            weakref.WeakKeyDictionary()
        )
        # (backward pass, samples in it, name of a parameter that was used with as many).
        self._batch: Tuple[Optional[int], int, str] = None, 0, ""
        # The node that adds to param.grad gets a pass's gradient summed over all uses, ahead of
        # Horovod.
        hooks = [
            w.node.register_prehook(functools.partial(_weakly(self._on_gradient), w))
            for w in self._params.values()
        ]
        if self._per_sample:
            self._find_modules()
            # One hook for all modules, because a module's own would be copied and pickled with it.
            # It breaks compiled graphs; torch.compile(model, fullgraph=True) says so.
            after = torch.compiler.disable(_weakly(self._after_forward))
            hooks.append(register_module_forward_hook(after, **_KEYWORDS))
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

    def _find_modules(self) -> None:
        """Finds the modules of all parameters. Nobody hands them over, so the process is
        searched."""
        found, unknown = set(), []
        for module in objects_of(nn.Module):
            for name, param in vars(module).get("_parameters", {}).items():
                watched = self.watched.get(id(param))
                if watched is None:
                    continue
                found.add(watched)
                self._modules.setdefault(module, []).append((watched, name))
                option = next((f", {its}" for its in _OPTIONS if getattr(module, its, False)), "")
                if option or type(module) not in KINDS or name not in ("weight", "bias"):
                    unknown.append(
                        f"{watched.name} (of {watched.name.rpartition('.')[0] or 'the model'}, "
                        f"{type(module).__name__}{option})"
                    )
        unknown += [
            f"{watched.name} (which no module owns)"
            for watched in self._params.values()
            if watched not in found
        ]
        if unknown:
            raise ValueError(
                f"moments=per_sample cannot tell samples apart in {', '.join(unknown)}: {_ADVICE}"
            )

    def _after_forward(self, module: nn.Module, args: tuple, *rest: Any) -> None:
        """Makes the backward pass through a module's output record the uses of its parameters.
        rest: keywords, where there can be any, and the output."""
        *keywords, output = rest
        if module not in self._modules or not output.requires_grad:
            return
        inputs = (*args, *(value for its in keywords for value in its.values()))
        if not inputs:
            raise ValueError(
                f"moments=per_sample: {type(module).__name__} is called by keyword, which PyTorch "
                "before 2.6 does not tell: call it by position"
            )
        (x,) = inputs
        if any(watched.param.requires_grad for watched, _ in self._modules[module]):
            _Tap.apply(output, x.detach(), functools.partial(_weakly(self._after_backward), module))

    def _after_backward(self, module: nn.Module, x: Tensor, delta: Tensor) -> None:
        for watched, name in self._modules.get(module, ()):
            watched.record(use_of(module, name, x, delta))

    @torch.no_grad()
    def _on_gradient(self, watched: "_Watched", grads: Sequence[Optional[Tensor]]) -> None:
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

    def _agree(self, watched: "_Watched", batch: int) -> None:
        """All parameters must mean the same samples: elsewhere a batch's first dimension is not the
        samples'."""
        if self._batch[0] != torch._C._current_graph_task_id():
            self._batch = torch._C._current_graph_task_id(), batch, watched.name
        _, others, name = self._batch
        if batch != others:
            raise ValueError(
                f"{watched.name} is used for {batch} samples and {name} for {others} in one "
                f"backward pass: samples are told apart by the first dimension of what a module "
                f"gets; {_ADVICE}"
            )


class _Watched:
    """A parameter, with its sums of squares and its uses in the backward pass under way."""

    def __init__(self, name: str, param: Tensor) -> None:
        self.name, self.param = name, param
        self.node = _node_of(param)
        self.total: Optional[Tensor] = None  # the sums, once there are some
        self.spare: Optional[Tensor] = None  # the memory of the sums
        # The backward pass that `uses` are of.
        self.task: Optional[int] = None
        self.uses: List[Use] = []

    def refuse_moved(self) -> None:
        """Raises RuntimeError where another node adds to the gradient now: nothing is collected."""
        if _node_of(self.param) is not self.node:
            raise RuntimeError(
                f"{self.name} was moved to another device or type after this compression was made, "
                "which no longer sees its samples: make the compression anew then, and load its "
                "state_dict"
            )

    def record(self, use: Use) -> None:
        """Keeps a use in a backward pass until the gradient comes."""
        # torch's checkpointing does the same: a pass that failed leaves uses behind.
        if self.task != torch._C._current_graph_task_id():
            self.task, self.uses = torch._C._current_graph_task_id(), []
            # torch.autograd.grad() may be after other gradients only: then nothing else clears
            # these.
            torch.autograd.Variable._execution_engine.queue_callback(self.uses.clear)
        # It is not detached, so autograd sees that its memory is in use.
        self.uses.append(use)

    def add_uses(self, total: Tensor) -> int:
        """Adds the squares to `total`; returns the number of samples."""
        uses = list(self.uses) if self.task == torch._C._current_graph_task_id() else []
        self.uses.clear()
        if not uses:
            raise ValueError(
                f"{self.name} has a gradient that came through no call of its module: {_ADVICE} "
                "(torch.compile must come after the compression)"
            )
        if len({len(use.delta) for use in uses}) > 1:
            raise ValueError(
                f"{self.name} is used for batches of different sizes in one backward pass: "
                f"{_ADVICE}"
            )
        add_squares(total, uses)
        return len(uses[0].delta)


def _node_of(param: Tensor) -> Any:
    """The node that adds to a parameter's gradient. It stays as long as somebody keeps it, also
    while the parameter is frozen."""
    frozen = not param.requires_grad
    with torch.enable_grad():
        node = param.requires_grad_(True).view_as(param).grad_fn.next_functions[0][0]
    param.requires_grad_(not frozen)
    return node


class _Tap(torch.autograd.Function):
    """The identity on a module's output, in place. Autograd keeps, frees and recomputes the input
    like its own."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, x: Tensor, record: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mark_dirty(output)
        ctx.record = record
        return output

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tuple[Tensor, None, None]:
        ctx.record(*ctx.saved_tensors, delta)
        return delta, None, None


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
    if any(map(is_shard, needing.values())):
        raise ValueError(
            f"{compressor.id}: moments={moments} are of whole gradients, and fully_shard hands "
            "over shards: take moments=minibatch, or compress updates by UpdateOptimizer"
        )
    return Moments(moments, needing) if needing else None


def _weakly(method: Callable) -> Callable:
    """A hook that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call
