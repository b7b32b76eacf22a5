"""No compression: the payload is the gradient itself. This is the baseline, and the fallback of
small tensors."""

import dataclasses
from typing import ClassVar, Optional, Tuple

import numpy as np

from ..protocol.requests import Collective, ToReducer
from .base import REDUCER, Compressor, Decoded, Encoding, OwnState, Step, Traits
from .state import State


@dataclasses.dataclass(frozen=True, repr=False)
class NoCompression(Compressor):
    """Dense float32, or float64 where gradients are, summed over ranks."""

    id: ClassVar[Optional[str]] = "none"
    traits = Traits(
        number=0,
        paper="-",
        on_device=True,
        carries_float64=True,
    )

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        return (REDUCER,)

    def encode(self, grad: np.ndarray, state: State, step: Step) -> Encoding:
        if step.scale != 1:
            grad *= np.float32(step.scale)
        return ToReducer(grad)

    def decode_dense(
        self, reduced: np.ndarray, out: np.ndarray, state: OwnState, scale: float
    ) -> Decoded:
        if reduced.dtype != np.float64:
            return super().decode_dense(reduced, out, state, scale)
        if reduced is not out:
            np.copyto(out, reduced)
        if scale != 1:
            out *= scale
        # Kernels know no float64. Both are NaN where anything is.
        return not out.size or bool(np.isfinite(out.max()) and np.isfinite(out.min()))
