"""Compression for horovod.tensorflow and horovod.tensorflow.keras, on stock DistributedOptimizer
and DistributedGradientTape.

    import horovod.tensorflow.keras as hvd
    import horovod_compress.tensorflow as hvdc

    compression = hvdc.Compression.dgc(ratio=0.001, warmup_steps=1000)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
"""

from ..session.process_sets import says_what_is_missing
from ..session.updates import Nesterov

try:
    from . import elastic
except ModuleNotFoundError as error:
    raise says_what_is_missing(error, "tensorflow") from error
from .adam import AdamW
from .callbacks import RecordSteps, ShareUpdates, StateCheckpoint
from .compression import BoundCompression
from .factories import Compression
from .unbound import UnboundCompression, compression_of
from .updates import UpdateOptimizer

__all__ = [
    "AdamW",
    "BoundCompression",
    "Compression",
    "Nesterov",
    "RecordSteps",
    "ShareUpdates",
    "StateCheckpoint",
    "UnboundCompression",
    "UpdateOptimizer",
    "compression_of",
    "elastic",
]
