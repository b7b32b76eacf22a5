"""Refusals of models and optimizers, whose gradients reach compressions without Horovod."""

from typing import Any, Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..session.notices import warn_once
from ..torch_common import shards
from ..torch_common.adam import AdamWOfRanks
from ..torch_common.search import has_parameter_of

OTHER_OPTIMIZER = (
    "no step of the optimizer that {entry} was given has used the results of the last backward(), "
    "and another optimizer has parameters of this model: step the one that was given; or {renew}, "
    "once the old one is gone, and compress that with the other optimizer"
)


def check_gradients(module: nn.Module, wrapper: str, tried: Collection[str]) -> None:
    """Looks whether all gradients of a model can be compressed.

    Args:
        module: the model.
        wrapper: the name of what moves its gradients.
        tried: types of devices on which that was tried.

    Raises:
        ValueError: some are complex, or sparse.
    """
    complex_ones = [name for name, param in module.named_parameters() if param.is_complex()]
    if complex_ones:
        raise ValueError(
            f"{complex_ones[0]} is complex, and {wrapper} hands no such gradient to a compression "
            "as a whole: keep real and imaginary parts as real parameters"
        )
    for name, its in module.named_modules():
        if isinstance(its, (nn.Embedding, nn.EmbeddingBag)) and its.sparse:
            raise ValueError(
                f"{name or 'the model'} has sparse gradients, which are not compressed: make it "
                "with sparse=False"
            )
    devices = {param.device.type for param in module.parameters()}.difference(tried)
    if devices:
        warn_once(
            f"compression under {wrapper} was tried on CPUs and NVIDIA's GPUs only, and this model "
            f"is on {', '.join(sorted(devices))}. Most likely all is well: none must train as "
            f"plain {wrapper} does, and so must topk:ratio=1, to within rounding"
        )


def check_optimizer(module: nn.Module, optimizer: Any, entry: str) -> None:
    """Looks whether an optimizer steps a model.

    Args:
        module: the model.
        optimizer: what the user gave.
        entry: the function that it was given to.

    Raises:
        ValueError: it has none of the model's parameters, is for gradients of one rank, or is a
            wrapper without hooks.
    """
    if isinstance(optimizer, AdamWOfRanks):
        raise ValueError(
            f"{type(optimizer)._known_as} is for a rank's own gradients, and with {entry} these "
            "are means over ranks: use torch.optim.AdamW, or UpdateOptimizer in place of "
            f"{entry}"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"{type(optimizer).__name__} has no hooks around its steps: give {entry} the "
            "optimizer that is inside it"
        )
    if not has_parameter_of(optimizer, module):
        raise ValueError(
            f"this optimizer has no parameter of the model: give {entry} the one that steps it"
        )


def check_replicas(params: Sequence[torch.Tensor], group: Any, argument: str) -> None:
    """Looks whether the ranks of a group hold the same shards.

    Args:
        params: of this rank.
        group: the ranks that exchange; None for all.
        argument: the name under which the user gave it.

    Raises:
        ValueError: some of these ranks hold other shards of the same parameters.
    """
    ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD)) - {dist.get_rank()}
    for mesh in shards.meshes_of(params):
        also = ranks & set(mesh.mesh.flatten().tolist())
        if also:
            raise ValueError(
                f"rank {min(also)} is in {argument}, and in the mesh over which fully_shard has "
                "cut the parameters, too. Give fully_shard the ranks of one host, mesh['shard'] "
                f"of a mesh of (hosts, ranks of a host), and {argument} those that keep the same "
                "shard on other hosts, mesh['replicate']"
            )
