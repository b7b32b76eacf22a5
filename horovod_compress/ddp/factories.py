"""What makes compressions of DistributedDataParallel models."""

from typing import Any, Optional

import torch
from torch.nn.parallel import DistributedDataParallel

from .auto import is_auto, make_auto
from .checks import check_unhooked
from .compression import DDPCompression, hook


def compress(
    model: DistributedDataParallel,
    optimizer: Optional[torch.optim.Optimizer],
    spec: Any,
    *,
    grad_scaler: Any = None,
    discardable: bool = False,
) -> DDPCompression:
    """Compresses what a DistributedDataParallel model exchanges, from its next backward pass on.

    Args:
        model: as of `DDPCompression`.
        optimizer: as of `DDPCompression`.
        spec: as of `DDPCompression`, or "auto", which tries several while training begins, and goes
            on with the fastest; {"id": "auto", "candidates": […], "error": …, "probe_steps": …,
            "margin": …} says which, as `horovod_compress.adapters.auto.Automatic` does.
        grad_scaler: as of `DDPCompression`.
        discardable: as of `DDPCompression`.

    Returns:
        The compression, which has state_dict(), stats(), record(), switch(), discard() ….

    Raises:
        ValueError: as of `DDPCompression`.
    """
    check_unhooked(model)
    options = {"grad_scaler": grad_scaler, "discardable": discardable}
    compression = make(spec, model, optimizer, **options)
    model.register_comm_hook(compression, hook)
    return compression


def make(spec: Any, model: Any, optimizer: Any, **options: Any) -> DDPCompression:
    """A compression for a model whose communication hook calls it. As of `compress`."""
    kind = make_auto if is_auto(spec) else DDPCompression
    return kind(spec, model, optimizer, **options)
