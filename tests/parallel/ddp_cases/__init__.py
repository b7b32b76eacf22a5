"""What ranks under DistributedDataParallel are asked to prove, without Horovod. As `cases`, for
test_ddp.py."""

from checks import joined

from . import (
    algorithms,
    devices,
    errors,
    hosts,
    mass,
    options,
    pages,
    reads,
    states,
    transport,
    unused,
    updates,
)
from .training import start

__all__ = ["CASES", "start"]

CASES = joined(
    transport,
    algorithms,
    options,
    unused,
    mass,
    states,
    errors,
    updates,
    reads,
    hosts,
    devices,
    pages,
)
