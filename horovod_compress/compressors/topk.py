"""Top-k with error feedback (Aji, Heafield, EMNLP 2017, arXiv 1704.05021; Stich, Cordonnier, Jaggi, NeurIPS 2018)."""
import dataclasses
import functools
import math

import numpy as np

from .. import kernels
from .base import LOCAL, State, Step, Undo
from .options import Choice, Number, option
from .selective import SelectiveCompressor

_VALUE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16}


@functools.lru_cache(maxsize=None)
def _entry_bits(density: float, values: str) -> float:
    """Bits of an entry: its value, and the entropy of its index."""
    return _VALUE_BITS[values] + math.log2(1 / density) + 1.44


@dataclasses.dataclass(frozen=True, repr=False)
class TopK(SelectiveCompressor):
    """Sends the ratio·d entries of largest accumulated gradient and keeps the others in a residual for later steps.

    The ordinary optimizer works on the mean. A dense step sends the residual of all elements.
    """

    id = "topk"
    number = 6
    kept = {"residual": LOCAL}
    paper = "Aji, Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017, arXiv 1704.05021"

    ratio: float = option(Number(0, 1, low_open=True), 0.001, "share of a tensor's elements sent in a step")
    sample_ratio: float = option(Number(0, 1, low_open=True), 0.01, "share of elements sampled for the threshold")
    values: str = option(Choice("fp32", "fp16", "bf16"), "fp32", "values on the wire; the residual keeps the rounding error")

    def density(self, step: int) -> float:
        """The share of elements sent at this step."""
        return self.ratio

    def payload_bits(self, step: Step) -> float:
        density = self.density(step.index)
        return density * _entry_bits(density, self.values)

    def encode(self, grad: np.ndarray, state: State, step: Step) -> kernels.Encoded:
        return self.select(grad, state, step)

    def select(
        self, grad: np.ndarray, state: State, step: Step, momentum: float = 0.0, nesterov: bool = False, masking: bool = False
    ) -> kernels.Encoded:
        """Adds the gradient to momentum u, where there is one, and to the residual, and moves the selection into a payload."""
        v = state.arrays[self.accumulator]
        encoded = kernels.of(grad).encode_topk(
            grad, state.arrays.get("u"), v, momentum=momentum, nesterov=nesterov, scale=step.scale, kind=self.values, mask=masking,
            k=max(min(1, v.size), math.ceil(self.density(step.index) * v.size - 1e-6)), samples=int(self.sample_ratio * v.size) + 256,
            offset=self.key(state.name, step.index) & 0xFFFFFFFF,
        )
        indices, rows = encoded.undo
        state.undo = [Undo(self.accumulator, indices, rows[0])]
        if len(rows) > 1:
            state.undo.append(Undo("u", indices, rows[1], True))
        return encoded
