"""signSGD with majority vote (Bernstein et al., ICML 2018, arXiv 1802.04434)."""

import dataclasses
from typing import Tuple

import numpy as np

from .. import kernels
from ..protocol.requests import Allreduce, Collective
from .base import Step, Traits
from .selective import SelectiveCompressor
from .state import State


@dataclasses.dataclass(frozen=True, repr=False)
class SignSGD(SelectiveCompressor):
    """Each rank votes with the sign of every element; the result is the majority's sign, 0 where
    they tie and where all are 0.

        result = sign(Σ sign(g)),  the sum over ranks

    The result has magnitude 1 (with op=Average), whatever the gradient's was, so the learning rate
    should be 10 to 1000 times smaller. Momentum and weight decay of the optimizer work on the vote.
    """

    id = "signsgd"
    traits = Traits(
        number=12,
        paper=(
            "Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML "
            "2018, arXiv 1802.04434"
        ),
        ignores_size=True,
    )

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        return (Collective("allreduce", kernels.word_dtype(_width(size)).name, "sum"),)

    def encode(self, grad: np.ndarray, state: State, step: Step) -> Allreduce:
        k = kernels.of(grad)
        words = state.buffer = k.encode_signs(grad, state.buffer, width=_width(step.size))
        # The last word counts ranks whose gradient was not finite.
        words[-1] = not k.max_abs(grad) < np.inf
        return Allreduce(words)

    def decode(
        self, summed: np.ndarray, out: np.ndarray, state: State, step: Step, scale: float
    ) -> bool:
        if summed[-1]:
            out.fill(np.nan)
            return False
        kernels.of(out).decode_signs(
            summed, out, width=_width(step.size), size=step.size, unit=step.size * scale
        )
        return bool(np.isfinite(step.size * scale))


def _width(size: int) -> int:
    """Bits of a field that holds any sum of `size` votes."""
    return (2 * size).bit_length()
