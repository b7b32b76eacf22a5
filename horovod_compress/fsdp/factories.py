"""Makes compressions of models that fully_shard has cut."""

from typing import Any, Optional

import torch
from torch import nn

from ..session.auto import auto_of
from ..torch_common.optimizers import without_wrappers
from ..torch_common.parameters import named
from ..torch_common.steps import check_types
from ..torch_distributed.checks import check_optimizer, check_replicas
from ..torch_distributed.ranks import group_of
from .checks import checked_units, trained_parameters
from .compression import FSDPCompression
from .ranks import ReplicaRanks


def compress(
    model: nn.Module,
    optimizer: Optional[torch.optim.Optimizer],
    spec: Any,
    *,
    replicate_group: Any = None,
    backward_passes_per_step: int = 1,
    grad_scaler: Any = None,
    discardable: bool = False,
) -> FSDPCompression:
    """Compresses the gradients that replicas of a model exchange, each of which fully_shard has cut
    over the ranks of its host, from the next backward pass on.

    They are exchanged when the backward pass has ended, each rank's shard with those of the other
    replicas, and are in `param.grad` when backward() returns.

    Args:
        model: on whose parts, and whole, fully_shard was called, with a mesh without replicas. One
            of a single rank makes it plain data parallelism.
        optimizer: the torch optimizer that steps its parameters. An SGD's momentum, Nesterov and
            weight decay are taken over by algorithms that correct momentum (dgc). None where the
            algorithm needs nothing from it.
        spec: as for `horovod_compress.get_compressor`, or "auto", as of
            `horovod_compress.ddp.compress`. Whether a tensor is compressed depends on the whole
            parameter's shape; the shard is what is compressed.
        replicate_group: the ranks that keep the same shard: a process group, or a DeviceMesh of one
            dimension; default: all ranks.
        backward_passes_per_step: how many backward passes add up to the gradients of a step. They
            are exchanged after the last one.
        grad_scaler: the torch.amp.GradScaler that scales the loss, where there is one: what is kept
            of gradients then follows its scale, and steps that it skips are forgotten. Implies
            discardable.
        discardable: `discard()` forgets a step, as if it had never been. Takes as much memory again
            as the algorithm's state, and the time to copy that in each step.

    Returns:
        The compression, which has state_dict(), stats(), record(), switch(), discard() ….

    Raises:
        TypeError, ValueError: bad options, or a model that cannot be served.
        MismatchError: at the end of the first backward pass, on all replicas: they were started
            differently.
    """
    units = checked_units(model)
    check_types(optimizer, grad_scaler)
    passes = backward_passes_per_step
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be a whole number from 1, not {passes!r}")
    if optimizer is not None:
        optimizer = without_wrappers(optimizer)
        check_optimizer(model, optimizer, "fsdp.compress")
    pairs = named(None, trained_parameters(model))
    params, group = [param for _, param in pairs], group_of(replicate_group, "replicate_group")
    check_replicas(params, group, "replicate_group")
    return FSDPCompression(
        auto_of(spec) or spec,
        model,
        optimizer,
        units,
        pairs,
        ReplicaRanks(group, params),
        passes,
        grad_scaler,
        discardable,
    )
