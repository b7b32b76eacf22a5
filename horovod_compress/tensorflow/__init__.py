"""Compression for horovod.tensorflow and horovod.tensorflow.keras, on stock DistributedOptimizer and DistributedGradientTape.

    import horovod.tensorflow.keras as hvd
    import horovod_compress.tensorflow as hvdc

    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvdc.Compression.dgc(ratio=0.001))
"""
from typing import Any, NoReturn, Union

from ..binding import Algorithms
from ..compressors import get_compressor
from ..updates import Nesterov
from . import elastic
from .checkpoint import StateCheckpoint
from .compression import BoundCompression
from .recording import RecordSteps
from .unbound import UnboundCompression, compression_of, one_in_all_traces
from .updates import ShareUpdates, UpdateOptimizer

__all__ = [
    "BoundCompression", "Compression", "Nesterov", "RecordSteps", "ShareUpdates", "StateCheckpoint", "UnboundCompression", "UpdateOptimizer",
    "compression_of", "elastic",
]


class Compression(metaclass=Algorithms):
    """Makes compressions: one method an algorithm, and `from_spec`."""

    _example = "hvdc.Compression.dgc()"

    @staticmethod
    def from_spec(
        spec: Any, optimizer: Any = None, process_set: Any = None, grad_scaler: Any = None, discardable: bool = False
    ) -> Union[BoundCompression, UnboundCompression]:
        """The compression of a spec, "dgc:ratio=0.001" or {"id": "dgc", "ratio": 0.001}; see `UnboundCompression`, and `BoundCompression` where it is
        bound to an optimizer here. In a function that is traced it is the same one in every trace."""
        if spec == "auto":
            Compression.auto()
        compressor, others = get_compressor(spec), (process_set, grad_scaler, discardable)

        def make() -> Union[BoundCompression, UnboundCompression]:
            return UnboundCompression(compressor, *others) if optimizer is None else BoundCompression(compressor, optimizer, *others)

        return one_in_all_traces((compressor, optimizer, *others), make)

    @staticmethod
    def auto(*_: Any, **__: Any) -> NoReturn:
        """Raises ValueError: `horovod_compress.torch` chooses among compressions while training begins, and nothing here does."""
        raise ValueError(
            "auto() exists in PyTorch only, which can change what is exchanged from one step to the next. In TensorFlow name a spec, which "
            "`hvdcompress plan` helps to choose, and go on with another one by compression.switch(spec)"
        )
