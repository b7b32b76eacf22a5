"""EF-SignSGD (Karimireddy, Rebjock, Stich, Jaggi, ICML 2019, arXiv 1901.09847)."""

import dataclasses
from typing import List, Optional

from .. import kernels
from .base import Arrays, States, Steps, Traits, spares
from .options import Flag, option
from .selective import ErrorFeedback


@dataclasses.dataclass(frozen=True, repr=False)
class EFSignSGD(ErrorFeedback):
    """Sends the sign of every element of p = residual + g, one bit, and ‖p‖₁/d, one number a
    tensor; keeps the error.

        p ← γ·g + e,  Δ = sign(p)·‖p‖₁/d,  x ← x − mean Δ,  e ← p − Δ       γ: the learning rate

    The paper's error e is one of updates. Here the optimizer multiplies by γ, so Δ/γ is sent, and
    the residual is e/γ, which grows where γ falls. A zero is sent as if it were positive, because
    one bit has no third value; the residual keeps that error too.
    """

    id = "efsignsgd"
    traits = Traits(
        number=13,
        paper=(
            "Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression "
            "Schemes, ICML 2019, arXiv 1901.09847"
        ),
        element_bits=1,
    )

    follow_lr: Optional[bool] = option(
        Flag(optional=True),
        None,
        "the residual is rescaled where the learning rate changes, as published; none: where an "
        "SGD without momentum is bound",
    )

    symmetric = True

    def pack_all(
        self, grads: Arrays, residuals: Arrays, states: States, steps: Steps
    ) -> List[kernels.Encoded]:
        payloads = kernels.of(grads[0]).encode_one_bit(
            grads,
            residuals,
            spares([state.buffer for state in states]),
            growth=[self.growth(*each) for each in zip(states, steps)],
            symmetric=self.symmetric,
        )
        for state, payload in zip(states, payloads):
            state.buffer = payload.buffer
        return payloads

    def add_all(self, bodies: Arrays, outs: Arrays, scale: float) -> List[bool]:
        return kernels.of(outs[0]).decode_add_one_bit(outs, bodies, scale=scale)
