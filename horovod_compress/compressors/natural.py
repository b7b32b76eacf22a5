"""Natural compression (Horvath et al., arXiv 1905.10988)."""

import dataclasses

import numpy as np

from .. import kernels
from .base import Step, Traits
from .selective import GatheringCompressor
from .state import State


@dataclasses.dataclass(frozen=True, repr=False)
class Natural(GatheringCompressor):
    """Rounds every element at random to one of the two powers of two next to it: a sign and an
    exponent, 9 bits.

        e = ⌊log2 |g|⌋;  result = sign(g)·2^(e + b),  b = 1 with probability |g|/2^e − 1, else 0

    It is unbiased, with a variance of at most g²/8 an element. Elements from 2^127 on are rounded
    down to that.
    """

    id = "natural"
    traits = Traits(
        number=15,
        paper=(
            "Horvath et al., Natural Compression for Distributed Deep Learning, arXiv 1905.10988"
        ),
    )

    def payload_bits(self, numel: int, step: Step) -> float:
        return 9

    def encode(self, grad: np.ndarray, state: State, step: Step) -> kernels.Encoded:
        key = self.key("rounding", state.name, step.index, step.rank)
        encoded = kernels.of(grad).encode_natural(grad, state.buffer, key=key)
        state.buffer = encoded.buffer
        return encoded

    def add(self, body: np.ndarray, out: np.ndarray, scale: float) -> bool:
        return kernels.of(out).decode_add_natural(out, body, scale=scale)
