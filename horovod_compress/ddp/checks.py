"""Refusals under DistributedDataParallel, each by its name."""

from typing import Any, List

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..session.notices import warn_once
from ..torch_common.adam import AdamWOfRanks
from ..torch_common.optimizers import is_made_by_torch
from ..torch_common.search import objects_of

_NOT_WITH = {
    "mixed_precision": "has a communication hook of its own: use autocast, or a model of half "
    "precision",
    "_delay_all_reduce_params": "reduces those parameters without a communication hook: leave "
    "delay_all_reduce_named_params out",
    "skip_all_reduce_unused_params": "does not call a communication hook for all buckets: leave it "
    "out, find_unused_parameters alone serves such models",
    "_use_python_reducer": "calls communication hooks without buckets: set "
    'torch._dynamo.config.optimize_ddp to True, not "python_reducer", and leave compiled autograd',
}


def check_model(model: Any) -> None:
    """Looks whether a model can be served.

    Raises:
        TypeError: it is no DistributedDataParallel.
        ValueError: it was made with something that does not go with a communication hook.
    """
    # What torch.compile has made of it.
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"ddp.compress needs the DistributedDataParallel model, before torch.compile, not an "
            f"object of {type(model)}"
        )
    for name, why in _NOT_WITH.items():
        if getattr(model, name, None):
            raise ValueError(f"DistributedDataParallel with {name.strip('_')} {why}")
    complex_ones = [name for name, p in model.module.named_parameters() if p.is_complex()]
    if complex_ones:
        raise ValueError(
            f"{complex_ones[0]} is complex, and DistributedDataParallel hands only half of such a "
            f"gradient to a communication hook: keep real and imaginary parts as real parameters"
        )
    for name, module in model.module.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"{name or 'the model'} has sparse gradients, which are not compressed: make it "
                "with sparse=False"
            )
    devices = {param.device.type for param in model.parameters()} - {"cpu", "cuda"}
    if devices:
        warn_once(
            "compression under DistributedDataParallel was tried on CPUs and NVIDIA's GPUs only, "
            f"and this model is on {', '.join(sorted(devices))}. Most likely all is well: none "
            "must train as plain DistributedDataParallel does, and so must topk:ratio=1, to within "
            "rounding"
        )


def check_optimizer(model: Any, optimizer: Any) -> None:
    """Looks whether an optimizer steps a model.

    Raises:
        ValueError: it has none of the model's parameters, is for gradients of one rank, or is a
            wrapper without hooks.
    """
    if isinstance(optimizer, AdamWOfRanks):
        raise ValueError(
            "ddp.AdamW is for a rank's own gradients, and DistributedDataParallel averages these: "
            "use torch.optim.AdamW, or the plain model with ddp.UpdateOptimizer"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise ValueError(
            f"{type(optimizer).__name__} has no hooks around its steps: give ddp.compress the "
            "optimizer that is inside it"
        )
    own = {id(param) for param in model.module.parameters()}
    if not any(id(param) in own for group in optimizer.param_groups for param in group["params"]):
        raise ValueError(
            "this optimizer has no parameter of the model: give ddp.compress the one that steps it"
        )


def optimizers_of(model: DistributedDataParallel) -> List[Any]:
    """The optimizers of a model's parameters, without wrappers, which have the same groups."""
    own = {id(param) for param in model.module.parameters()}
    found = {
        id(optimizer.param_groups): optimizer
        for optimizer in objects_of(torch.optim.Optimizer)
        if is_made_by_torch(optimizer)
        and any(id(param) in own for group in optimizer.param_groups for param in group["params"])
    }
    return list(found.values())


def check_unhooked(model: Any) -> None:
    """Looks whether a model can take a communication hook.

    Raises:
        TypeError, ValueError: as of `check_model`, or it has one.
    """
    check_model(model)
    if model._get_ddp_logging_data().get("comm_hook"):
        raise ValueError(
            "this model has a communication hook already, and takes one only. A compression is "
            "changed by its switch(spec); for another optimizer wrap the module in a new "
            "DistributedDataParallel, once the old one is gone, and compress that. Leave any other "
            "hook out"
        )


def check_step(model: Any) -> None:
    """Looks whether this step can be served.

    Raises:
        ValueError: ranks that have joined would not count.
    """
    if model is not None and model._join_config.enable and not model._divide_by_initial_world_size:
        raise ValueError(
            "model.join(divide_by_initial_world_size=False) does not go with a communication hook, "
            "which takes means over all ranks: leave it out"
        )
