"""TernGrad (Wen et al., NeurIPS 2017, arXiv 1705.07878)."""

import dataclasses
import math
from typing import Any, List, Optional, Tuple

import numpy as np

from .. import kernels
from .base import Arrays
from .options import Number, option
from .quantizer import SharedScaleQuantizer


@dataclasses.dataclass(frozen=True, repr=False)
class TernGrad(SharedScaleQuantizer):
    """Clips every element and rounds it at random to -w, 0 or w, the largest magnitude on any rank
    after clipping.

        σ = standard deviation of this rank's g
        g ← g clipped to ±clip·σ;  w = largest over ranks of max |g|
        q = sign(g)·Bernoulli(|g|/w);  result = w · Σ q / N

    Each rank has its own σ (section 4). The scale w is shared by all ranks (section 3.4), so codes
    add up. Both are those of a tensor, as in the paper. The rounding is unbiased, the clipping is
    not. The option `unbiased` is for coordinates drawn by `ratio` or `k`.
    """

    id = "terngrad"
    traits = SharedScaleQuantizer.traits._replace(
        number=11,
        paper=(
            "Wen et al., TernGrad: Ternary Gradients to Reduce Communication, NeurIPS 2017, "
            "arXiv 1705.07878"
        ),
    )

    clip: float = option(
        Number(0),
        2.5,
        "elements are clipped at so many standard deviations of what this rank sends of the "
        "tensor; 0: not at all",
    )

    steps = (1.0,)

    def norms_of(
        self, values: Arrays, peaks: Optional[List[np.ndarray]]
    ) -> Tuple[List[np.ndarray], Any]:
        found = kernels.of(values[0]).max_abs_and_deviation(values)
        clips = [
            min(largest, self.clip * deviation)
            if self.clip and deviation and math.isfinite(largest)
            else largest
            for largest, deviation in found
        ]
        return [np.array([its], np.float32) for its in clips], clips
