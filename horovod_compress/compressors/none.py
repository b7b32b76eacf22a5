"""No compression: the gradient itself rides Horovod's allreduce. The baseline, and what small tensors get."""
import dataclasses

import numpy as np

from ..requests import HostReduce
from .base import HOST, Compressor


@dataclasses.dataclass(frozen=True, repr=False)
class NoCompression(Compressor):
    """Dense float32, summed over ranks."""

    id = "none"
    number = 0
    paper = "-"

    def collectives(self, size):
        return (HOST,)

    def encode(self, grad, state, step):
        if step.scale != 1:
            grad *= np.float32(step.scale)
        return HostReduce(grad)
