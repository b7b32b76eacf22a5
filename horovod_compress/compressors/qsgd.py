"""QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic, NeurIPS 2017, arXiv 1610.02132)."""

import dataclasses
from typing import Optional

import numpy as np

from .. import kernels
from .base import Step, Traits
from .options import Count, OneOf, option
from .selective import GatheringCompressor
from .state import State


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

    def encode(self, grad: np.ndarray, state: State, step: Step) -> kernels.Encoded:
        key = self.key("rounding", state.name, step.index, step.rank)
        limit = {"auto": 0.9, "fixed": 0.0, "elias": 1.0}[self.coding]
        encoded = kernels.of(grad).encode_buckets(
            grad,
            state.buffer,
            steps=self.s,
            bucket=self.bucket_size,
            l2=self.norm == "l2",
            limit=limit,
            key=key,
        )
        (state.buffer,) = encoded.undo
        return encoded

    def add(self, body: np.ndarray, out: np.ndarray, scale: float) -> bool:
        return kernels.of(out).decode_add_buckets(
            out, body, steps=self.s, bucket=self.bucket_size, scale=scale
        )
