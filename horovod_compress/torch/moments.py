"""Sums over samples of squared gradients: what a compressor's `moments=microbatch` and `moments=per_sample` ask for."""
import functools
import gc
import types
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from . import recurrent, samples

_ADVICE = "leave it dense (exclude=…), or choose moments=microbatch"
_OPTIONS = ("sparse", "scale_grad_by_freq", "track_running_stats")  # with which samples cannot be told apart
_live = weakref.WeakSet()  # all collectors of samples


class Moments:
    """Collects Σ_z g_z² of parameters, where the g_z add up to the gradient that Horovod submits.

    moments: "microbatch": z is one backward pass. "per_sample": z is an index into the batch: the first dimension of what the
        parameter's module is called with; recurrent, attention and transformer layers know their own. Where calls share a
        parameter, g_z is the sum over them. What else reaches a parameter, such as a penalty on weights, is not seen.
    params: {name: parameter}. Their modules are found by searching the process.

    The model is left as it is, and the hooks go with this object. While it lives, recurrent layers in training run as
    `recurrent.py` has them, and convolutions find their weights' gradients sample by sample. Raises ValueError for parameters of
    modules in which samples cannot be told apart (BatchNorm), or of classes that are not known here.
    """

    def __init__(self, moments, params):
        self._params = {name: _Param(name, param) for name, param in params.items()}
        self._by_id = {id(watched.param): watched for watched in self._params.values()}
        self._per_sample = moments == "per_sample"
        self._modules, self._layouts = _modules_of(self._by_id) if self._per_sample else ({}, {})
        self._task, self._first = None, None  # of one backward pass: (samples, name of a parameter that was used with as many)
        me = weakref.ref(self)
        # On the node that adds to param.grad: a pass's gradient comes there, summed over all uses, ahead of Horovod.
        hooks = [w.node.register_prehook(functools.partial(_on_gradient, me, w)) for w in self._params.values()]
        if self._per_sample:  # hooks for all modules: hooks of their own would be copied and pickled with them
            hooks.append(register_module_forward_pre_hook(functools.partial(_before_call, me)))
            hooks.append(register_module_forward_hook(functools.partial(_on_call, me), with_kwargs=True))
            _live.add(self)
        for hook in hooks:
            weakref.finalize(self, hook.remove)

    def take(self, name):
        """The flat float32 sums of a parameter since the last call; None if no gradient has come by. Their memory is the next
        step's, once a gradient comes by again."""
        watched = self._params.get(name)
        if watched is None or watched.total is None:
            return None
        watched.spare, watched.total = watched.total, None
        return watched.spare.cpu().numpy().reshape(-1)

    def watches(self, module):
        return module in self._modules

    def watched(self, param):
        """The _Param of a parameter that is asked for and has gradients."""
        watched = self._by_id.get(id(param))
        return watched if watched is not None and param.requires_grad else None

    def on_call(self, module, x, output):
        """A forward pass through a module: leads its backward pass to `record`."""
        its = [(w, own_name) for w, own_name in self._modules.get(module, ()) if w.param.requires_grad and not w.followed]
        for watched, _ in self._modules.get(module, ()):
            watched.followed = False
        if its and output.requires_grad:
            _Tap.apply(output, x.detach(), functools.partial(_record_call, weakref.ref(self), module, its, self._layouts.get(module)))

    def record(self, watched, use):
        """A use of a parameter in a backward pass: kept until its gradient comes."""
        task = torch._C._current_graph_task_id()  # as torch's checkpointing does: a pass that failed leaves uses behind
        if watched.task != task:
            watched.task, watched.uses = task, []
            # torch.autograd.grad() may be after other gradients only: then nobody else clears these.
            torch.autograd.Variable._execution_engine.queue_callback(watched.uses.clear)
        watched.uses.append(use)  # undetached: autograd sees that its memory is in use

    @torch.no_grad()
    def on_gradient(self, watched, grad):
        """A parameter's gradient of one backward pass, which has been through all calls."""
        before = watched.param.grad
        if watched.total is None or before is None or not before.any():  # zeroed without a step: the sums are void
            if watched.spare is None:
                watched.spare = torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
            watched.total = watched.spare.zero_()
        with torch.autocast(grad.device.type, enabled=False):
            if self._per_sample:
                self._agree(watched, watched.add_uses())
            else:
                grad = (grad.to_dense() if grad.is_sparse else grad).float()
                watched.total.addcmul_(grad, grad)

    def _agree(self, watched, batch):
        """All parameters must mean the same samples: elsewhere a batch's first dimension is not the samples'."""
        task = torch._C._current_graph_task_id()
        if self._task != task:
            self._task, self._first = task, (batch, watched.name)
        if batch != self._first[0]:
            raise ValueError(
                f"{watched.name} is used for {batch} samples and {self._first[1]} for {self._first[0]} in one backward pass: samples are "
                f"told apart by the first dimension of what a module gets; {_ADVICE}"
            )


class _Param:
    """What is collected of one parameter."""

    def __init__(self, name, param):
        self.name, self.param = name, param
        self.node = torch.autograd.graph.get_gradient_edge(param).node
        self.total = None  # the sums, once there are some
        self.spare = None  # their memory
        self.task, self.uses = None, []  # samples.Use of one backward pass
        self.followed = False  # in the module's call that is under way: its use is known already

    def add_uses(self):
        """Adds the squares; returns the number of samples."""
        uses = list(self.uses) if self.task == torch._C._current_graph_task_id() else []
        self.uses.clear()
        if not uses:
            raise ValueError(
                f"{self.name} has a gradient that came through no call of its module: {_ADVICE}. (Recurrent and attention layers need "
                "their inputs by position; torch.compile must come after the compression.)"
            )
        if len({use.batch for use in uses}) > 1:
            raise ValueError(f"{self.name} is used for batches of different sizes in one backward pass: {_ADVICE}")
        for rows in {use.rows for use in uses}:  # all, or disjoint ones
            samples.add_squares(self.total[slice(*rows)] if rows else self.total, [use for use in uses if use.rows == rows])
        return uses[0].batch


class _Tap(torch.autograd.Function):
    """The identity on a module's output, in place. Autograd keeps, frees and recomputes the input like its own."""

    @staticmethod
    def forward(ctx, output, x, record):
        ctx.save_for_backward(x)
        ctx.mark_dirty(output)
        ctx.record = record
        return output

    @staticmethod
    def backward(ctx, delta):
        ctx.record(*ctx.saved_tensors, delta)
        return delta, None, None


def _on_gradient(collector, watched, grads):
    if collector() is not None and grads[0] is not None:
        collector().on_gradient(watched, grads[0])


@torch.compiler.disable  # a graph break; torch.compile(model, fullgraph=True) says so
def _on_call(collector, module, args, kwargs, output):
    if collector() is not None and type(module) in samples.KINDS:
        collector().on_call(module, *args, *kwargs.values(), output)


def _record_call(collector, module, its, layout, x, delta):
    if collector() is not None:
        for watched, own_name in its:
            collector().record(watched, samples.of_call(module, own_name, layout, x, delta))


# -- functions of torch's, called by layers, in which samples are told apart by our own -----------------------


@torch.compiler.disable
def _before_call(collector, module, args):
    """Has the functions that the forward pass of such a layer calls end in `_Followed`."""
    if collector() is None or type(module) not in _FOLLOWED or not collector().watches(module) or not torch.is_grad_enabled():
        return None
    seen = {}  # attention looks whether key, value and query are the same
    return tuple(seen.setdefault(id(arg), _followed(arg)) for arg in args)


def _followed(arg):
    if isinstance(arg, nn.utils.rnn.PackedSequence):
        return arg._replace(data=_followed(arg.data))
    is_input = isinstance(arg, torch.Tensor) and arg.is_floating_point() and not isinstance(arg, _Followed)
    return arg.as_subclass(_Followed) if is_input else arg


class _Followed(torch.Tensor):
    """An input of a layer that calls one of our functions instead of torch's."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        own = _OWN.get(function)
        if own is None:
            return super().__torch_function__(function, types, args, kwargs or {})
        plain = {key: _plain(value) for key, value in (kwargs or {}).items()}
        return own(*(_plain(arg) for arg in args), **plain)


def _plain(arg):
    if isinstance(arg, (tuple, list)):
        return type(arg)(_plain(each) for each in arg)
    return arg.as_subclass(torch.Tensor) if isinstance(arg, _Followed) else arg


def _watchers(param):
    return [(collector, watched) for collector in list(_live) if (watched := collector.watched(param)) is not None]


def _tell(weight, x, delta, packed):
    """The gradient of a recurrent layer's weight, whose squares are told to whom they concern."""
    gradient, add = samples.gradient_and_squares(weight, x, delta)
    for collector, watched in _watchers(weight):
        collector.record(watched, samples.of_product(x, delta, add=add, sorted=packed))
    return gradient


# torch's own, which would hand itself, and not the products within, to a mode: it asks has_torch_function first.
_multi_head_attention = types.FunctionType(
    F.multi_head_attention_forward.__code__, {**vars(F), "has_torch_function": lambda _: False}, None,
    F.multi_head_attention_forward.__defaults__,
)


def _convolution(own, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Where torch's own is followed by its module's hook instead, its gradient is found twice."""
    watchers = _watchers(weight)
    plain = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
    if not watchers or groups > 1 or isinstance(padding, str) or not plain or x.dim() < weight.dim():
        return own(x, weight, bias, stride, padding, dilation, groups)
    dims = weight.dim() - 2
    tell = functools.partial(_tell_convolution, [(weakref.ref(collector), watched) for collector, watched in watchers])
    stride, padding, dilation = ([n] * dims if isinstance(n, int) else list(n) for n in (stride, padding, dilation))
    output = samples.Convolution.apply(x, weight, bias, stride, padding, dilation, tell)
    for _, watched in watchers:
        watched.followed = True
    return output


def _tell_convolution(watchers, use):
    for collector, watched in watchers:
        if collector() is not None:
            collector().record(watched, use)


def _attention(query, *args, **kwargs):
    with _Projections(query.shape[1] if query.dim() == 3 else 1, query.shape[-1]):
        return _multi_head_attention(query, *args, **kwargs)


class _Projections(torch.overrides.TorchFunctionMode):
    """Within attention: samples are the second dimension, alone or, in two dimensions, the inner part of the first."""

    def __init__(self, batch, width):
        super().__init__()
        self._batch, self._width = batch, width

    def __torch_function__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if function is F.linear and output.requires_grad:
            x, *parts = args
            wholes = [part if part is None or part._base is None else part._base for part in parts]
            its = [
                (part, whole, weakref.ref(collector), watched) for part, whole in zip(parts, wholes)
                for collector, watched in _watchers(whole)
            ]
            if its:
                _Tap.apply(output, x.detach(), functools.partial(_record_projection, self._batch, self._width, its))
        return output


def _record_projection(batch, width, its, x, delta):
    x, delta = (t.reshape(-1, batch, t.shape[-1]).transpose(0, 1) for t in (x, delta))
    for part, whole, collector, watched in its:
        first = (part.storage_offset() - whole.storage_offset()) // part.stride(0)
        # The projections of query, key and value come as one product, two or three: here always as three.
        for row in range(0, len(part), width) if collector() is not None else ():
            rows = first + row, first + row + width
            use = samples.of_product(None if part.dim() == 1 else x, delta[..., row : row + width], rows)
            collector().record(watched, use)


_OWN = {function: functools.partial(own, _tell) for function, own in recurrent.FUNCTIONS.items()}
_OWN |= {own: functools.partial(_convolution, own) for own in (torch.conv1d, torch.conv2d, torch.conv3d)}
_OWN[F.multi_head_attention_forward] = _attention
_RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)
_FOLLOWED = {*_RECURRENT, nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d}
_TRANSFORMERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_STACKS = (nn.TransformerEncoder, nn.TransformerDecoder)


def _modules_of(by_id):
    """({module: [(_Param, its name in the module)]}, {module in a transformer: the dimension of its samples}).

    Nobody hands modules over, so the process is searched.
    """
    modules, layouts, found, unknown = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary(), set(), []
    for module in [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]:
        if isinstance(module, _TRANSFORMERS + _STACKS):
            layer = module.layers[0] if isinstance(module, _STACKS) else module
            layouts.update((inner, 0 if layer.self_attn.batch_first else 1) for inner in module.modules())
        for own_name, param in vars(module).get("_parameters", {}).items():
            if id(param) in by_id:
                watched = by_id[id(param)]
                found.add(watched)
                modules.setdefault(module, []).append((watched, own_name))
                if not _is_known(module, own_name):
                    option = next((f", {option}" for option in _OPTIONS if getattr(module, option, False)), "")
                    path = watched.name.rpartition(".")[0] or "the model"
                    unknown.append(f"{watched.name} (of {path}, {type(module).__name__}{option})")
    unknown += [f"{watched.name} (which no module owns)" for watched in by_id.values() if watched not in found]
    if unknown:
        raise ValueError(f"moments=per_sample cannot tell samples apart in {', '.join(unknown)}: {_ADVICE}")
    return modules, layouts


def _is_known(module, own_name):
    """Of exact classes only: a subclass may use its parameters otherwise."""
    if type(module) in _RECURRENT:
        return True
    if type(module) is nn.MultiheadAttention:
        return own_name not in ("bias_k", "bias_v")
    return type(module) in samples.KINDS and own_name in ("weight", "bias") and not any(getattr(module, o, False) for o in _OPTIONS)
