"""Gradient compression for unmodified Horovod, and for PyTorch's DistributedDataParallel and FSDP2.

Use it through `horovod_compress.torch` or `horovod_compress.tensorflow`, or without Horovod through
`horovod_compress.ddp` or `horovod_compress.fsdp`. This module needs no framework. It has specs, the
list of algorithms, the algorithms' classes, which are the constructors in a compressor's repr,
`simulate`, and `simulate_decentralized`.
"""

from .compressors import REGISTRY, available, get_compressor
from .decentralized.simulation import simulate_decentralized
from .engine.simulate import simulate
from .protocol.handshake import MismatchError
from .protocol.wire import WireError
from .version import __version__

_classes = {cls.__name__: cls for cls in REGISTRY.values()}
globals().update(_classes)

__all__ = [
    "MismatchError",
    "WireError",
    "available",
    "get_compressor",
    "simulate",
    "simulate_decentralized",
    "__version__",
    *_classes,
]
