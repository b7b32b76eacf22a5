"""Compression for horovod.torch: what `hvd.DistributedOptimizer(compression=…)` takes.

import horovod.torch as hvd
import horovod_compress.torch as hvdc

optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(),
    compression=hvdc.Compression.dgc(ratio=0.001)
)
"""

from typing import Any, Optional, Sequence, Union

import torch

from ..binding import Algorithms
from . import elastic
from .adam import AdamW
from .auto import AutoCompression
from .compression import BoundCompression
from .parameters import NamedParameters
from .unbound import UnboundCompression, compression_of
from .uneven import uneven
from .updates import Nesterov, UpdateOptimizer

__all__ = [
    "AdamW",
    "AutoCompression",
    "BoundCompression",
    "Compression",
    "Nesterov",
    "UnboundCompression",
    "UpdateOptimizer",
    "compression_of",
    "elastic",
    "uneven",
]


class Compression(metaclass=Algorithms):
    """Makes compressions: one method an algorithm, and `from_spec`."""

    _example = "hvdc.Compression.dgc()"

    @staticmethod
    def from_spec(
        spec: Any,
        optimizer: Optional[torch.optim.Optimizer] = None,
        named_parameters: Optional[NamedParameters] = None,
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> Union[BoundCompression, UnboundCompression]:
        """The compression of a spec, "dgc:ratio=0.001" or {"id": "dgc", "ratio": 0.001}; see
        `UnboundCompression`, and `BoundCompression` where it is bound to an optimizer or to
        parameters here."""
        if spec == "auto":
            return Compression.auto(grad_scaler=grad_scaler, discardable=discardable)
        if optimizer is None and named_parameters is None:
            return UnboundCompression(spec, process_set, grad_scaler, discardable)
        return BoundCompression(
            spec, optimizer, named_parameters, process_set, grad_scaler, discardable
        )

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
        See `AutoCompression`."""
        return AutoCompression(error, candidates, probe_steps, margin, grad_scaler, discardable)
