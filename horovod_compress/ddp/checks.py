"""Refusals under DistributedDataParallel, each by its name."""

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from ..torch_distributed.checks import check_gradients

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
    check_gradients(model.module, "DistributedDataParallel", ("cpu", "cuda"))


def check_unhooked(model: Any) -> None:
    """Looks whether a model can take a communication hook.

    Raises:
        TypeError, ValueError: as of `check_model`, or it has one.
    """
    check_model(model)
    if model._get_ddp_logging_data().get("comm_hook"):
        raise ValueError(
            "this model has a communication hook already, and takes one only. A compression stays "
            "with its model, and is changed by its switch(spec): compress once. For another "
            "optimizer wrap the module in a new DistributedDataParallel, once the old one is gone, "
            "and compress that. Leave any other hook out"
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
