"""signSGD with majority vote (Bernstein et al., ICML 2018, arXiv 1802.04434)."""
import dataclasses

import numpy as np

from .. import kernels
from ..requests import Allreduce, Collective
from .selective import SelectiveCompressor


@dataclasses.dataclass(frozen=True, repr=False)
class SignSGD(SelectiveCompressor):
    """Each rank votes with the sign of every element; the result is the majority's sign, 0 where they tie and where all are 0.

    What comes back has magnitude 1 (with op=Average), whatever the gradient's was: choose a learning rate for that, 10 to
    1000 times smaller. Momentum and weight decay of the optimizer work on the vote.
    """

    id = "signsgd"
    number = 12
    paper = "Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018, arXiv 1802.04434"

    def collectives(self, size):
        return (Collective("allreduce", kernels.word_dtype(_width(size)).name, "sum"),)

    def encode(self, grad, state, step):
        k = kernels.of(grad)
        words = state.buffer = k.encode_signs(grad, state.buffer, width=_width(step.size))
        words[-1] = not k.max_abs(grad) < np.inf  # the last word counts ranks whose gradient was not finite
        return Allreduce(words)

    def decode(self, summed, out, state, step, scale):
        if summed[-1]:
            out.fill(np.nan)
            return False
        kernels.of(out).decode_signs(summed, out, width=_width(step.size), size=step.size, unit=step.size * scale)
        return bool(np.isfinite(step.size * scale))


def _width(size):
    """Bits of a field that holds any sum of `size` votes."""
    return (2 * size).bit_length()
