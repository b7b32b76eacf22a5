"""Sums over samples of squared gradients: what a compressor's `moments=microbatch` and
`moments=per_sample` ask for."""

import functools
import types
import weakref
from typing import Any, Callable, Dict, List, MutableMapping, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..compressors.base import Compressor
from ..plan import compressor_for
from . import recurrent, samples
from .search import objects_of

_ADVICE = "leave it dense (exclude=…), or choose moments=microbatch"
# With which samples cannot be told apart.
_OPTIONS = ("sparse", "scale_grad_by_freq", "track_running_stats")
_live: "weakref.WeakSet[Moments]" = weakref.WeakSet()  # all collectors of samples


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
        self._params = {name: _Param(name, param) for name, param in params.items()}
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
            hooks.append(
                register_module_forward_pre_hook(
                    torch.compiler.disable(_weakly(self._before_forward))
                )
            )
            hooks.append(
                register_module_forward_hook(
                    torch.compiler.disable(_weakly(self._after_forward)), with_kwargs=True
                )
            )
            _live.add(self)
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    def take(self, name: str) -> Optional[np.ndarray]:
        """The flat float32 sums of a parameter since they were last asked for; None if it got no
        gradient. The next gradient reuses their memory."""
        watched = self._params.get(name)
        if watched is None or watched.total is None:
            return None
        watched.spare, watched.total = watched.total, None
        return watched.spare.cpu().numpy().reshape(-1)

    def _before_forward(self, module: nn.Module, args: tuple) -> Optional[tuple]:
        """Has the functions of torch's that the forward pass of such a layer calls end in
        `_Followed`."""
        if (
            type(module) not in _FOLLOWED
            or module not in self._modules
            or not torch.is_grad_enabled()
        ):
            return None
        # Attention looks whether key, value and query are the same.
        seen: Dict[int, Any] = {}
        return tuple(seen.setdefault(id(arg), _followed(arg)) for arg in args)

    def _after_forward(
        self, module: nn.Module, args: tuple, kwargs: Dict[str, Any], output: Any
    ) -> None:
        """Makes the backward pass through a module's output record the uses of its parameters."""
        if type(module) not in samples.KINDS:
            return
        (x,) = *args, *kwargs.values()
        owned = self._modules.get(module, ())
        uses = [
            (name, References([watched]))
            for watched, name in owned
            if watched.param.requires_grad and not watched.followed
        ]
        for watched, _ in owned:
            watched.followed = False
        if uses and output.requires_grad:
            _Tap.apply(
                output,
                x.detach(),
                functools.partial(_record_module, module, uses, self._layouts.get(module)),
            )

    @torch.no_grad()
    def _on_gradient(self, watched: "_Param", grads: Sequence[Optional[Tensor]]) -> None:
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

    def _agree(self, watched: "_Param", batch: int) -> None:
        """All parameters must mean the same samples: elsewhere a batch's first dimension is not the
        samples'."""
        if self._batch[0] != torch._C._current_graph_task_id():
            self._batch = torch._C._current_graph_task_id(), batch, watched.name
        _, others, name = self._batch
        if batch != others:
            raise ValueError(
                f"{watched.name} is used for {batch} samples and {name} for {others} in one "
                f"backward pass: samples are "
                f"told apart by the first dimension of what a module gets; {_ADVICE}"
            )


def moments_of(compressor: Compressor, params: Dict[str, Tensor]) -> Optional[Moments]:
    """The collector of squared gradients; None where no parameter's compressor needs one, as none
    does that asks for a minibatch's."""
    moments = getattr(compressor, "moments", "minibatch")
    if moments == "minibatch":
        return None
    chosen = {
        name: compressor_for(compressor, name, tuple(param.shape)) for name, param in params.items()
    }
    needing = {
        name: param
        for name, param in params.items()
        if getattr(chosen[name], "moments", None) == moments
    }
    return Moments(moments, needing) if needing else None


def _weakly(method: Callable) -> Callable:
    """A hook that calls a method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    return call


class _Param:
    """What is collected of one parameter."""

    def __init__(self, name: str, param: Tensor) -> None:
        self.name, self.param = name, param
        self.node = _node_of(param)
        self.total: Optional[Tensor] = None  # the sums, once there are some
        self.spare: Optional[Tensor] = None  # the memory of the sums
        # The backward pass that `uses` are of.
        self.task: Optional[int] = None
        self.uses: List[samples.Use] = []
        # Whether `_convolution` records its use in the forward pass that is under way.
        self.followed = False

    def record(self, use: samples.Use) -> None:
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
                f"{self.name} has a gradient that came through no call of its module: {_ADVICE}. "
                f"(Recurrent and attention layers need "
                "their inputs by position; torch.compile must come after the compression.)"
            )
        if len({len(use.delta) for use in uses}) > 1:
            raise ValueError(
                f"{self.name} is used for batches of different sizes in one backward pass: "
                f"{_ADVICE}"
            )
        # Rows are all of them, or disjoint.
        for rows in {use.rows for use in uses}:
            samples.add_squares(
                total[slice(*rows)] if rows else total, [use for use in uses if use.rows == rows]
            )
        return len(uses[0].delta)


def _node_of(param: Tensor) -> Any:
    """The node that adds to a parameter's gradient. It stays as long as somebody keeps it, also
    while the parameter is frozen."""
    frozen = not param.requires_grad
    node = torch.autograd.graph.get_gradient_edge(param.requires_grad_(True)).node
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


# What collectors collect, as long as they live, whatever autograd keeps.
References = weakref.WeakSet[_Param]


def _record_module(
    module: nn.Module,
    uses: List[Tuple[str, References]],
    layout: Optional[int],
    x: Tensor,
    delta: Tensor,
) -> None:
    for name, watchers in uses:
        _record(watchers, samples.of_module(module, name, layout, x, delta))


# -- torch's functions that layers call, and ours in their place, in which samples can be told apart


def _followed(arg: Any) -> Any:
    if isinstance(arg, nn.utils.rnn.PackedSequence):
        return arg._replace(data=_followed(arg.data))
    return (
        arg.as_subclass(_Followed)
        if isinstance(arg, Tensor) and arg.is_floating_point() and not isinstance(arg, _Followed)
        else arg
    )


class _Followed(Tensor):
    """An input of a layer that calls one of our functions instead of torch's."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable,
        types: Any,
        args: tuple = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        ours = _OURS.get(function)
        if ours is None:
            return super().__torch_function__(function, types, args, kwargs or {})
        return ours(*_plain(args), **{key: _plain(value) for key, value in (kwargs or {}).items()})


def _plain(arg: Any) -> Any:
    if isinstance(arg, (tuple, list)):
        return type(arg)(_plain(each) for each in arg)
    return arg.as_subclass(Tensor) if isinstance(arg, _Followed) else arg


def _watchers(param: Optional[Tensor]) -> References:
    """What collectors collect of a parameter: nothing of one that has no gradients."""
    found = (collector.watched.get(id(param)) for collector in list(_live))
    return References(
        watched for watched in found if watched is not None and watched.param.requires_grad
    )


def _record(watchers: References, use: samples.Use) -> None:
    for watched in list(watchers):
        watched.record(use)


def _recurrent_gradient(weight: Tensor, x: Optional[Tensor], delta: Tensor, packed: bool) -> Tensor:
    """The gradient of a recurrent layer's weight, which comes with the sum of the squares."""
    gradient, add = samples.gradient_and_squares(weight, x, delta)
    _record(_watchers(weight), samples.of_product(x, delta, add=add, sorted=packed))
    return gradient


# torch's function calls has_torch_function first, by which it would hand itself, and not the
# products in it, to a mode.
_torchs: Any = F.multi_head_attention_forward
_multi_head_attention = types.FunctionType(
    _torchs.__code__, {**vars(F), "has_torch_function": lambda _: False}, None, _torchs.__defaults__
)


def _convolution(
    torchs: Callable,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Finds the weight's gradient once, where torch's function followed by the module's hook would
    find it twice."""
    watchers = _watchers(weight)
    plain = (
        x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
    )
    if (
        not watchers
        or groups > 1
        or isinstance(padding, str)
        or not plain
        or x.dim() < weight.dim()
    ):
        return torchs(x, weight, bias, stride, padding, dilation, groups)
    dims = weight.dim() - 2
    stride, padding, dilation = (
        [n] * dims if isinstance(n, int) else list(n) for n in (stride, padding, dilation)
    )
    output = samples.Convolution.apply(
        x, weight, bias, stride, padding, dilation, functools.partial(_record, watchers)
    )
    for watched in list(watchers):
        watched.followed = True
    return output


def _attention(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    with _Projections(query.shape[1] if query.dim() == 3 else 1, query.shape[-1]):
        return _multi_head_attention(query, *args, **kwargs)


class _Projections(torch.overrides.TorchFunctionMode):
    """Within attention: samples are the second dimension, alone or, in two dimensions, the inner
    part of the first."""

    def __init__(self, batch: int, width: int) -> None:
        super().__init__()
        self._batch, self._width = batch, width

    def __torch_function__(
        self,
        function: Callable,
        types: Any,
        args: tuple = (),
        kwargs: Optional[Dict[str, Any]] = None,
    ) -> Any:
        output = function(*args, **(kwargs or {}))
        if function is F.linear and output.requires_grad:
            x, *parts = args
            wholes = [
                (part, part if part is None or part._base is None else part._base) for part in parts
            ]
            uses = [
                (part, whole, watchers) for part, whole in wholes if (watchers := _watchers(whole))
            ]
            if uses:
                _Tap.apply(
                    output,
                    x.detach(),
                    functools.partial(_record_projection, self._batch, self._width, uses),
                )
        return output


def _record_projection(
    batch: int, width: int, uses: List[Tuple[Tensor, Tensor, References]], x: Tensor, delta: Tensor
) -> None:
    x, delta = (t.reshape(-1, batch, t.shape[-1]).transpose(0, 1) for t in (x, delta))
    for part, whole, watchers in uses:
        first = (part.storage_offset() - whole.storage_offset()) // part.stride(0)
        # The projections of query, key and value come as one product, two or three: here always as
        # three.
        for row in range(0, len(part), width):
            rows = first + row, first + row + width
            _record(
                watchers,
                samples.of_product(
                    None if part.dim() == 1 else x, delta[..., row : row + width], rows
                ),
            )


_OURS: Dict[Callable, Callable] = {
    **{
        function: functools.partial(ours, _recurrent_gradient)
        for function, ours in recurrent.FUNCTIONS.items()
    },
    **{
        torchs: functools.partial(_convolution, torchs)
        for torchs in (torch.conv1d, torch.conv2d, torch.conv3d)
    },
    F.multi_head_attention_forward: _attention,
}
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
_FOLLOWED = {*_RECURRENT, nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d}
_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)


def _modules_of(
    by_id: Dict[int, _Param],
) -> Tuple[MutableMapping[nn.Module, List[Tuple[_Param, str]]], MutableMapping[nn.Module, int]]:
    """({module: [(_Param, its name in the module)]}, {module in a transformer: the dimension of its
    samples}). Nobody hands modules over, so the process is searched."""
    modules: MutableMapping[nn.Module, List[Tuple[_Param, str]]] = weakref.WeakKeyDictionary()
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
            f"moments=per_sample cannot tell samples apart in {', '.join(unknown)}: {_ADVICE}"
        )
    return modules, layouts


def _is_known(module: nn.Module, name: str) -> bool:
    """Whether samples can be told apart in the parameter of that name. A subclass may use its
    parameters otherwise, so classes are exact."""
    if type(module) in _RECURRENT:
        return True
    if type(module) is nn.MultiheadAttention:
        return name not in ("bias_k", "bias_v")
    return (
        type(module) in samples.KINDS
        and name in ("weight", "bias")
        and not any(getattr(module, o, False) for o in _OPTIONS)
    )
