"""How tensors travel that an algorithm does not compress: what its option `dense` names."""

import dataclasses
from typing import Any

from .base import Compressor
from .fp16 import Float16
from .maxnorm import MaxNorm
from .none import NoCompression

# Which has 127 steps from 0 to the largest.
_DENSE = {"fp32": NoCompression(), "fp16": Float16(), "int8": MaxNorm(bits=7, min_numel=0)}


def dense_compressor(dense: str, seed: int) -> Compressor:
    """The compressor of such tensors. seed: of what is drawn at random, in rounding."""
    compressor: Any = _DENSE[dense]
    return (
        compressor if compressor.policy.seed is None else dataclasses.replace(compressor, seed=seed)
    )
