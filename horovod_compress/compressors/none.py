"""No compression: the payload is the gradient itself. This is the baseline, and the fallback of small tensors."""
import dataclasses
from typing import ClassVar, Optional, Tuple

import numpy as np

from ..requests import Collective, HostReduce
from .base import HOST, Compressor, State, Step


@dataclasses.dataclass(frozen=True, repr=False)
class NoCompression(Compressor):
    """Dense float32, summed over ranks."""

    id: ClassVar[Optional[str]] = "none"
    number = 0
    on_device = True
    paper = "-"

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        return (HOST,)

    def encode(self, grad: np.ndarray, state: State, step: Step) -> HostReduce:
        if step.scale != 1:
            grad *= np.float32(step.scale)
        return HostReduce(grad)
