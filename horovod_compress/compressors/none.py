"""No compression: the payload is the gradient itself. This is the baseline, and the fallback of
small tensors."""

import dataclasses
from typing import ClassVar, List, Optional, Sequence, Tuple

import numpy as np

from ..protocol.requests import Collective, ToReducer
from .base import REDUCER, Arrays, Compressor, Encoding, OwnState, State, Step, Traits

_FLOAT64 = np.dtype(np.float64)


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

    # Of one tensor, because the reducer takes them one by one.
    def encode(self, grad: np.ndarray, state: State, step: Step) -> Encoding:
        if step.scale != 1:
            grad *= np.float32(step.scale)
        return ToReducer(grad)

    def decode_dense_all(
        self, reduced: Arrays, outs: Arrays, states: Sequence[OwnState], scale: float
    ) -> List[bool]:
        if reduced[0].dtype != _FLOAT64:
            return super().decode_dense_all(reduced, outs, states, scale)
        return [_decode_float64(each, out, scale) for each, out in zip(reduced, outs)]


def _decode_float64(reduced: np.ndarray, out: np.ndarray, scale: float) -> bool:
    if reduced is not out:
        np.copyto(out, reduced)
    if scale != 1:
        out *= scale
    # Kernels know no float64. Both are NaN where anything is.
    return not out.size or bool(np.isfinite(out.max()) and np.isfinite(out.min()))
