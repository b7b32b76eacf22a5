"""The gradients of single samples, and the sums of their squares, by kind of layer."""

import functools
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import grad as convolution_gradients

# Numbers of single samples' gradients at a time: they stay in the cache.
_BLOCK = 1 << 20


class Use(NamedTuple):
    """A use of a parameter: by a module of KINDS, under that name there. x: the module's input;
    delta: the gradient of its output; both (samples, …)."""

    module: Any
    name: str
    x: Tensor
    delta: Tensor


def use_of(module: Any, name: str, x: Tensor, delta: Tensor) -> Use:
    """The use of a parameter in a call of a module. An input without a batch is one sample."""
    dims = KINDS[type(module)][1]
    if x.dim() == (len(module.normalized_shape) if dims is None else dims):
        x, delta = x[None], delta[None]
    return Use(module, name, x, delta)


def add_squares(total: Tensor, uses: Sequence[Use]) -> None:
    """Adds the squares of single samples' gradients, summed over samples, to `total`; a sample's
    gradient is the sum over uses."""
    module, name, x, delta = uses[0]
    if len(uses) == 1 and type(module) is nn.Embedding:
        rows, sums = _embedding_rows(module, x, delta.float())
        total.index_add_(0, rows % module.num_embeddings, sums.square_())
    elif len(uses) == 1 and type(module) is nn.Linear and name == "weight" and x.dim() == 2:
        total.addmm_(delta.float().square().T, x.float().square())
    else:
        block = max(1, _BLOCK // max(1, total.numel()))
        for z in range(0, len(delta), block):
            parts = [
                KINDS[type(each.module)][0](
                    each.module,
                    each.name,
                    each.x[z : z + block],
                    each.delta[z : z + block].float(),
                )
                for each in uses
            ]
            for gradient in functools.reduce(torch.add, parts):
                total.addcmul_(gradient, gradient)


# The gradients of single samples: functions of a module, a parameter's name in it, the module's
# input (b, …), and the float32 gradient of its output (b, …), with the result (b, *shape of the
# parameter).


def _linear(module: Any, name: str, x: Tensor, delta: Tensor) -> Tensor:
    delta = delta.reshape(len(delta), -1, module.out_features)
    if name == "bias":
        return delta.sum(1)
    return torch.einsum("bpo,bpi->boi", delta, x.float().reshape(len(x), -1, module.in_features))


def _conv(module: Any, name: str, x: Tensor, delta: Tensor) -> Tensor:
    if name == "bias":
        return _of_channels(delta)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x.float(), module._reversed_padding_repeated_twice, mode=mode)
    gradient = getattr(convolution_gradients, f"conv{x.dim() - 2}d_weight")
    options = {"stride": module.stride, "dilation": module.dilation, "groups": module.groups}
    return torch.stack(
        [
            gradient(x[z, None], module.weight.shape, delta[z, None], **options)
            for z in range(len(x))
        ]
    )


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


# {class: (gradients of single samples, dimensions of an input without a batch)}. Exact classes: a
# subclass may use its parameters otherwise.
KINDS: Dict[type, Tuple[Callable[[Any, str, Tensor, Tensor], Tensor], Optional[int]]] = {
    nn.Linear: (_linear, 1),
    nn.Embedding: (_embedding, 0),
    nn.LayerNorm: (_layer_norm, None),  # as many as it normalizes
    nn.GroupNorm: (_group_norm, 1),
    **{getattr(nn, f"Conv{n}d"): (_conv, n + 1) for n in (1, 2, 3)},
    **{getattr(nn, f"InstanceNorm{n}d"): (_group_norm, n + 1) for n in (1, 2, 3)},
}
if hasattr(nn, "RMSNorm"):
    KINDS[nn.RMSNorm] = KINDS[nn.LayerNorm]
