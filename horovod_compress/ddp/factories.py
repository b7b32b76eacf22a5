"""Makes compressions of DistributedDataParallel models."""

from typing import Any, Optional

import torch
from torch.nn.parallel import DistributedDataParallel

from ..adapters.auto import trial_arguments
from ..pytorch.auto import OnTrial
from ..pytorch.compression import refuse_begun_within_step
from .checks import check_unhooked
from .compression import DDPCompression, hook


class DDPCompressionOnTrial(OnTrial, DDPCompression):
    """A compression that is chosen by trial while training begins."""


def is_auto(spec: Any) -> bool:
    """Returns whether a spec leaves the choice to a trial."""
    return spec == "auto" or isinstance(spec, dict) and spec.get("id") == "auto"


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
    if not is_auto(spec):
        return DDPCompression(spec, model, optimizer, **options)
    chosen = {} if spec == "auto" else {key: spec[key] for key in spec if key != "id"}
    auto = trial_arguments(**chosen, check=refuse_begun_within_step)
    return DDPCompressionOnTrial(auto, model, optimizer, **options)
