"""EF-SignSGD (Karimireddy, Rebjock, Stich, Jaggi, ICML 2019, arXiv 1901.09847)."""

import dataclasses
from typing import Optional

import numpy as np

from .. import kernels
from .base import Step, Traits
from .options import Flag, option
from .selective import ErrorFeedback
from .state import State


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
    )

    follow_lr: Optional[bool] = option(
        Flag(optional=True),
        None,
        "the residual is rescaled where the learning rate changes, as published; none: where an "
        "SGD without momentum is bound",
    )

    symmetric = True

    def payload_bits(self, numel: int, step: Step) -> float:
        return 1

    def pack(
        self, grad: np.ndarray, residual: np.ndarray, state: State, step: Step
    ) -> kernels.Encoded:
        encoded = kernels.of(grad).encode_one_bit(
            grad, residual, state.buffer, growth=self.growth(state, step), symmetric=self.symmetric
        )
        state.buffer = encoded.buffer
        return encoded

    def add(self, body: np.ndarray, out: np.ndarray, scale: float) -> bool:
        return kernels.of(out).decode_add_one_bit(out, body, scale=scale)
