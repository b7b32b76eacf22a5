"""The gradients of single samples, and the sums of their squares, by kind of layer."""

import concurrent.futures
import dataclasses
import functools
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad as convolution_gradients

from .. import kernels

_WORTH_A_THREAD = 1 << 22  # multiplications
# Started when they are first needed.
_threads = concurrent.futures.ThreadPoolExecutor(thread_name_prefix="horovod_compress")
# So many numbers of single samples' gradients at a time: they stay in the cache.
_BLOCK = 1 << 20


@dataclasses.dataclass(eq=False)
class Use:
    """A use of a parameter: an input and the gradient of the output, both (samples, …).

    gradients: (input, float32 δ) -> (samples, *shape of the parameter's rows). add: (total, input,
    float32 δ): adds the squares where this use is the only one. None: `gradients` brings them.
    rows: (first, end) of the parameter's rows, where it is not used as a whole. sorted: whether
    samples are sorted by length, as those of packed sequences are, and not as in the batch.
    """

    gradients: Callable[[Tensor, Tensor], Tensor]
    x: Tensor
    delta: Tensor
    add: Optional[Callable[[Tensor, Tensor, Tensor], Any]] = None
    rows: Optional[tuple] = None
    sorted: bool = False


def of_module(module: Any, name: str, layout: Optional[int], x: Tensor, delta: Tensor) -> Use:
    """The use of a parameter by a module of KINDS. layout: None, or the dimension of samples where
    inputs of two have none."""
    gradients, dims = KINDS[type(module)]
    if x.dim() == (
        2 if layout is not None else len(module.normalized_shape) if dims is None else dims
    ):
        x, delta = x[None], delta[None]
    elif layout:
        x, delta = x.transpose(0, layout), delta.transpose(0, layout)
    if gradients is None:
        x, delta = (t.flatten(1, -2) if t.dim() > 2 else t[:, None] for t in (x, delta))
        return of_product(x if name == "weight" else None, delta)
    add = _ADDS.get(gradients) if name == "weight" else None
    return Use(
        functools.partial(gradients, module, name), x, delta, add and functools.partial(add, module)
    )


def of_product(
    x: Optional[Tensor],
    delta: Tensor,
    rows: Optional[tuple] = None,
    add: Optional[Callable] = None,
    sorted: bool = False,
) -> Use:
    """The use of a weight in x (b, p, i) @ weight.T, or of a bias, where x is None. delta is (b, p,
    o)."""
    if x is None:
        return Use(lambda _, delta: delta.sum(1), delta, delta, add, rows, sorted)
    return Use(_of_weight, x, delta, add or _add_product, rows, sorted)


def add_squares(total: Tensor, uses: List[Use]) -> None:
    """Adds the squares of single samples' gradients, summed over samples, to `total`; a sample's
    gradient is the sum over uses."""
    if len(uses) > 1 and any(use.sorted for use in uses):
        raise ValueError(
            "a layer is used for packed sequences more than once in one backward pass: their "
            "samples have no common order"
        )
    # Together they are one use with more places.
    if len(uses) > 1 and all(use.gradients is _of_weight for use in uses):
        uses = [
            of_product(
                torch.cat([use.x for use in uses], 1), torch.cat([use.delta for use in uses], 1)
            )
        ]
    if len(uses) == 1 and uses[0].add:
        uses[0].add(total, uses[0].x, uses[0].delta.float())
        return
    block = max(1, _BLOCK // max(1, total.numel()))
    for z in range(0, len(uses[0].delta), block):
        parts = [
            use.gradients(use.x[z : z + block], use.delta[z : z + block].float()) for use in uses
        ]
        for gradient in functools.reduce(torch.add, parts):
            total.addcmul_(gradient, gradient)


def gradient_and_squares(
    weight: Tensor, x: Optional[Tensor], delta: Tensor
) -> Tuple[Tensor, Optional[Callable]]:
    """(gradient, add) of a product's weight, or bias, where x is None; as in `of_product`."""
    if x is None:
        by_sample = delta.float().sum(1)
        return by_sample.sum(0).to(weight.dtype), lambda total, *_: total.add_(
            by_sample.square().sum(0)
        )
    if not _by_kernel(weight):
        return torch.einsum("bpo,bpi->oi", delta, x), None
    gradient, squares = torch.zeros_like(weight), torch.zeros_like(weight)
    _kernel(delta, x, squares, gradient)
    return gradient, lambda total, *_: total.add_(squares)


def _by_kernel(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def _kernel(left: Tensor, right: Tensor, *sums: Tensor) -> None:
    """Runs the kernels' add_sample_squares, in as many threads as torch has."""
    a, b, *totals = (tensor.detach().numpy() for tensor in (left, right, *sums))
    # The first of a's dimensions that is one of the product.
    d = b.ndim - 1
    parts = min(torch.get_num_threads(), a.shape[d], 1 + a.size * b.shape[-1] // _WORTH_A_THREAD)
    rows = [
        slice(a.shape[d] * part // parts, a.shape[d] * (part + 1) // parts) for part in range(parts)
    ]
    totals = [array.reshape(a.shape[d], -1) for array in totals]

    def work(part: slice) -> None:
        kernels.of(a).add_sample_squares(
            a[(slice(None),) * d + (part,)], b, *(array[part].reshape(-1) for array in totals)
        )

    list((_threads.map if parts > 1 else map)(work, rows))


def _of_weight(x: Tensor, delta: Tensor) -> Tensor:
    return torch.einsum("bpo,bpi->boi", delta, x.float())


def _add_product(total: Tensor, x: Tensor, delta: Tensor) -> None:
    if x.shape[1] == 1:
        total.addmm_(delta[:, 0].square().T, x[:, 0].float().square())
    elif _by_kernel(total):
        _kernel(delta, x.float(), total)
    else:
        add_squares(total, [Use(_of_weight, x, delta)])


# The gradients of single samples: functions of a module, a parameter's name in it, the module's
# input (b, …), and the float32 gradient of its output (b, …), with the result (b, *shape of the
# parameter).


def _padded(module: Any, x: Tensor) -> Tensor:
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x.float(), module._reversed_padding_repeated_twice, mode=mode)


def _conv(module: Any, name: str, x: Tensor, delta: Tensor) -> Tensor:
    if name == "bias":
        return _of_channels(delta)
    options = {"stride": module.stride, "dilation": module.dilation, "groups": module.groups}
    return _of_convolution(module.weight.shape, options, _padded(module, x), delta)


def _of_convolution(
    shape: Sequence[int], options: Dict[str, Any], x: Tensor, delta: Tensor
) -> Tensor:
    gradient = getattr(convolution_gradients, f"conv{x.dim() - 2}d_weight")
    return torch.stack(
        [gradient(x[z, None], shape, delta[z, None], **options) for z in range(len(x))]
    )


def _add_conv(module: Any, total: Tensor, x: Tensor, delta: Tensor) -> None:
    if module.groups > 1 or not _by_kernel(total):
        add_squares(total, [Use(functools.partial(_conv, module, "weight"), x, delta)])
        return
    squares = total.new_zeros(total[0].numel(), len(total))
    _kernel(
        _windows(_padded(module, x), total, module.stride, module.dilation),
        delta.movedim(1, -1),
        squares,
    )
    total.add_(squares.T.reshape(total.shape))


def _windows(x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """What a convolution's weight is multiplied with at each place, (b, places …, channels, …): a
    view of the padded input."""
    dims = weight.dim() - 2
    for d, (size, shift, gap) in enumerate(zip(weight.shape[2:], stride, dilation), 2):
        x = x.unfold(d, gap * (size - 1) + 1, shift)[..., ::gap]
    return x.movedim(1, 1 + dims)


class Convolution(torch.autograd.Function):
    """torch's convolution of float32 on the CPU, in one group, whose weight's gradient is found
    sample by sample: the squares come with it. record(Use) is called in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        stride: List[int],
        padding: List[int],
        dilation: List[int],
        record: Callable[[Use], None],
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.record = (stride, padding, dilation), record
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0], 1)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tuple[Optional[Tensor], ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation = ctx.options
        wanted = ctx.needs_input_grad[:3]
        # A gradient that is differentiated again is torch's.
        again = torch.is_grad_enabled()
        dx, gradient, _ = torch.ops.aten.convolution_backward(
            # Asked for the bias's, it would find the weight's too.
            delta,
            x,
            weight,
            None,
            stride,
            padding,
            dilation,
            False,
            [0],
            1,
            [wanted[0], wanted[1] and again, False],
        )
        d_bias = _of_channels(delta).sum(0) if wanted[2] else None
        if wanted[1]:
            padded = F.pad(x.detach(), [n for n in reversed(padding) for _ in range(2)])
            squares, sums = weight.new_zeros(2, weight[0].numel(), len(weight))
            _kernel(_windows(padded, weight, stride, dilation), delta.movedim(1, -1), squares, sums)
            gradient = gradient if again else sums.T.reshape(weight.shape)
            gradients = functools.partial(
                _of_convolution,
                weight.shape,
                {"stride": stride, "padding": padding, "dilation": dilation},
            )
            ctx.record(
                Use(
                    gradients,
                    x,
                    delta,
                    lambda total, *_: total.add_(squares.T.reshape(total.shape)),
                )
            )
        return dx, gradient, d_bias, None, None, None, None


def _embedding(module: Any, name: str, x: Tensor, delta: Tensor) -> Tensor:
    rows, sums = _embedding_rows(module, x, delta)
    dense = delta.new_zeros(len(x) * module.num_embeddings, module.embedding_dim)
    dense[rows] = sums
    return dense.view(len(x), *module.weight.shape)


def _embedding_rows(module: Any, x: Tensor, delta: Tensor) -> Tuple[Tensor, Tensor]:
    """(rows, sums) of the gradient (b · num_embeddings, embedding_dim), where it is not zero."""
    sample = torch.arange(len(x), dtype=torch.int64, device=x.device)
    rows = x.reshape(len(x), -1) + module.num_embeddings * sample[:, None]
    kept = slice(None) if module.padding_idx is None else x.flatten() != module.padding_idx
    rows, place = rows.flatten()[kept].unique(return_inverse=True)
    sums = delta.new_zeros(len(rows), module.embedding_dim)
    return rows, sums.index_add_(0, place, delta.reshape(-1, module.embedding_dim)[kept])


def _add_embedding(module: Any, total: Tensor, x: Tensor, delta: Tensor) -> None:
    rows, sums = _embedding_rows(module, x, delta)
    total.index_add_(0, rows % module.num_embeddings, sums.square_())


def _layer_norm(module: Any, name: str, x: Tensor, delta: Tensor) -> Tensor:
    if name == "weight":
        normalize = F.layer_norm if type(module) is nn.LayerNorm else F.rms_norm
        delta = delta * normalize(x.float(), module.normalized_shape, eps=module.eps)
    return delta.reshape(len(delta), -1, *module.normalized_shape).sum(1)


def _group_norm(module: Any, name: str, x: Tensor, delta: Tensor) -> Tensor:
    if name == "weight":
        delta = delta * F.group_norm(
            x.float(), getattr(module, "num_groups", x.shape[1]), eps=module.eps
        )
    return _of_channels(delta)


def _of_channels(delta: Tensor) -> Tensor:
    return delta.reshape(*delta.shape[:2], -1).sum(2)


# {class: (gradients of single samples, or None for a product's, dimensions of an input without a
# batch)}
KINDS: Dict[type, Tuple[Optional[Callable], Optional[int]]] = {
    nn.Linear: (None, 1),
    # The output projection of attention.
    nn.modules.linear.NonDynamicallyQuantizableLinear: (None, 1),
    nn.Embedding: (_embedding, 0),
    nn.LayerNorm: (_layer_norm, None),  # as many as it normalizes
    nn.GroupNorm: (_group_norm, 1),
    **{getattr(nn, f"Conv{n}d"): (_conv, n + 1) for n in (1, 2, 3)},
    **{getattr(nn, f"InstanceNorm{n}d"): (_group_norm, n + 1) for n in (1, 2, 3)},
}
if hasattr(nn, "RMSNorm"):
    KINDS[nn.RMSNorm] = KINDS[nn.LayerNorm]
_ADDS = {_conv: _add_conv, _embedding: _add_embedding}
