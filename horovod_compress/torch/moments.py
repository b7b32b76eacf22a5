"""Sums over samples of squared gradients: what a compressor's `moments=microbatch` and `moments=per_sample` ask for."""
import functools
import gc
import weakref

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

_ADVICE = "leave it dense (exclude=…), or choose moments=microbatch"
_UNKNOWN_OPTIONS = ("sparse", "scale_grad_by_freq", "track_running_stats")
_BLOCK = 1 << 20  # so many numbers of single samples' gradients at a time: they stay in the cache


class Moments:
    """Collects Σ_z g_z² of parameters, where the g_z add up to the gradient that Horovod submits.

    moments: "microbatch": z is one backward pass. "per_sample": z is an index into the first dimension of what the
        parameter's module is called with; where calls share a parameter, g_z is the sum over them. What else reaches a
        parameter, such as a penalty on weights, is not seen.
    params: {name: parameter}. Their modules are found by searching the process.

    The model is left as it is, and the hooks go with this object. Raises ValueError for parameters of modules in which
    samples cannot be told apart (BatchNorm), or of classes that are not known here.
    """

    def __init__(self, moments, params):
        self._params = {name: _Param(name, param) for name, param in params.items()}
        self._per_sample = moments == "per_sample"
        self._modules = _modules_of(self._params.values()) if self._per_sample else {}
        me = weakref.ref(self)
        # On the node that adds to param.grad: a pass's gradient comes there, summed over all uses, ahead of Horovod.
        hooks = [w.node.register_prehook(functools.partial(_on_gradient, me, w)) for w in self._params.values()]
        if self._per_sample:  # one hook for all modules: hooks of their own would be copied and pickled with them
            hooks.append(register_module_forward_hook(functools.partial(_on_call, me), with_kwargs=True))
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

    def on_call(self, module, x, output):
        """A forward pass through a module: leads its backward pass to `on_use`."""
        if output.requires_grad and any(watched.param.requires_grad for watched, _ in self._modules.get(module, ())):
            _Tap.apply(output, x.detach(), module, weakref.ref(self))

    def on_use(self, module, x, delta):
        """A backward pass through a call: keeps its input and its output's gradient until the parameter's comes."""
        task = torch._C._current_graph_task_id()  # as torch's checkpointing does: a pass that failed leaves uses behind
        for watched, own_name in self._modules.get(module, ()):
            if watched.task != task:
                watched.task, watched.uses = task, []
                # torch.autograd.grad() may be after other gradients only: then nobody else clears these.
                torch.autograd.Variable._execution_engine.queue_callback(watched.uses.clear)
            watched.uses.append((module, own_name, x, delta))  # undetached: autograd sees that its memory is in use

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
                watched.add_uses()
            else:
                grad = (grad.to_dense() if grad.is_sparse else grad).float()
                watched.total.addcmul_(grad, grad)


class _Param:
    """What is collected of one parameter."""

    def __init__(self, name, param):
        self.name, self.param = name, param
        self.node = torch.autograd.graph.get_gradient_edge(param).node
        self.total = None  # the sums, once there are some
        self.spare = None  # their memory
        self.task, self.uses = None, []  # of one backward pass: (module, name in it, input, gradient of the output)

    def add_uses(self):
        uses = list(self.uses) if self.task == torch._C._current_graph_task_id() else []
        self.uses.clear()
        if not uses:
            raise ValueError(f"{self.name} has a gradient that came through no call of its module: {_ADVICE}")
        uses = [(module, own_name, *_batched(module, x, delta)) for module, own_name, x, delta in uses]
        if len({len(x) for _, _, x, _ in uses}) > 1:
            raise ValueError(f"{self.name} is used for batches of different sizes in one backward pass: {_ADVICE}")
        module, own_name, x, delta = uses[0]
        if len(uses) == 1 and isinstance(module, nn.Embedding):
            rows, sums = _embedding_rows(module, x, delta.float())
            self.total.index_add_(0, rows % module.num_embeddings, sums.square_())
        elif len(uses) == 1 and isinstance(module, nn.Linear) and own_name == "weight" and x.dim() == 2:
            self.total.addmm_(delta.float().square().T, x.float().square())
        else:
            block = max(1, _BLOCK // max(1, self.total.numel()))
            for z in range(0, len(x), block):
                parts = [_KINDS[type(m)][0](m, n, x[z : z + block], d[z : z + block].float()) for m, n, x, d in uses]
                for gradient in functools.reduce(torch.add, parts):
                    self.total.addcmul_(gradient, gradient)


class _Tap(torch.autograd.Function):
    """The identity on a module's output, in place. Autograd keeps, frees and recomputes the input like its own."""

    @staticmethod
    def forward(ctx, output, x, module, collector):
        ctx.save_for_backward(x)
        ctx.mark_dirty(output)
        ctx.module, ctx.collector = module, collector
        return output

    @staticmethod
    def backward(ctx, delta):
        collector = ctx.collector()
        if collector is not None:
            collector.on_use(ctx.module, *ctx.saved_tensors, delta)
        return delta, None, None, None


def _on_gradient(collector, watched, grads):
    if collector() is not None and grads[0] is not None:
        collector().on_gradient(watched, grads[0])


@torch.compiler.disable  # a graph break; torch.compile(model, fullgraph=True) says so
def _on_call(collector, module, args, kwargs, output):
    if collector() is not None and type(module) in _KINDS:
        collector().on_call(module, *args, *kwargs.values(), output)


def _modules_of(params):
    """{module: [(_Param, its name in the module)]}. Nobody hands modules over, so the process is searched."""
    by_id = {id(watched.param): watched for watched in params}
    modules, found, unknown = weakref.WeakKeyDictionary(), set(), []
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):
            continue
        for own_name, param in vars(module).get("_parameters", {}).items():
            if id(param) in by_id:
                watched = by_id[id(param)]
                found.add(watched)
                modules.setdefault(module, []).append((watched, own_name))
                option = next((f", {option}" for option in _UNKNOWN_OPTIONS if getattr(module, option, False)), "")
                if type(module) not in _KINDS or own_name not in ("weight", "bias") or option:
                    path = watched.name.rpartition(".")[0] or "the model"
                    unknown.append(f"{watched.name} (of {path}, {type(module).__name__}{option})")
    unknown += [f"{watched.name} (which no module owns)" for watched in params if watched not in found]
    if unknown:
        raise ValueError(f"moments=per_sample cannot tell samples apart in {', '.join(unknown)}: {_ADVICE}")
    return modules


# The gradients of single samples: functions of a module, a parameter's name in it, the module's input (b, …), and the
# float32 gradient of its output (b, …), with the result (b, *shape of the parameter).


def _linear(module, name, x, delta):
    delta = delta.reshape(len(delta), -1, module.out_features)
    if name == "bias":
        return delta.sum(1)
    return torch.einsum("bpo,bpi->boi", delta, x.float().reshape(len(x), -1, module.in_features))


def _conv(module, name, x, delta):
    if name == "bias":
        return _of_channels(delta)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x.float(), module._reversed_padding_repeated_twice, mode=mode)
    gradient = getattr(nn.grad, f"conv{x.dim() - 2}d_weight")
    options = {"stride": module.stride, "dilation": module.dilation, "groups": module.groups}
    # One by one is as fast as the whole batch, and several times faster than unfolding.
    return torch.stack([gradient(x[z, None], module.weight.shape, delta[z, None], **options) for z in range(len(x))])


def _embedding(module, name, x, delta):
    rows, sums = _embedding_rows(module, x, delta)
    dense = delta.new_zeros(len(x) * module.num_embeddings, module.embedding_dim)
    dense[rows] = sums
    return dense.view(len(x), *module.weight.shape)


def _embedding_rows(module, x, delta):
    """(rows, sums) of the gradient (b · num_embeddings, embedding_dim), where it is not zero."""
    rows = x.reshape(len(x), -1) + module.num_embeddings * torch.arange(len(x), device=x.device)[:, None]
    kept = slice(None) if module.padding_idx is None else x.flatten() != module.padding_idx
    rows, place = rows.flatten()[kept].unique(return_inverse=True)
    sums = delta.new_zeros(len(rows), module.embedding_dim)
    return rows, sums.index_add_(0, place, delta.reshape(-1, module.embedding_dim)[kept])


def _layer_norm(module, name, x, delta):
    if name == "weight":
        normalize = F.layer_norm if type(module) is nn.LayerNorm else F.rms_norm
        delta = delta * normalize(x.float(), module.normalized_shape, eps=module.eps)
    return delta.reshape(len(delta), -1, *module.normalized_shape).sum(1)


def _group_norm(module, name, x, delta):
    if name == "weight":
        delta = delta * F.group_norm(x.float(), getattr(module, "num_groups", x.shape[1]), eps=module.eps)
    return _of_channels(delta)


def _of_channels(delta):
    return delta.reshape(*delta.shape[:2], -1).sum(2)


# {class: (gradients of single samples, dimensions of an input without a batch)}. Exact classes: a subclass may use its
# parameters otherwise.
_KINDS = {
    nn.Linear: (_linear, 1),
    nn.Embedding: (_embedding, 0),
    nn.LayerNorm: (_layer_norm, None),  # as many as it normalizes
    nn.GroupNorm: (_group_norm, 1),
    **{getattr(nn, f"Conv{n}d"): (_conv, n + 1) for n in (1, 2, 3)},
    **{getattr(nn, f"InstanceNorm{n}d"): (_group_norm, n + 1) for n in (1, 2, 3)},
}
if hasattr(nn, "RMSNorm"):
    _KINDS[nn.RMSNorm] = _KINDS[nn.LayerNorm]


def _batched(module, x, delta):
    dims = _KINDS[type(module)][1]
    alone = x.dim() == (len(module.normalized_shape) if dims is None else dims)
    return (x[None], delta[None]) if alone else (x, delta)
