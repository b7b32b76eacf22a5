"""PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727)."""

import dataclasses
import itertools
import math
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from .. import kernels
from ..protocol.requests import Allreduce, Collective
from .base import Asking, Step, Traits
from .options import Count, Number, option
from .selective import SelectiveCompressor
from .state import LOCAL, SHARED, State, zeros

# A bound on the result's elements from which they may not be finite.
_MOST = 2.0**126
_SHORT = np.float32(2.0**-40)


@dataclasses.dataclass
class PowerSGDState(State):
    """rank is that of the factors. p and q are the open or last step's factors, as concatenated
    vectors. pending says whether their product is still to be subtracted from the residual."""

    rank: int = 0
    p: np.ndarray = dataclasses.field(default_factory=lambda: zeros(0))
    q: np.ndarray = dataclasses.field(default_factory=lambda: zeros(0))
    pending: bool = False


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
    )
    roles = {"residual": LOCAL, "q": SHARED}  # q: a direction

    rank: int = option(Count(1), 4, "columns of P and Q; exact for matrices of at most this rank")
    start_step: int = option(Count(), 0, "steps before this one go dense")
    min_rate: float = option(
        Number(0), 2.0, "tensors that would shrink less than this many times go dense"
    )

    def adapted(self, shape: Tuple[int, ...]) -> Optional["PowerSGD"]:
        n, m = matrix_of(shape, self.rank)
        return self if 0 < n * m >= self.min_rate * _factors(n, m, self.rank) else None

    def init(self, name: str, shape: Tuple[int, ...]) -> PowerSGDState:
        n, m = matrix_of(shape, self.rank)
        rank = min(self.rank, n, m)
        q = np.random.default_rng(self.key("start", name)).standard_normal(rank * m, np.float32)
        # The same space; but nearly parallel vectors would lose a direction to rounding.
        kernels.of(q).orthonormalize([q], rank=rank)
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
        self, grads: Sequence[np.ndarray], states: Sequence[PowerSGDState], steps: Sequence[Step]
    ) -> Asking[List[Allreduce]]:
        if steps[0].index < self.start_step:
            # The residual has it too, until the step has succeeded.
            dense: Any = [self.encode_dense(*each) for each in zip(grads, states, steps)]
            return [Allreduce(each.array) for each in dense]
        kernel, ranks = kernels.of(grads[0]), [state.rank for state in states]
        residuals = [state.arrays["residual"] for state in states]
        ps, qs = [state.p for state in states], [state.q for state in states]
        self._renew(states, steps[0].index)
        if not all(state.pending for state in states):
            for state in states:
                self.apply_pending(state)
        finite = kernel.project(
            grads,
            residuals,
            [state.arrays["q"] for state in states],
            ps,
            qs if states[0].pending else None,
            rank=ranks,
        )
        for state, good in zip(states, finite):
            state.pending = False
            if not good:
                state.p.fill(np.nan)  # the sum says so to all ranks
        totals = yield [Allreduce(p) for p in ps]
        for p, total in zip(ps, totals):
            if total is not p:
                np.copyto(p, total)
        good = [largest < np.inf for largest in kernel.max_abs(ps)]
        if any(good):
            kernel.orthonormalize(
                list(itertools.compress(ps, good)), rank=list(itertools.compress(ranks, good))
            )
        kernel.project_back(residuals, ps, qs, rank=ranks)
        return [Allreduce(q) for q in qs]

    def _renew(self, states: Sequence[PowerSGDState], index: int) -> None:
        """Draws vectors of q anew that are zero and would stay so, their directions unused."""
        lasts = [state.arrays["q"].reshape(state.rank, -1) for state in states]
        for state, last, lengths in zip(states, lasts, _largest(lasts)):
            lost = [largest == 0 for largest in lengths]
            if any(lost):
                key = self.key("fresh", state.name, index)
                fresh = np.random.default_rng(key).standard_normal(last.shape, np.float32)
                last[lost] = fresh[lost]

    def decode_all(
        self,
        summed: Sequence[np.ndarray],
        outs: Sequence[np.ndarray],
        states: Sequence[PowerSGDState],
        steps: Sequence[Step],
        scale: float,
    ) -> List[bool]:
        if steps[0].index < self.start_step:
            return self.decode_dense_all(summed, outs, states, scale)
        kernel, size = kernels.of(outs[0]), steps[0].size
        ps, qs = [state.p for state in states], [state.q for state in states]
        for each, q in zip(summed, qs):
            np.divide(each, np.float32(size), out=q)
        kernel.product(ps, qs, outs, rank=[state.rank for state in states], scale=scale * size)
        lengths = [
            _largest([each.reshape(state.rank, -1) for each, state in zip(factors, states)])
            for factors in (ps, qs)
        ]
        finite = []
        for state, out, of_p, of_q in zip(states, outs, *lengths):
            largest = sum(left * right for left, right in zip(of_p, of_q))
            finite.append(largest * max(1.0, abs(scale * size)) < _MOST)
            if finite[-1]:
                state.sent = state.q, max(of_q)
            else:
                out.fill(np.nan)
                last = state.arrays["q"]
                # Lengths do not matter, and with a shorter one the next sum may stay in range.
                if kernel.max_abs([last])[0] > _SHORT:
                    last *= _SHORT
        return finite

    def commit(self, state: PowerSGDState) -> None:
        if state.sent is not None:
            q, largest = state.sent
            state.pending = True
            # The lengths of vectors do not matter, and would overflow sooner or later.
            if largest > 0:
                np.divide(q, np.float32(largest), out=state.arrays["q"])

    def apply_pending(self, state: PowerSGDState) -> None:
        if state.pending:
            state.pending = False
            kernels.of(state.p).subtract_product(
                [state.arrays["residual"]], [state.p], [state.q], rank=state.rank
            )


def _largest(matrices: Sequence[np.ndarray]) -> List[List[float]]:
    """Of each matrix the largest magnitudes of its rows."""
    rows = [row for matrix in matrices for row in matrix]
    found = iter(kernels.of(matrices[0]).max_abs(rows))
    return [[next(found) for _ in matrix] for matrix in matrices]


def matrix_of(shape: Tuple[int, ...], rank: int) -> Tuple[int, int]:
    """Rows and columns: the products of the first dimensions and of the others, so that elements
    need not move. Of all splits it is the first one with the smallest factors."""
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, max(len(shape), 2))]
    return min(splits, key=lambda split: _factors(split[0], split[1], rank))


def _factors(n: int, m: int, rank: int) -> int:
    """Floats of P and Q."""
    return min(rank, n, m) * (n + m)
