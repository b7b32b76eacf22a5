"""Makes compressions of DistributedDataParallel models."""

from typing import Any, Optional

import torch
from torch.nn.parallel import DistributedDataParallel

from ..session.auto import auto_of
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
            on with the fastest; {"id": "auto", "candidates": […], "probe_steps": …, "margin": …}
            says which, as `horovod_compress.torch.AutoCompression` does.
        grad_scaler: as of `DDPCompression`.
        discardable: as of `DDPCompression`.

    Returns:
        The compression, which has state_dict(), stats(), record(), switch(), discard() ….

    Raises:
        ValueError: as of `DDPCompression`.
    """
    check_unhooked(model)
    compression = make(spec, model, optimizer, grad_scaler=grad_scaler, discardable=discardable)
    model.register_comm_hook(compression, hook)
    return compression


def make(spec: Any, model: Any, optimizer: Any, **options: Any) -> DDPCompression:
    """A compression for a model whose communication hook calls it. As of `compress`."""
    return DDPCompression(auto_of(spec) or spec, model, optimizer, **options)
