"""Products of a flat matrix M of n rows and m columns with few vectors.

The vectors are concatenated: P is rank × n, and Q is rank × m.
"""

import numpy as np

from .dense import TOO_LARGE, advance

# The share left of a vector that lies in the space of those before it.
_ALL = 1e-6


def project(
    grad: np.ndarray,
    residual: np.ndarray,
    q: np.ndarray,
    p: np.ndarray,
    *,
    rank: int,
    pending: bool,
    length: float,
) -> None:
    """residual ← residual + grad, then p ← M·Q/length of that as M. Where not all of it is
    finite, p has a NaN.

    An element that would be TOO_LARGE or not finite keeps its old value. pending: True if P·Qᵀ of p
    and q is still to be subtracted. `subtract_product` then runs first.
    """
    if pending:
        subtract_product(residual, p, q, rank=rank)
    finite = advance(residual, residual + grad)
    vectors = (q / np.float64(length)).astype(np.float32).reshape(rank, -1)
    p.reshape(rank, -1)[...] = vectors @ residual.reshape(-1, vectors.shape[1]).T
    if not finite:
        p.fill(np.nan)


def project_back(residual: np.ndarray, p: np.ndarray, q: np.ndarray, *, rank: int) -> None:
    """q ← Mᵀ·P."""
    vectors = p.reshape(rank, -1)
    q.reshape(rank, -1)[...] = vectors @ residual.reshape(vectors.shape[1], -1)


def product(
    p: np.ndarray,
    sums: np.ndarray,
    q: np.ndarray,
    out: np.ndarray,
    *,
    rank: int,
    scale: float,
    size: float,
) -> bool:
    """q ← sums/size, then out ← scale·P·Qᵀ. Returns whether that is finite. Vectors are added one
    after the other, so that all kernels give the same bits."""
    np.divide(sums, np.float32(size), out=q)
    _multiply(p, q, out, rank)
    out *= np.float32(scale)
    return bool(np.isfinite(out).all())


def _multiply(p: np.ndarray, q: np.ndarray, out: np.ndarray, rank: int) -> None:
    out.fill(0)
    for left, right in zip(p.reshape(rank, -1), q.reshape(rank, -1)):
        out += np.outer(left, right).reshape(-1)


def subtract_product(residual: np.ndarray, p: np.ndarray, q: np.ndarray, *, rank: int) -> None:
    """residual ← residual − P·Qᵀ, clipped to ±2^109, so that rounding errors alone never reach
    TOO_LARGE."""
    sent = np.empty_like(residual)
    _multiply(p, q, sent, rank)
    np.clip(residual - sent, -TOO_LARGE / 2, TOO_LARGE / 2, out=residual)


def orthonormalize(sums: np.ndarray, p: np.ndarray, *, rank: int) -> None:
    """p ← the vectors of sums, which may be p, by Gram-Schmidt. A vector in the space of those
    before it, to rounding, becomes zero. Vectors that are not finite, and those after them, have
    NaN."""
    vectors = sums.reshape(rank, -1).astype(np.float64)
    for k, vector in enumerate(vectors):
        before = np.linalg.norm(vector)
        # Once is not orthogonal enough where vectors are nearly parallel.
        for _ in range(2):
            vector -= vectors[:k].T @ (vectors[:k] @ vector)
        left = np.linalg.norm(vector)
        vector *= 1 / left if left > _ALL * before else 0
    p[...] = vectors.reshape(-1)
