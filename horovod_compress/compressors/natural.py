"""Natural compression (Horvath et al., arXiv 1905.10988)."""

import dataclasses
from typing import List

from .. import kernels
from .base import Arrays, States, Steps, Traits, spares
from .selective import GatheringCompressor


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
        element_bits=9,
    )

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> List[kernels.Encoded]:
        payloads = kernels.of(grads[0]).encode_natural(
            grads, spares([state.buffer for state in states]), key=self.rounding_keys(states, steps)
        )
        for state, payload in zip(states, payloads):
            state.buffer = payload.buffer
        return payloads

    def add_all(self, bodies: Arrays, outs: Arrays, scale: float) -> List[bool]:
        return kernels.of(outs[0]).decode_add_natural(outs, bodies, scale=scale)
