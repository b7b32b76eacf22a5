"""Compression for horovod.torch: what `hvd.DistributedOptimizer(compression=…)` takes.

import horovod.torch as hvd
import horovod_compress.torch as hvdc

optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(),
    compression=hvdc.Compression.dgc(ratio=0.001, warmup_steps=1000)
)
"""

from ..session.process_sets import says_what_is_missing

try:
    from . import elastic
except ModuleNotFoundError as error:
    raise says_what_is_missing(error, "torch") from error
from .compression import BoundCompression
from .decentralized import DecentralizedOptimizer
from .factories import Compression
from .unbound import AutoCompression, UnboundCompression, compression_of
from .uneven import uneven
from .updates import AdamW, Nesterov, UpdateOptimizer

__all__ = [
    "AdamW",
    "AutoCompression",
    "BoundCompression",
    "Compression",
    "DecentralizedOptimizer",
    "Nesterov",
    "UnboundCompression",
    "UpdateOptimizer",
    "compression_of",
    "elastic",
    "uneven",
]
