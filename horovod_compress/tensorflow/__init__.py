"""Compression for horovod.tensorflow and horovod.tensorflow.keras, on stock DistributedOptimizer
and DistributedGradientTape.

    import horovod.tensorflow.keras as hvd
    import horovod_compress.tensorflow as hvdc

    optimizer = hvd.DistributedOptimizer(optimizer, compression=hvdc.Compression.dgc(ratio=0.001))
"""

from typing import Any, Optional, Sequence, Union

from ..binding import Algorithms
from ..compressors import get_compressor
from ..updates import Nesterov
from . import elastic
from .adam import AdamW
from .auto import AutoCompression
from .checkpoint import StateCheckpoint
from .compression import BoundCompression
from .recording import RecordSteps
from .unbound import UnboundCompression, compression_of, one_in_all_traces
from .updates import ShareUpdates, UpdateOptimizer

__all__ = [
    "AdamW",
    "AutoCompression",
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


class Compression(metaclass=Algorithms):
    """Makes compressions: one method an algorithm, and `from_spec`."""

    _example = "hvdc.Compression.dgc()"

    @staticmethod
    def from_spec(
        spec: Any,
        optimizer: Any = None,
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> Union[BoundCompression, UnboundCompression]:
        """The compression of a spec, "dgc:ratio=0.001" or {"id": "dgc", "ratio": 0.001}; see
        `UnboundCompression`, and `BoundCompression` where it is bound to an optimizer here. In a
        function that is traced it is the same one in every trace."""
        if spec == "auto":
            return Compression.auto(grad_scaler=grad_scaler, discardable=discardable)
        compressor, others = get_compressor(spec), (process_set, grad_scaler, discardable)

        def make() -> Union[BoundCompression, UnboundCompression]:
            return (
                UnboundCompression(compressor, *others)
                if optimizer is None
                else BoundCompression(compressor, optimizer, *others)
            )

        return one_in_all_traces((compressor, optimizer, *others), make)

    @staticmethod
    def auto(
        error: float = 1.0,
        candidates: Optional[Sequence[str]] = None,
        probe_steps: int = 30,
        margin: float = 0.05,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> AutoCompression:
        """The fastest of several on this job, where that is beyond its noise, else the dense one.
        See `AutoCompression`. In a function that is traced it is the same one in every trace."""
        # Which can be a key.
        kept = tuple(candidates) if isinstance(candidates, list) else candidates
        options = (error, kept, probe_steps, margin, grad_scaler, discardable)
        return one_in_all_traces(("auto", *options), lambda: AutoCompression(*options))
