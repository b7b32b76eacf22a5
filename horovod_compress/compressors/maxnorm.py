"""Single-scale quantization against the ranks' largest norm (Vineeth S, arXiv 2109.12497, section
3)."""

import dataclasses
import functools
from typing import Any, List, Optional, Tuple

import numpy as np

from .. import kernels
from .base import LARGEST, Arrays
from .options import Count, OneOf, option
from .quantizer import SharedScaleQuantizer


@dataclasses.dataclass(frozen=True, repr=False)
class MaxNorm(SharedScaleQuantizer):
    """Rounds |g|/w·s at random to a whole number, s = 2^bits - 1, w the largest norm of all ranks;
    sums the codes.

        w = largest over ranks of max |g| (norm=max) or ‖g‖₂ (norm=l2);  y = |g|/w·s
        q = sign(g)·(⌊y⌋ + Bernoulli(y − ⌊y⌋));  result = w/s · Σ q / N

    It is unbiased, with a variance of at most w²/(4s²) an element. Payloads add up exactly: an
    allreduce adds words whose fields hold the sums of all ranks. With ratio or k only so many
    random coordinates are quantized, the same on all ranks.
    """

    id = "maxnorm"
    traits = SharedScaleQuantizer.traits._replace(
        number=9,
        paper=(
            "Vineeth S, Unbiased Single-scale and Multi-scale Quantizers for Distributed "
            "Optimization, arXiv 2109.12497"
        ),
        on_device=True,
    )

    bits: int = option(Count(1, 16), 4, "s = 2^bits - 1 steps from 0 to the largest")
    norm: str = option(
        OneOf("max", "l2"), "max", "what the shared scale is the largest of: max |g|, or ‖g‖₂"
    )

    @functools.cached_property
    def steps(self) -> Tuple[float, ...]:
        return tuple(2.0**bits - 1 for bits in np.atleast_1d(self.bits).tolist())

    def norms_of(
        self, values: Arrays, peaks: Optional[List[np.ndarray]]
    ) -> Tuple[List[np.ndarray], Any]:
        # No magnitude is above its norm.
        return kernels.of(values[0]).norms(values, peaks, l2=self.norm == "l2"), LARGEST
