"""Global random-k: the same random coordinates on every rank, so payloads add up (Vineeth S, arXiv
2109.12497)."""

import dataclasses
import math
from typing import Optional, Tuple

import numpy as np

from .. import kernels
from ..protocol.requests import Allreduce, Collective
from .base import Step, Traits
from .options import Count, Flag, Number, OneOf, option
from .selective import SelectiveCompressor
from .state import LOCAL, Rollback, State


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
        """Whether only some coordinates are worked on."""
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

    def draw(
        self, grad: np.ndarray, state: State, step: Step
    ) -> Tuple[Optional[np.ndarray], np.ndarray, bool]:
        """(indices, values, finite) of this step, moved out of the gradient or the residual. Where
        indices is None, values are the gradient itself."""
        if not self.sparse:
            if step.scale != 1:
                grad *= np.float32(step.scale)
            return None, grad, True
        model = state.model if self.of == "model" else None
        numel = grad.size if model is None else model.numel
        count = self.count(numel)
        sweep, block = divmod(step.index, -(-numel // count) if count else 1)
        first = min(block * count, numel - count)
        if model is not None:
            indices = model.own(state.name, self.key("shared", sweep), first, count)
        else:
            indices = kernels.cpu.draw_coordinates(
                key=self.key("shared", state.name, sweep), numel=numel, first=first, count=count
            )
        residual = state.arrays.get("residual")
        if residual is None:
            finite = kernels.of(grad).max_abs(grad) < np.inf
            values = grad[indices]
            values *= np.float32(step.scale * numel / max(count, 1))
            grad.fill(0)
        else:
            finite = self.accumulate(grad, state, step)
            _, _, values, _ = kernels.of(grad).take_entries(
                indices, residual, None, kind="fp32", masked=0
            )
            state.rollbacks = [Rollback("residual", indices, values.copy())]
        return indices, values, finite


@dataclasses.dataclass(frozen=True, repr=False)
class GlobalRandK(SharedCoordinates):
    """Sums ratio·d, or k, coordinates of each tensor, the same random ones on every rank, in
    float32.

        K = k or ⌈ratio·d⌉ places of a permutation that follows from the seed, in turn
        v ← residual + g;  result = mean over ranks of v there;  residual ← v elsewhere

    No index travels and payloads are allreduced, so it scales to any number of ranks. With error
    feedback (the default) the residual keeps the other coordinates until they are drawn. Unbiased,
    they are dropped and those drawn count d/K times. The authors' code does neither.
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

    def encode(self, grad: np.ndarray, state: State, step: Step) -> Allreduce:
        state.indices, values, finite = self.draw(grad, state, step)
        drawn = values.size
        if self.of == "model":
            values = np.append(values, np.float32(0))  # there may be none
        if not finite:
            values.fill(np.nan)  # the sum says so to all ranks
        return Allreduce(values, elements=drawn)

    def decode(
        self, summed: np.ndarray, out: np.ndarray, state: State, step: Step, scale: float
    ) -> bool:
        if self.of == "model" and (summed[-1] != 0 or not math.isfinite(scale)):
            out.fill(np.nan)
            return False
        values = summed[:-1] if self.of == "model" else summed
        return kernels.of(out).scatter_add(out, state.indices, values, scale=scale)
