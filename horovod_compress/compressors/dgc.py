"""Deep Gradient Compression (Lin, Han, Mao, Wang, Dally, ICLR 2018, arXiv 1712.01887)."""

import dataclasses
import functools
import math
import operator
from typing import ClassVar, List, Optional, Sequence, Tuple

import numpy as np

from .. import kernels
from ..protocol.requests import Collective, ToReducer
from .base import (
    LOCAL,
    SHARED,
    Arrays,
    Compressor,
    Encodings,
    State,
    States,
    Step,
    Steps,
    Traits,
    zeros,
)
from .dense import dense_compressor
from .none import NoCompression
from .options import Count, Flag, Number, OneOf, Schedule, ZeroOrCount, option
from .quantizer import QuantizerState
from .topk import TopK


@dataclasses.dataclass(frozen=True, repr=False)
class DGC(TopK):
    """Sends the ratio·d entries of largest accumulated, momentum-corrected gradient; keeps the
    others for later steps.

    Each tensor of d elements has a momentum u, where the momentum m is above 0, and a velocity v:

        u ← m·u + g,      v ← v + u          momentum correction (section 3.2)
        u ← m·(u + g),    v ← v + u + g      the same, with nesterov
        send v at the k largest |v|,         k = ⌈ratio·d⌉, or min_k
        there v ← 0, and where k < d u ← 0   momentum factor masking (section 3.3)

    Bound to an SGD optimizer it takes over that optimizer's momentum, Nesterov and weight decay,
    which the optimizer must not apply a second time. Unbound, momentum defaults to 0.9; with other
    optimizers to 0, which is top-k with error feedback; with Adam compress its updates instead
    (UpdateOptimizer).

    A step that sends all elements masks no momentum, because none is late: with k = d, and where it
    goes dense. Tensors that are not compressed are averaged first and then get the same momentum.
    """

    id = "dgc"
    traits = TopK.traits._replace(
        number=1,
        paper="Lin et al., Deep Gradient Compression, ICLR 2018, arXiv 1712.01887",
        accumulator="v",
        corrects_momentum=True,
    )
    roles = {"u": LOCAL, "v": LOCAL}

    # Not an option: momentum forgets already.
    decay: ClassVar[float] = 1.0  # type: ignore[misc]
    momentum: Optional[float] = option(
        Number(0, 1, optional=True),
        None,
        "none: the bound SGD's, 0.9 unbound, 0 for other optimizers",
    )
    nesterov: Optional[bool] = option(
        Flag(optional=True), None, "none: the bound SGD's, else false"
    )
    masking: bool = option(
        Flag(), True, "momentum factor masking: u becomes 0 where an element was sent (section 3.3)"
    )
    clip_norm: Optional[float] = option(
        Number(0, low_open=True, optional=True),
        None,
        "limit of the update's norm, all tensors together, as in clip_grad_norm_; each rank clips "
        "its own gradient before it is "
        "accumulated, such that independent gradients of N ranks add up to it (section 3.2): to "
        "clip_norm·√N where ranks are averaged",
    )
    warmup_steps: int = option(
        ZeroOrCount(4),
        0,
        "steps over which the density falls in four stages, ratio^(1/5) … ratio^(4/5): 25 % … 0.4 "
        "% for 0.1 %; one at least for each stage",
    )
    schedule: Tuple[Tuple[int, float], ...] = option(
        Schedule(), (), "density by step, instead of ratio and warmup_steps"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.schedule and self.warmup_steps:
            raise ValueError("dgc: give schedule or warmup_steps, not both")
        if self.k and (self.schedule or self.warmup_steps):
            raise ValueError(
                "dgc: k is the same in all steps: give ratio with schedule or warmup_steps"
            )
        if self.nesterov and self.momentum == 0:
            raise ValueError("dgc: nesterov needs a momentum above 0")

    @property
    def m(self) -> float:
        """The momentum in force."""
        return 0.9 if self.momentum is None else self.momentum

    def bound(self, momentum: float, nesterov: bool) -> "DGC":
        """This compressor with the momentum of an optimizer's parameter group."""
        return dataclasses.replace(self, momentum=momentum, nesterov=nesterov)

    def fallback(self) -> "DenseMomentum":
        return DenseMomentum(
            momentum=self.m, nesterov=bool(self.nesterov), values=self.dense, seed=self.seed
        )

    def density(self, step: int) -> float:
        """The share of elements sent at this step."""
        if self.schedule:
            return next(ratio for first, ratio in reversed(self.schedule) if first <= step)
        if step < self.warmup_steps:
            return self.ratio ** ((4 * step // self.warmup_steps + 1) / 5)
        return self.ratio

    def after_warmup(self) -> "DGC":
        ratio = self.schedule[-1][1] if self.schedule else self.ratio
        return dataclasses.replace(self, ratio=ratio, schedule=(), warmup_steps=0)

    def init(self, name: str, shape: Tuple[int, ...]) -> State:
        names = ("u", "v") if self.m else ("v",)
        arrays = {array: zeros(math.prod(shape)) for array in names}
        return State(name, arrays, factor=self._factor)

    @property
    def _factor(self) -> float:
        """u over SGD's buffer."""
        return self.m if self.nesterov else 1.0

    def apply_pending(self, state: State) -> None:
        """Has u follow a momentum that was changed, as SGD's buffer does."""
        u = state.arrays.get("u")
        if u is not None and self._factor != state.factor:
            u *= np.float32(self._factor / state.factor)
            state.factor = self._factor

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> List[kernels.Encoded]:
        factor, masking = self._factor, self.masking
        for state in states:
            if state.factor != factor:
                self.apply_pending(state)
        # At a rate of 0 u is as SGD's buffer: nothing that is sent has any effect.
        masks = [masking and (step.lr is None or not step.frozen) for step in steps]
        return self.select(grads, states, steps, self.m, bool(self.nesterov), masks)

    def accumulate_all(self, grads: Arrays, states: States, steps: Steps) -> Sequence[bool]:
        for state in states:
            self.apply_pending(state)
        return kernels.of(grads[0]).add_to_residual(
            grads,
            [state.arrays["u"] for state in states] if self.m else None,
            [state.arrays["v"] for state in states],
            momentum=self.m,
            nesterov=bool(self.nesterov),
            scale=steps[0].scale,
        )


@dataclasses.dataclass
class DenseMomentumState(QuantizerState):
    """The state of the dense compressor, a quantizer at the most. spare is memory for the next
    step's momentum; `sent` refers to it until that step is committed."""

    spare: Optional[np.ndarray] = None


@dataclasses.dataclass(frozen=True, repr=False)
class DenseMomentum(NoCompression):
    """For tensors that DGC does not compress: they are averaged, then get vanilla or Nesterov
    momentum, the same on all ranks."""

    # Not for users: DGC's own.
    id = None
    traits = Traits(on_device=True)
    roles = {"u": SHARED}

    momentum: float = option(Number(0, 1), 0.9, "of the mean gradient")
    nesterov: bool = option(Flag(), False, "Nesterov's momentum")
    values: str = option(OneOf("fp32", "fp16", "int8"), "fp32", "how they travel")
    seed: int = option(Count(), 0, "of what is drawn at random")

    @property
    def m(self) -> float:
        return self.momentum

    @functools.cached_property
    def dense(self) -> Compressor:
        """How they travel."""
        return dense_compressor(self.values, self.seed)

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        return self.dense.collectives(size)

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> Encodings:
        return self.dense.encode_all(grads, states, steps)

    def init(self, name: str, shape: Tuple[int, ...]) -> DenseMomentumState:
        return DenseMomentumState(name, {"u": zeros(math.prod(shape))} if self.momentum else {})

    def encode_dense(self, grad: np.ndarray, state: State, step: Step) -> ToReducer:
        return ToReducer(grad)  # Not all is sent: u remains.

    def decode_all(
        self,
        summed: Arrays,
        outs: Arrays,
        states: Sequence[DenseMomentumState],
        steps: Steps,
        scale: float,
    ) -> List[bool]:
        return self._move(outs, states, self.dense.decode_all(summed, outs, states, steps, scale))

    def decode_dense_all(
        self, reduced: Arrays, outs: Arrays, states: Sequence[DenseMomentumState], scale: float
    ) -> List[bool]:
        # Momentum looks itself whether what needs nothing else is finite.
        if self.momentum and scale == 1 and all(map(operator.is_, reduced, outs)):
            return self._move(outs, states, [True] * len(outs))
        return self._move(outs, states, self.dense.decode_dense_all(reduced, outs, states, scale))

    def _move(
        self, outs: Arrays, states: Sequence[DenseMomentumState], finite: List[bool]
    ) -> List[bool]:
        """Gives mean gradients momentum, where they are finite."""
        if not self.momentum:
            return finite
        us = [state.arrays["u"] for state in states]
        for state, u in zip(states, us):
            state.spare = (
                np.empty_like(u) if state.spare is None else kernels.beside(state.spare, u)
            )
        moved = kernels.of(outs[0]).apply_momentum(
            outs,
            us,
            [state.spare for state in states],
            momentum=self.momentum,
            nesterov=self.nesterov,
        )

        def noted(moved: Sequence[bool]) -> List[bool]:
            both = [before and after for before, after in zip(finite, moved)]
            for state, good in zip(states, both):
                state.sent = state.spare if good else None
            return both

        return kernels.then(moved, noted)

    def commit(self, state: DenseMomentumState) -> None:
        if state.sent is not None:
            state.arrays["u"], state.spare = state.sent, state.arrays["u"]
