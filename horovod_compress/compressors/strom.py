"""Threshold quantization (Strom, Interspeech 2015)."""

import dataclasses
from typing import List

from .. import kernels
from .base import Arrays, States, Steps, Traits
from .options import Number, option
from .selective import ErrorFeedback


@dataclasses.dataclass(frozen=True, repr=False)
class Strom(ErrorFeedback):
    """Sends sign(r)·tau for every element whose residual r exceeds tau, one bit and an index each,
    and keeps the rest.

        r ← r + g;  where |r| > tau: send sign(r)·tau,  r ← r − sign(r)·tau

    The share that is sent follows from tau and the size of the gradients, which differs between
    models and in the course of training: choose tau by watching `stats()["elements_sent"]`.
    """

    id = "strom"
    traits = Traits(
        number=3,
        paper=(
            "Strom, Scalable Distributed DNN Training Using Commodity GPU Cloud Computing, "
            "Interspeech 2015"
        ),
    )

    tau: float = option(Number(1e-30, 1e30), 0.001, "the threshold, and the size of what is sent")

    def pack_all(
        self, grads: Arrays, residuals: Arrays, states: States, steps: Steps
    ) -> List[kernels.Encoded]:
        return kernels.of(grads[0]).encode_strom(grads, residuals, tau=self.tau)
