"""PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727)."""

import dataclasses
import math
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from .. import kernels
from ..protocol.requests import Allreduce, Collective
from .base import LOCAL, SHARED, Arrays, Asking, State, Steps, Traits, zeros
from .options import Count, Number, option
from .selective import SelectiveCompressor

# Largest of those vectors of Q that are not shortened any more.
_SHORT = 2.0**-40
# More vectors make programs on a device spill.
_MOST_ON_DEVICE = 64


@dataclasses.dataclass
class PowerSGDState(State):
    """rank is that of the factors. p and q are those of the open step, as concatenated vectors.
    pending says whether the product of p and the last step's Q, in arrays, is still to be
    subtracted from the residual. Where that Q is used it is divided by `length`, and times _SHORT
    where it is `short`, so that products stay in range. largest are the largest magnitudes of its
    vectors, none where they are not known."""

    rank: int = 0
    p: np.ndarray = dataclasses.field(default_factory=lambda: zeros(0))
    q: np.ndarray = dataclasses.field(default_factory=lambda: zeros(0))
    pending: bool = False
    length: float = 1.0
    short: bool = False
    largest: List[float] = dataclasses.field(default_factory=list)

    def replaced(self) -> None:
        self.largest = []

    def follow(self, grad: Any) -> None:
        super().follow(grad)
        self.p, self.q = kernels.beside(self.p, grad), kernels.beside(self.q, grad)


@dataclasses.dataclass(frozen=True, repr=False)
class PowerSGD(SelectiveCompressor):
    """Approximates each matrix M = residual + g by P·Qᵀ of low rank, found by one power iteration a
    step from the last step's Q.

        M = residual + g, as a matrix
        P ← Σ M·Q, orthonormalized;  Q ← mean Mᵀ·P;  result = P·Qᵀ;  residual ← M − P·Qᵀ

    P and Q are two small allreduces a tensor. The subtraction is pending until the next
    step's pass over the residual. Tensors of more dimensions are matrices of the first dimensions
    by the others, split where least is sent, so layouts of different frameworks do not matter.
    One-dimensional tensors go dense.
    """

    id = "powersgd"
    traits = Traits(
        number=17,
        paper=(
            "Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression, "
            "NeurIPS 2019, arXiv 1905.13727"
        ),
        # Every rank orthonormalizes the sums itself, and kernels differ in the last bits of long
        # sums.
        same_kernels=True,
        on_device=True,
    )
    roles = {"residual": LOCAL, "q": SHARED}  # q: a direction

    rank: int = option(Count(1), 4, "columns of P and Q; exact for matrices of at most this rank")
    start_step: int = option(Count(), 0, "steps before this one go dense")
    min_rate: float = option(
        Number(0), 2.0, "tensors that would shrink less than this many times go dense"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank > _MOST_ON_DEVICE:
            vars(self)["traits"] = self.traits._replace(on_device=False)

    def adapted(self, shape: Tuple[int, ...]) -> Optional["PowerSGD"]:
        n, m = matrix_of(shape, self.rank)
        return self if 0 < n * m >= self.min_rate * _factors(n, m, self.rank) else None

    def init(self, name: str, shape: Tuple[int, ...]) -> PowerSGDState:
        n, m = matrix_of(shape, self.rank)
        rank = min(self.rank, n, m)
        q = np.random.default_rng(self.key("start", name)).standard_normal(rank * m, np.float32)
        # The same space; but nearly parallel vectors would lose a direction to rounding.
        kernels.of(q).orthonormalize([q], [q], rank=rank)
        return PowerSGDState(
            name,
            {"residual": zeros(n * m), "q": q},
            rank=rank,
            p=zeros(rank * n),
            q=zeros(rank * m),
        )

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        return (Collective("allreduce", "float32", "sum"),) * 2

    def after_warmup(self) -> "PowerSGD":
        return dataclasses.replace(self, start_step=0)

    def encode_all(
        self, grads: Arrays, states: Sequence[PowerSGDState], steps: Steps
    ) -> Asking[List[Allreduce]]:
        if steps[0].index < self.start_step:
            # The residual has it too, until the step has succeeded.
            dense: Any = self.encode_dense_all(grads, states, steps)
            return kernels.then(dense, lambda found: [Allreduce(each.array) for each in found])
        kernel, ranks = kernels.of(grads[0]), [state.rank for state in states]
        residuals = [state.arrays["residual"] for state in states]
        ps, qs = [state.p for state in states], [state.q for state in states]
        self._renew(states, steps[0].index)
        kernel.project(
            grads,
            residuals,
            [state.arrays["q"] for state in states],
            ps,
            rank=ranks,
            pending=[state.pending for state in states],
            length=[state.length / (_SHORT if state.short else 1) for state in states],
        )
        for state in states:
            state.pending = False
        # NaN says to all ranks that a gradient is not finite.
        sums = yield [Allreduce(p) for p in ps]
        kernel.orthonormalize(sums, ps, rank=ranks)
        kernel.project_back(residuals, ps, qs, rank=ranks)
        return [Allreduce(q) for q in qs]

    def _renew(self, states: Sequence[PowerSGDState], index: int) -> None:
        """Draws vectors of q anew that are zero and would stay so, their directions unused."""
        unknown = [state for state in states if not state.largest]
        for state, largest in zip(unknown, _largest([(s.arrays["q"], s.rank) for s in unknown])):
            state.largest = largest
        for state in states:
            lost = [i for i, largest in enumerate(state.largest) if largest == 0]
            if lost:
                self.apply_pending(state)
                last, key = state.arrays["q"], self.key("fresh", state.name, index)
                vectors = _vectors(last, state.rank)
                shape = state.rank, last.size // state.rank
                fresh = np.random.default_rng(key).standard_normal(shape, np.float32)
                for i in lost:
                    np.copyto(vectors[i], fresh[i])
                state.largest = [largest or 1.0 for largest in state.largest]

    def decode_all(
        self,
        summed: Arrays,
        outs: Arrays,
        states: Sequence[PowerSGDState],
        steps: Steps,
        scale: float,
    ) -> List[bool]:
        if steps[0].index < self.start_step:
            return self.decode_dense_all(summed, outs, states, scale)
        size = steps[0].size
        finite = kernels.of(outs[0]).product(
            [state.p for state in states],
            summed,
            [state.q for state in states],
            outs,
            rank=[state.rank for state in states],
            scale=scale * size,
            size=size,
        )
        factors = _largest([(state.q, state.rank) for state in states])

        def note(finite: Sequence[bool]) -> List[bool]:
            for state, largest, is_finite in zip(states, factors, finite):
                if is_finite:
                    state.sent = largest
                elif max(state.largest, default=0) > _SHORT * state.length:
                    # With a shorter one the next sum may stay in range.
                    state.short = True
            return list(finite)

        return kernels.then(finite, note)

    def commit(self, state: PowerSGDState) -> None:
        if state.sent and max(state.sent) > 0:
            state.q, state.arrays["q"] = state.arrays["q"], state.q
            state.pending, state.short, state.largest = True, False, state.sent
            # The lengths of vectors do not matter, and would overflow sooner or later.
            state.length = max(state.sent)

    def apply_pending(self, state: PowerSGDState) -> None:
        q = state.arrays["q"]
        if state.pending:
            kernels.of(q).subtract_product(
                [state.arrays["residual"]], [state.p], [q], rank=state.rank
            )
        if state.length != 1:
            np.divide(q, np.float32(state.length), out=q)
        if state.short:
            np.multiply(q, np.float32(_SHORT), out=q)
        factor = _SHORT if state.short else 1.0
        state.largest = [largest / state.length * factor for largest in state.largest]
        state.pending, state.length, state.short = False, 1.0, False


def _vectors(factor: np.ndarray, rank: int) -> List[np.ndarray]:
    """The vectors of a factor, one behind the other."""
    length = factor.size // rank
    return [factor[i * length : (i + 1) * length] for i in range(rank)]


def _largest(factors: Sequence[Tuple[np.ndarray, int]]) -> Sequence[List[float]]:
    """Of each factor, with its rank, the largest magnitudes of its vectors; late on a device."""
    vectors = [vector for factor, rank in factors for vector in _vectors(factor, rank)]
    found = kernels.of(vectors[0]).max_abs(vectors) if vectors else []

    def by_factor(largest: Sequence[float]) -> List[List[float]]:
        each = iter(largest)
        return [[next(each) for _ in range(rank)] for _, rank in factors]

    return kernels.then(found, by_factor)


def matrix_of(shape: Tuple[int, ...], rank: int) -> Tuple[int, int]:
    """Rows and columns: the products of the first dimensions and of the others, so that elements
    need not move. Of all splits it is the first one with the smallest factors."""
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, max(len(shape), 2))]
    return min(splits, key=lambda split: _factors(split[0], split[1], rank))


def _factors(n: int, m: int, rank: int) -> int:
    """Floats of P and Q."""
    return min(rank, n, m) * (n + m)
