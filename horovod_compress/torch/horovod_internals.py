"""All that relies on how Horovod 0.28 and PyTorch are written inside, and nowhere says so: who calls, and with which gradients."""
import sys
from typing import Any, Iterator

import horovod
import torch

from ..binding import check_version

_GradScaler = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)  # before PyTorch 2.3 only the second

check_version(horovod.__version__)


def optimizer_of(compression: Any) -> torch.optim.Optimizer:
    """The optimizer of Horovod's that hands its gradients to this compression. It is made after the compression and never introduces
    itself; but it is the method's owner that calls `compress`. RuntimeError where none is, or two are, among the callers."""
    found = {id(owner): owner for owner in _callers() if isinstance(owner, torch.optim.Optimizer) and compression_of(owner) is compression}
    if len(found) != 1:
        raise RuntimeError(
            f"gradients came, but {'no optimizer holds' if not found else 'several optimizers hold'} this compression: give it to one "
            "hvd.DistributedOptimizer"
        )
    return next(iter(found.values()))


def compression_of(optimizer: torch.optim.Optimizer) -> Any:
    """What hvd.DistributedOptimizer was given as compression; None for optimizers that are not Horovod's."""
    return getattr(optimizer, "_compression", None)


def in_grad_scaler() -> bool:
    """Whether an enabled GradScaler is taking the step that has come to this point."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "step" and isinstance(owner, _GradScaler):
            return owner.is_enabled()
        frame = frame.f_back
    return False


def _callers() -> Iterator[Any]:
    """The owners of the methods that have led here, the nearest first."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_locals.get("self")
        frame = frame.f_back
