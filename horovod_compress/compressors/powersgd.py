"""PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727)."""

import dataclasses
import math
from typing import Optional, Tuple

import numpy as np

from .. import kernels
from ..protocol.requests import Allreduce, Collective
from .base import Asking, Step, Traits, result_of
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
        kernels.of(q).orthonormalize(q, rank=rank)
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

    def encode(self, grad: np.ndarray, state: PowerSGDState, step: Step) -> Asking[Allreduce]:
        if step.index < self.start_step:
            # The residual has it too, until the step has succeeded.
            dense = yield from result_of(self.encode_dense(grad, state, step))
            return Allreduce(dense.array)
        k = kernels.of(grad)
        rank, p, q = state.rank, state.p, state.q
        residual, last = state.arrays["residual"], state.arrays["q"].reshape(rank, -1)
        # Such a vector would stay zero, and its direction unused.
        lost = [k.max_abs(vector) == 0 for vector in last]
        if any(lost):
            fresh = np.random.default_rng(
                self.key("fresh", state.name, step.index)
            ).standard_normal(last.shape, np.float32)
            last[lost] = fresh[lost]
        if not k.project(
            grad, residual, state.arrays["q"], p, q if state.pending else None, rank=rank
        ):
            p.fill(np.nan)  # the sum says so to all ranks
        state.pending = False
        total = yield Allreduce(p)
        if total is not p:
            np.copyto(p, total)
        if k.max_abs(p) < np.inf:
            k.orthonormalize(p, rank=rank)
        k.project_back(residual, p, q, rank=rank)
        return Allreduce(q)

    def decode(
        self, summed: np.ndarray, out: np.ndarray, state: PowerSGDState, step: Step, scale: float
    ) -> Asking[bool]:
        if step.index < self.start_step:
            return (yield from result_of(self.decode_dense(summed, out, state, scale)))
        k = kernels.of(out)
        rank, size, p, q = state.rank, step.size, state.p, state.q
        np.divide(summed, np.float32(size), out=q)
        largest = sum(
            k.max_abs(left) * k.max_abs(right)
            for left, right in zip(p.reshape(rank, -1), q.reshape(rank, -1))
        )
        if not largest * max(1.0, abs(scale * size)) < _MOST:
            out.fill(np.nan)
            last = state.arrays["q"]
            # Lengths do not matter, and with a shorter one the next sum may stay in range.
            if k.max_abs(last) > _SHORT:
                last *= _SHORT
            return False
        k.product(p, q, out, rank=rank, scale=scale * size)
        state.sent = q
        return True

    def commit(self, state: PowerSGDState) -> None:
        if state.sent is not None:
            state.pending = True
            largest = kernels.of(state.sent).max_abs(state.sent)
            # The lengths of vectors do not matter, and would overflow sooner or later.
            if largest > 0:
                np.divide(state.sent, np.float32(largest), out=state.arrays["q"])

    def apply_pending(self, state: PowerSGDState) -> None:
        if state.pending:
            state.pending = False
            kernels.of(state.p).subtract_product(
                state.arrays["residual"], state.p, state.q, rank=state.rank
            )


def matrix_of(shape: Tuple[int, ...], rank: int) -> Tuple[int, int]:
    """Rows and columns: the products of the first dimensions and of the others, so that elements
    need not move. Of all splits it is the first one with the smallest factors."""
    splits = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, max(len(shape), 2))]
    return min(splits, key=lambda split: _factors(split[0], split[1], rank))


def _factors(n: int, m: int, rank: int) -> int:
    """Floats of P and Q."""
    return min(rank, n, m) * (n + m)
