"""signSGD with majority vote (Bernstein et al., ICML 2018, arXiv 1802.04434)."""

import dataclasses
import math
from typing import List, Tuple

import numpy as np

from .. import kernels
from ..protocol.requests import Allreduce, Collective
from .base import Arrays, States, Steps, Traits, spares
from .selective import SelectiveCompressor


@dataclasses.dataclass(frozen=True, repr=False)
class SignSGD(SelectiveCompressor):
    """Each rank votes with the sign of every element; the result is the majority's sign, 0 where
    they tie and where all are 0.

        result = sign(Σ sign(g)),  the sum over ranks

    Elements of the result are 1, −1 or 0 (with op=Average), however large the gradient was, so the
    learning rate should be 10 to 1000 times smaller. Momentum and weight decay of the optimizer
    work on the vote.
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

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> List[Allreduce]:
        k, buffers = kernels.of(grads[0]), spares([state.buffer for state in states])
        votes = k.encode_signs(grads, buffers, width=_width(steps[0].size))
        for state, words, largest in zip(states, votes, k.max_abs(grads)):
            # The last word counts ranks whose gradient was not finite.
            words[-1] = not largest < np.inf
            state.buffer = words
        return [Allreduce(words) for words in votes]

    def decode_all(
        self, summed: Arrays, outs: Arrays, states: States, steps: Steps, scale: float
    ) -> List[bool]:
        size = steps[0].size
        unit = size * scale
        kernels.of(outs[0]).decode_signs(summed, outs, width=_width(size), size=size, unit=unit)
        finite = [not words[-1] and math.isfinite(unit) for words in summed]
        for out, words in zip(outs, summed):
            if words[-1]:
                out.fill(np.nan)
        return finite


def _width(size: int) -> int:
    """Bits of a field that holds any sum of `size` votes."""
    return (2 * size).bit_length()
