"""Global random-k: the same random coordinates on every rank, so payloads add up (Vineeth S, arXiv
2109.12497)."""

import dataclasses
import math
from typing import List, Optional, Tuple

import numpy as np

from .. import kernels
from ..protocol.requests import Allreduce, Collective
from .base import LOCAL, Arrays, Rollback, State, States, Steps, Traits
from .options import Count, Flag, Number, OneOf, option
from .selective import SelectiveCompressor


@dataclasses.dataclass(frozen=True, repr=False)
class SharedCoordinates(SelectiveCompressor):
    """A compressor that may work on K coordinates of a tensor, the same random ones on all ranks;
    the others are 0 in the result. A permutation that follows from the seed is cut into blocks of
    K, one a step, so a sweep visits every coordinate. The last block of a sweep begins early enough
    to be whole. The next sweep has another permutation. The coordinates are those of one tensor, or
    those of all tensors together; then a small tensor may have none in some steps."""

    traits = Traits(takes_scale=True)
    roles = {"residual": LOCAL}

    ratio: Optional[float] = option(
        Number(0, 1, low_open=True, optional=True),
        None,
        "share of coordinates in a step; none: all",
    )
    k: Optional[int] = option(
        Count(1, optional=True), None, "coordinates in a step, instead of a ratio"
    )
    of: str = option(
        OneOf("tensor", "model"),
        "tensor",
        "whose coordinates ratio and k count: each tensor's, or those of all that are compressed",
    )
    unbiased: bool = option(
        Flag(), False, "scale what is drawn by d/K; else what is not drawn stays in a residual"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for what, given in {"of=model": self.of == "model", "unbiased": self.unbiased}.items():
            if given and not self.sparse:
                raise ValueError(f"{self.id}: {what} is for coordinates drawn by ratio or k")

    @property
    def sparse(self) -> bool:
        """True if only some coordinates are worked on."""
        return self.ratio is not None or self.k is not None

    def count(self, numel: int) -> int:
        """K of a tensor, or model, of numel elements."""
        return min(numel, self.k or max(1, math.ceil((self.ratio or 0) * numel - 1e-6)))

    def init(self, name: str, shape: Tuple[int, ...]) -> State:
        return (
            super().init(name, shape)
            if self.sparse and not self.unbiased
            else self.traits.state_type(name)
        )

    def draw(self, grads: Arrays, states: States, steps: Steps) -> Tuple[Arrays, List[bool]]:
        """(values, finite) of each tensor's step, moved out of gradients or residuals, at
        `State.indices`. Where that is None, values are the gradient itself."""
        step, kernel = steps[0], kernels.of(grads[0])
        if not self.sparse:
            for grad in grads if step.scale != 1 else ():
                grad *= np.float32(step.scale)
            return grads, [True] * len(grads)
        for grad, state in zip(grads, states):
            state.indices = self._coordinates(grad.size, state, step.index)
        drawn = [state.indices for state in states]
        if self.unbiased:
            finite = [largest < np.inf for largest in kernel.max_abs(grads)]
            # On the CPU, as those of a residual.
            values = [np.asarray(grad[indices]) for grad, indices in zip(grads, drawn)]
            for grad, state, its in zip(grads, states, values):
                numel = self._numel(grad.size, state)
                its *= np.float32(step.scale * numel / max(self.count(numel), 1))
                grad.fill(0)
            return values, finite
        residuals = [state.arrays["residual"] for state in states]
        finite = list(self.accumulate_all(grads, states, steps))
        taken = kernel.take_entries(drawn, residuals, None, kind="fp32", masked=0)
        for state, (indices, _, its, _) in zip(states, taken):
            state.rollbacks = [Rollback("residual", indices, its.copy())]
        return [its for _, _, its, _ in taken], finite

    def _numel(self, numel: int, state: State) -> int:
        """Of what the coordinates are that a tensor of numel elements has its own from."""
        return state.model.numel if self.of == "model" and state.model is not None else numel

    def _coordinates(self, numel: int, state: State, index: int) -> np.ndarray:
        """Those of a tensor at a step."""
        total = self._numel(numel, state)
        count = self.count(total)
        sweep, block = divmod(index, -(-total // count) if count else 1)
        first = min(block * count, total - count)
        if self.of == "model" and state.model is not None:
            return state.model.own(state.name, self.key("shared", sweep), first, count)
        return kernels.cpu.draw_coordinates(
            key=self.key("shared", state.name, sweep), numel=total, first=first, count=count
        )


@dataclasses.dataclass(frozen=True, repr=False)
class GlobalRandK(SharedCoordinates):
    """Sums ratio·d, or k, coordinates of each tensor, the same random ones on every rank, in
    float32.

        K = k or ⌈ratio·d⌉ places of a permutation that follows from the seed, in turn
        v ← residual + g;  result = mean over ranks of v there;  residual ← v elsewhere

    No index travels and payloads are allreduced, so it scales to any number of ranks. With error
    feedback (the default) the residual keeps the other coordinates until they are drawn. With
    `unbiased` there is none, and what is drawn is multiplied by d/K. The authors' code has
    neither.
    """

    id = "globalrandk"
    traits = SharedCoordinates.traits._replace(
        number=8,
        paper=(
            "Vineeth S, Unbiased Single-scale and Multi-scale Quantizers for Distributed "
            "Optimization, arXiv 2109.12497"
        ),
    )

    ratio: float = option(Number(0, 1, low_open=True), 0.01, "share of coordinates in a step")

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        return (Collective("allreduce", "float32", "sum"),)

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> List[Allreduce]:
        payloads = []
        for values, finite in zip(*self.draw(grads, states, steps)):
            drawn = values.size
            if self.of == "model":
                values = np.append(values, np.float32(0))  # there may be none
            if not finite:
                values.fill(np.nan)  # the sum says so to all ranks
            payloads.append(Allreduce(values, elements=drawn))
        return payloads

    def decode_all(
        self, summed: Arrays, outs: Arrays, states: States, steps: Steps, scale: float
    ) -> List[bool]:
        of_model = self.of == "model"
        finite = kernels.of(outs[0]).scatter_add(
            outs,
            [state.indices for state in states],
            [values[:-1] for values in summed] if of_model else summed,
            scale=scale,
        )
        for i, values in enumerate(summed if of_model else ()):
            if values[-1] != 0 or not math.isfinite(scale):
                outs[i].fill(np.nan)
                finite[i] = False
        return finite
