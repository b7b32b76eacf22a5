"""Compression for horovod.tensorflow and horovod.tensorflow.keras, on stock DistributedOptimizer and DistributedGradientTape.

    import horovod.tensorflow.keras as hvd
    import horovod_compress.tensorflow as hvdc

    compression = hvdc.Compression.dgc(optimizer, ratio=0.001)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
"""
from typing import Any

from ..binding import Algorithms
from . import elastic
from .checkpoint import StateCheckpoint
from .compression import BoundCompression

__all__ = ["BoundCompression", "Compression", "StateCheckpoint", "elastic"]


class Compression(metaclass=Algorithms):
    """Makes compressions, bound to an optimizer where the algorithm needs it: one method an algorithm, and `from_spec`."""

    _example = "hvdc.Compression.dgc(optimizer)"

    @staticmethod
    def from_spec(
        spec: Any, optimizer: Any = None, process_set: Any = None, grad_scaler: Any = None, discardable: bool = False
    ) -> BoundCompression:
        """The compression of a spec, "dgc:ratio=0.001" or {"id": "dgc", "ratio": 0.001}; see `BoundCompression`."""
        return BoundCompression(spec, optimizer, process_set, grad_scaler, discardable)
