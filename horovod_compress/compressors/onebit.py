"""1-bit SGD (Seide, Fu, Droppo, Li, Yu, Interspeech 2014)."""

import dataclasses

from .base import Traits
from .efsignsgd import EFSignSGD
from .options import Flag, option


@dataclasses.dataclass(frozen=True, repr=False)
class OneBit(EFSignSGD):
    """Sends the sign of every element of residual + g, one bit, and the means of the positive and
    the negative half, two numbers a tensor; keeps the error.

        p ← residual + g;  sent = mean of p ≥ 0 where p ≥ 0, mean of p < 0 elsewhere
        residual ← p − sent

    The paper has two numbers a column; here a tensor is one column.
    """

    id = "onebit"
    traits = Traits(
        number=14,
        paper=(
            "Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel "
            "Training, Interspeech 2014"
        ),
    )

    follow_lr: bool = option(
        Flag(), False, "the residual is rescaled where the learning rate changes; not in the paper"
    )

    symmetric = False
