"""Refusals under fully_shard, each by its name."""

import os
from typing import Any, Iterable, List, Tuple

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from ..engine.names import bare_name
from ..session.notices import warn_once
from ..torch_common.shards import is_shard, meshes_of
from ..torch_distributed.checks import check_gradients
from .internals import Unit, units_of


def checked_units(model: Any) -> List[Unit]:
    """The units of a model that can be served.

    Raises:
        TypeError: no part of it is fully_shard's, or it is another wrapper's.
        ValueError: it was made with something that does not go with a compression.
    """
    units = units_of(model) if isinstance(model, nn.Module) else []
    hints = {
        DistributedDataParallel: "ddp.compress serves that",
        FullyShardedDataParallel: "call fully_shard in place of FSDP1, which is not served",
    }
    if not units or type(model) in hints:
        raise TypeError(
            f"fsdp.compress needs a model that fully_shard has cut, not an object of "
            f"{type(model)}: {hints.get(type(model), 'call fully_shard(model, mesh=…) first')}"
        )
    for unit in units:
        if unit.is_replicated:
            raise ValueError(
                "this model's mesh has a dimension of replicas, over which FSDP reduces gradients "
                "itself, uncompressed: give fully_shard mesh['shard'] alone, and fsdp.compress "
                "replicate_group=mesh['replicate']"
            )
        if unit.is_offloaded:
            raise ValueError(
                "CPUOffloadPolicy was not tried with compressions: leave offload_policy out, or "
                "compress updates by fsdp.UpdateOptimizer"
            )
        if unit.has_hook:
            raise ValueError(
                "this model has an all-reduce hook already, torchft's, or of a compression: that "
                "is changed by its switch(spec). Leave any other out"
            )
    # Parameters may get their memory later.
    check_gradients(model, "fully_shard", ("cpu", "cuda", "meta"))
    return units


def trained_parameters(model: nn.Module) -> List[Tuple[str, Any]]:
    """(name, parameter) of those whose gradients FSDP reduces, under names without wrappers. Warns
    of others."""
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    for name, param in trained:
        if not is_shard(param):
            warn_once(
                f"{name} is trained, and fully_shard has not cut it: neither FSDP nor the "
                "compression reduces its gradient. Call fully_shard on the whole model too, or "
                "reduce it yourself where it is one of ignored_params"
            )
            break
    refuse_hooks(trained)
    # As torchrun numbers ranks; 0 where nobody has said it.
    of_host = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    for mesh in meshes_of(param for _, param in trained):
        if of_host and len({rank // of_host for rank in mesh.mesh.flatten().tolist()}) > 1:
            warn_once(
                "fully_shard has cut this model over several hosts, between which it gathers and "
                "reduces uncompressed: give it a mesh within a host, and replicate_group the rest"
            )
    return [(bare_name(name), param) for name, param in trained if is_shard(param)]


def refuse_hooks(named: Iterable[Tuple[str, Any]]) -> None:
    """Raises ValueError for parameters whose hooks see gradients before these are exchanged."""
    for name, param in named:
        if getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name} has a hook behind its gradient, as of an optimizer that steps in the "
                "backward pass: it would see this replica's gradient, before the exchange. Step "
                "after backward()"
            )
