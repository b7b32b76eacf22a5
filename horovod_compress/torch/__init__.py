"""Compression for horovod.torch: what `hvd.DistributedOptimizer(compression=…)` takes.

    import horovod.torch as hvd
    import horovod_compress.torch as hvdc

    compression = hvdc.Compression.dgc(optimizer, model.named_parameters(), ratio=0.001)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
"""
from typing import Any, Optional

import torch

from ..binding import Algorithms
from . import elastic
from .compression import BoundCompression, NamedParameters
from .uneven import uneven

__all__ = ["BoundCompression", "Compression", "elastic", "uneven"]


class Compression(metaclass=Algorithms):
    """Makes compressions, bound to an optimizer and its parameters: one method an algorithm, and `from_spec`."""

    _example = "hvdc.Compression.dgc(optimizer, model.named_parameters())"

    @staticmethod
    def from_spec(
        spec: Any, optimizer: Optional[torch.optim.Optimizer], named_parameters: Optional[NamedParameters] = None,
        process_set: Any = None, grad_scaler: Any = None, discardable: bool = False,
    ) -> BoundCompression:
        """The compression of a spec, "dgc:ratio=0.001" or {"id": "dgc", "ratio": 0.001}; see `BoundCompression`."""
        return BoundCompression(spec, optimizer, named_parameters, process_set, grad_scaler, discardable)
