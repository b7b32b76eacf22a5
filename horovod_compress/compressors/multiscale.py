"""Multi-scale quantization against the ranks' largest norm (Vineeth S, arXiv 2109.12497, section
4)."""

import dataclasses
from typing import Tuple

from .maxnorm import MaxNorm
from .options import Ascending, option


@dataclasses.dataclass(frozen=True, repr=False)
class MultiScale(MaxNorm):
    """As maxnorm, but small elements are rounded on a finer scale: the finest at which every rank's
    code still fits bits[0].

        scales s_0 < s_1 < …;  element i takes the finest l with |g_i|/w·s_l ≤ s_0 on every rank
        q as of maxnorm with s = s_l;  result = w/s_l · Σ q / N

    The choice follows from the elements themselves, not from the random draw, so boundary values
    are unbiased too. It needs one more collective a step, which counts the ranks that a scale fits,
    in ⌈log2(N + 1)⌉ bits an element and finer scale.
    """

    id = "multiscale"
    traits = MaxNorm.traits._replace(number=10)

    bits: Tuple[int, ...] = option(  # type: ignore[assignment]
        # One number in maxnorm, and here one for each scale.
        Ascending(1, 16),
        (2, 6),
        "s = 2^bits - 1 steps of each scale; codes fit the first",
    )
