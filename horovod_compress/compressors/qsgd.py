"""QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic, NeurIPS 2017, arXiv 1610.02132)."""

import dataclasses
from typing import List, Optional

from .. import kernels
from .base import Arrays, States, Steps, Traits, spares
from .options import Count, OneOf, option
from .selective import GatheringCompressor


@dataclasses.dataclass(frozen=True, repr=False)
class QSGD(GatheringCompressor):
    """Rounds every element at random to one of s levels of its bucket's norm and sends signs and
    levels.

        y = |g|/‖bucket‖·s;  level = ⌊y⌋ + Bernoulli(y − ⌊y⌋);  result = sign(g)·level·‖bucket‖/s

    It is unbiased, with E‖Q(g) - g‖² ≤ min(d/s², √d/s)·‖g‖² for a bucket of d elements (Lemma 3.1).
    Each bucket and rank has its own norm, so payloads are gathered; where they should add up, see
    maxnorm. A bucket of zeros stays zeros.
    """

    id = "qsgd"
    traits = Traits(
        number=18,
        paper=(
            "Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and "
            "Encoding, NeurIPS 2017, arXiv 1610.02132"
        ),
    )

    bits: int = option(Count(1, 15), 4, "s = 2^bits - 1 levels")
    levels: Optional[int] = option(Count(1, 32767, optional=True), None, "s, instead of bits")
    bucket_size: int = option(Count(1, 2**32 - 1), 512, "elements that share a norm")
    norm: str = option(
        OneOf("l2", "max"),
        "l2",
        "of a bucket: ‖g‖₂, or max |g|, which has less variance and more levels in use",
    )
    coding: str = option(
        OneOf("auto", "fixed", "elias"),
        "auto",
        "of levels: fixed, each bucket at the width of its largest, which takes the least time; or "
        "Elias' gamma code (zeros, sign, level): "
        "elias where it is smaller, auto where it is smaller by a tenth",
    )

    @property
    def s(self) -> int:
        """The number of levels above 0."""
        return self.levels or 2**self.bits - 1

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> List[kernels.Encoded]:
        payloads = kernels.of(grads[0]).encode_buckets(
            grads,
            spares([state.buffer for state in states]),
            steps=self.s,
            bucket=self.bucket_size,
            l2=self.norm == "l2",
            limit={"auto": 0.9, "fixed": 0.0, "elias": 1.0}[self.coding],
            key=self.rounding_keys(states, steps),
        )
        for state, payload in zip(states, payloads):
            (state.buffer,) = payload.undo
        return payloads

    def add_all(self, bodies: Arrays, outs: Arrays, scale: float) -> List[bool]:
        return kernels.of(outs[0]).decode_add_buckets(
            outs, bodies, steps=self.s, bucket=self.bucket_size, scale=scale
        )
