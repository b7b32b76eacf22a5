"""Variance-based gradient compression (Tsuzuku, Imachi, Akiba, ICLR 2018 workshop, arXiv
1802.06058)."""

import dataclasses
from typing import List, Optional, Sequence

import numpy as np

from .. import kernels
from .base import LARGEST, LOCAL, Arrays, State, States, Steps, Traits, spares
from .options import Flag, Number, OneOf, option
from .selective import GatheringCompressor


@dataclasses.dataclass(frozen=True, repr=False)
class Variance(GatheringCompressor):
    """Sends an element once its accumulated mean is unambiguous against its noise: r² > alpha·v.

        r ← r + Σ_z g_z/|B|,  v ← v + Σ_z (g_z/|B|)²      z: the samples of the rank's batch B
        where r² > alpha·v:  send r,  r ← 0,  v ← 0;       elsewhere v ← zeta·v
        but where |r| < 0.75·2^(E − 7):  keep r and v      E = ⌊log2 max |r|⌋ of those to send
        with tau, where |r| > tau too:  send sign(r)·tau,  r ← r − sign(r)·tau,
                                        v ← max(v − 2·|r|·tau + tau², 0)

    r accumulates gradients, and v the squares of what each sample contributed to them. v decays by
    zeta where r is ambiguous. Values are rounded to powers of two, a sign and a 3-bit exponent each
    (section 4.2), after which r and v are 0 there; what is too small for that waits. With `tau`
    above 0 an element is sent only where |r| > tau as well, and its value is tau with the sign of r
    (Strom's threshold, section 4.4).

    `moments` says what counts as a sample, and the same alpha means something else in each.
    minibatch works everywhere and is not the paper's, and has cost accuracy: this rank's gradient
    of a step is one sample, so noise is that between steps. microbatch counts each backward pass of
    a step, a group of samples; with one pass it is minibatch. per_sample counts the samples
    themselves, as in the paper. An element whose square leaves float32's range (|g| > 1.8e19) makes
    the step not finite.
    """

    id = "variance"
    traits = Traits(
        number=5,
        paper=(
            "Tsuzuku, Imachi, Akiba, Variance-based Gradient Compression, ICLR 2018 workshop, "
            "arXiv 1802.06058"
        ),
        on_device=True,
        accumulator="r",
    )
    roles = {"r": LOCAL, "v": LOCAL}

    alpha: float = option(Number(0, low_open=True), 1.5, "how unambiguous: 1 to 2 in the paper")
    zeta: float = option(Number(0, 1), 0.999, "decay of v a step, where nothing is sent")
    moments: str = option(
        OneOf("minibatch", "microbatch", "per_sample"),
        "minibatch",
        "what a sample is; per_sample is the paper's, PyTorch only",
    )
    tau: float = option(
        Number(0, 1e30),
        0.0,
        "above 0: elements are sent only where |r| > tau too, and as ±tau (Strom's threshold)",
    )
    error_feedback: bool = option(Flag(), False, "keep the rounding error in r; the paper drops it")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hosts and self.moments != "minibatch":
            raise ValueError(
                "variance: hosts=true adds gradients up before their samples are looked at: leave "
                "out hosts, or moments"
            )

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> List[kernels.Encoded]:
        payloads = kernels.of(grads[0]).encode_variance(
            grads,
            _squares(grads, steps),
            [state.arrays["r"] for state in states],
            [state.arrays["v"] for state in states],
            spares([state.indices for state in states]),
            alpha=self.alpha,
            zeta=self.zeta,
            tau=self.tau,
            error_feedback=self.error_feedback,
        )

        def noted(payloads: Sequence[kernels.Encoded]) -> List[kernels.Encoded]:
            for state, payload in zip(states, payloads):
                state.undo, state.indices = payload.undo, payload.undo[0]
            return list(payloads)

        return kernels.then(payloads, noted)

    def accumulate_all(self, grads: Arrays, states: States, steps: Steps) -> Sequence[bool]:
        # Works as a gathered step that selects nothing. Elements with v = 0 are selected all the
        # same, and are restored.
        rs, vs = ([state.arrays[key] for state in states] for key in ("r", "v"))
        payloads = kernels.of(grads[0]).encode_variance(
            grads,
            _squares(grads, steps),
            rs,
            vs,
            alpha=LARGEST,
            zeta=self.zeta,
            tau=0.0,
            error_feedback=False,
        )

        def restored(payloads: Sequence[kernels.Encoded]) -> List[bool]:
            for r, v, payload in zip(rs, vs, payloads):
                indices, before = payload.undo
                r[indices], v[indices] = before
            return [payload.finite for payload in payloads]

        return kernels.then(payloads, restored)

    def rollback(self, state: State) -> None:
        state.restore("r", "v")

    def forget_sent(self, state: State) -> None:
        super().forget_sent(state)
        state.arrays["v"].fill(0)


def _squares(grads: Arrays, steps: Steps) -> Optional[List[np.ndarray]]:
    """Of each gradient those of its samples, or its own where only others' are known; None where
    none are."""
    if all([step.squares is None for step in steps]):
        return None
    return [
        grad * grad if step.squares is None else step.squares for grad, step in zip(grads, steps)
    ]
