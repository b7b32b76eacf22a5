"""Products of a flat matrix M of n rows and m columns with few vectors.

The vectors are concatenated: P is rank × n, and Q is rank × m.
"""

from typing import Optional

import numpy as np

from .dense import TOO_LARGE, advance

# The share left of a vector that lies in the space of those before it.
_ALL = 1e-6


def project(
    grad: np.ndarray,
    residual: np.ndarray,
    q: np.ndarray,
    p: np.ndarray,
    pending: Optional[np.ndarray],
    *,
    rank: int,
) -> bool:
    """residual ← residual + grad, then p ← M·Q of that as M. Returns whether all of it is finite.

    An element that would be TOO_LARGE or not finite keeps its old value. pending is the Q of the
    last product that was sent, where its subtraction is pending, and else None; p holds the P of
    that product. `subtract_product` then runs first.
    """
    if pending is not None:
        subtract_product(residual, p, pending, rank=rank)
    finite = advance(residual, residual + grad)
    vectors = q.reshape(rank, -1)
    p.reshape(rank, -1)[...] = vectors @ residual.reshape(-1, vectors.shape[1]).T
    return finite


def project_back(residual: np.ndarray, p: np.ndarray, q: np.ndarray, *, rank: int) -> None:
    """q ← Mᵀ·P."""
    vectors = p.reshape(rank, -1)
    q.reshape(rank, -1)[...] = vectors @ residual.reshape(vectors.shape[1], -1)


def product(p: np.ndarray, q: np.ndarray, out: np.ndarray, *, rank: int, scale: float) -> None:
    """out ← scale·P·Qᵀ. Vectors are added one after the other, so that all kernels give the same
    bits."""
    out.fill(0)
    for left, right in zip(p.reshape(rank, -1), q.reshape(rank, -1)):
        out += np.outer(left, right).reshape(-1)
    out *= np.float32(scale)


def subtract_product(residual: np.ndarray, p: np.ndarray, q: np.ndarray, *, rank: int) -> None:
    """residual ← residual − P·Qᵀ, clipped to ±2^109, so that rounding errors alone never reach
    TOO_LARGE."""
    sent = np.empty_like(residual)
    product(p, q, sent, rank=rank, scale=1.0)
    np.clip(residual - sent, -TOO_LARGE / 2, TOO_LARGE / 2, out=residual)


def orthonormalize(p: np.ndarray, *, rank: int) -> None:
    """Gram-Schmidt, in place; a vector in the space of those before it, to rounding, becomes
    zero."""
    vectors = p.reshape(rank, -1).astype(np.float64)
    for k, vector in enumerate(vectors):
        before = np.linalg.norm(vector)
        # Once is not orthogonal enough where vectors are nearly parallel.
        for _ in range(2):
            vector -= vectors[:k].T @ (vectors[:k] @ vector)
        left = np.linalg.norm(vector)
        vector *= 1 / left if left > _ALL * before else 0
    p[...] = vectors.reshape(-1)
