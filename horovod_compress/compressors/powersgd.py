"""PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019, arXiv 1905.13727)."""
import dataclasses
import math

import numpy as np

from .. import kernels
from .base import Dense, State, Summed, zeros
from .options import Count, Number, option
from .selective import SelectiveCompressor


@dataclasses.dataclass(frozen=True, repr=False)
class PowerSGD(SelectiveCompressor):
    """Approximates each matrix M = residual + g by P·Qᵀ of low rank, found by one power iteration a step from the last step's Q.

    P = ΣM·Q, orthonormalized; Q = mean Mᵀ·P; two small allreduces a tensor. The residual is M - P·Qᵀ. Tensors of more
    dimensions are matrices of their first dimension by all others; one-dimensional ones go dense.
    """

    id = "powersgd"
    number = 17
    road = "allreduce"
    paper = "Vogels, Karimireddy, Jaggi, PowerSGD: Practical Low-Rank Gradient Compression, NeurIPS 2019, arXiv 1905.13727"

    rank: int = option(Count(1), 4, "columns of P and Q; exact for matrices of at most this rank")
    start_step: int = option(Count(), 0, "steps before this one go dense")
    min_rate: float = option(Number(0), 2.0, "tensors that would shrink less than this many times go dense")

    def for_tensor(self, name, shape):
        chosen = super().for_tensor(name, shape)
        n, m = _matrix(shape)
        if chosen is self and (n * m == 0 or n * m < self.min_rate * min(self.rank, n, m) * (n + m)):
            return self.fallback()
        return chosen

    def init(self, name, shape):
        n, m = _matrix(shape)
        rank = min(self.rank, n, m)
        q = np.random.default_rng(self.key("start", name)).standard_normal((m, rank), np.float32)
        return State(name, {"residual": zeros(n * m), "q": q.reshape(-1)}, scratch={"shape": (n, m, rank)})

    def encode(self, grad, state, step):
        if step.index < self.start_step:
            return Dense(grad)
        n, m, rank = state.scratch["shape"]
        matrix = state.arrays["residual"].reshape(n, m)
        _, finite = kernels.accumulate(grad, None, state.arrays["residual"], 0.0, False, 1.0, 0, 0, 0)
        q = state.arrays["q"].reshape(m, rank)
        lost = ~q.any(axis=0)  # such a column would stay zero, and its direction unused
        if lost.any():
            fresh = np.random.default_rng(self.key("fresh", state.name, step.index)).standard_normal((m, rank), np.float32)
            q[:, lost] = fresh[:, lost]
        p = matrix @ q
        if not finite:
            p.fill(np.nan)  # the sum says so to all ranks
        p = yield Summed(p.reshape(-1))
        if np.isfinite(p).all():
            p = np.linalg.qr(p.reshape(n, rank))[0]
        state.scratch["p"], state.scratch["size"] = p.reshape(n, rank), step.size
        return Summed((matrix.T @ state.scratch["p"]).reshape(-1))

    def decode(self, payload, out, state, scale):
        if isinstance(payload, Dense):
            return super().decode(payload, out, state, scale)
        n, m, rank = state.scratch["shape"]
        p, q = state.scratch["p"], payload.array / np.float32(state.scratch["size"])
        np.matmul(p, q.reshape(m, rank).T, out=out.reshape(n, m))
        largest = kernels.largest(out)
        if not largest < np.inf:
            out.fill(np.nan)
            return False
        residual = state.arrays["residual"]
        residual -= out
        if largest > 2.0**100:  # rounding alone must not take it to where nothing can be added any more
            np.clip(residual, -(2.0**109), 2.0**109, out=residual)
        state.taken = p, q
        out *= np.float32(scale * state.scratch["size"])
        return kernels.largest(out) < np.inf

    def commit(self, state):
        if state.taken is not None:
            q = state.taken[1]
            largest = np.abs(q).max()
            if largest > 0:  # the length of its columns does not matter, and would overflow sooner or later
                state.arrays["q"][...] = q / largest
        state.taken = None

    def rollback(self, state):
        if state.taken is not None:
            n, m, rank = state.scratch["shape"]
            p, q = state.taken
            state.arrays["residual"] += (p @ q.reshape(m, rank).T).reshape(-1)
        state.taken = None


def _matrix(shape):
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)
