"""The uses of parameters in a backward pass, of which samples' squares are made: recorded by
modules' outputs, and by functions of ours in the place of torch's."""

import functools
import types
import weakref
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import recurrent, samples

ADVICE = "leave it dense (exclude=…), or choose moments=microbatch"
# All collectors of samples.
collectors: "weakref.WeakSet[Any]" = weakref.WeakSet()


class Watched:
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

    def refuse_moved(self) -> None:
        """Raises RuntimeError where another node adds to the gradient now: nothing is collected."""
        if _node_of(self.param) is not self.node:
            raise RuntimeError(
                f"{self.name} was moved to another device or type after this compression was made, "
                "which no longer sees its samples: make the compression anew then, and load its "
                "state_dict"
            )

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
                f"{self.name} has a gradient that came through no call of its module: {ADVICE}. "
                f"(Recurrent and attention layers need "
                "their inputs by position; torch.compile must come after the compression.)"
            )
        if len({len(use.delta) for use in uses}) > 1:
            raise ValueError(
                f"{self.name} is used for batches of different sizes in one backward pass: {ADVICE}"
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
    with torch.enable_grad():
        node = param.requires_grad_(True).view_as(param).grad_fn.next_functions[0][0]
    param.requires_grad_(not frozen)
    return node


class Tap(torch.autograd.Function):
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
References = weakref.WeakSet[Watched]


def record_module(
    module: nn.Module,
    uses: List[Tuple[str, References]],
    layout: Optional[int],
    x: Tensor,
    delta: Tensor,
) -> None:
    for name, watchers in uses:
        _record(watchers, samples.of_module(module, name, layout, x, delta))


def followed(arg: Any) -> Any:
    if isinstance(arg, nn.utils.rnn.PackedSequence):
        return arg._replace(data=followed(arg.data))
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
    found = (collector.watched.get(id(param)) for collector in list(collectors))
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
                Tap.apply(
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
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
FOLLOWED = {*RECURRENT, nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d}
