"""Accumulation with momentum, and the choice of the largest entries: Deep Gradient Compression's pass over memory."""
from typing import Optional, Tuple

import numpy as np

from ..encoded import Encoded
from .dense import TOO_LARGE
from .sparse import encode_sparse, round_values


def add_to_residual(
    grad: np.ndarray, u: Optional[np.ndarray], v: np.ndarray, *, momentum: float = 0.0, nesterov: bool = False, scale: float = 1.0,
    k: int = 0, samples: int = 0, offset: int = 0,
) -> Tuple[np.ndarray, bool]:
    """Adds a gradient to momentum u and velocity v in place and chooses what to send (DGC, arXiv 1712.01887, section 3).

    vanilla: u ← m·u + g, v ← v + u; Nesterov: u ← m·(u + g), v ← v + u + g; without momentum (u None): v ← v + g;
    where g = scale·grad. An element whose new v would be TOO_LARGE or not finite keeps its old v. Where that new v would be finite its u
    becomes 0, so that the next step is not as large again; else it keeps its old u. grad is left zero, so that the decoded sum can be
    added there.

    Returns (indices, finite): ascending indices of at most k of the largest non-zero |v|, at least 0.8·k where that many
    are not zero; and whether every new v was finite. The native kernel finds its threshold from about `samples` sampled
    elements, the sample shifted by `offset`, and trims what passed; the reference sorts, and needs neither.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        g = np.float32(scale) * grad
        m = np.float32(momentum)
        if u is None:
            new_u = new_v = v + g
        elif nesterov:
            new_u = m * (u + g)
            new_v = v + (new_u + g)
        else:
            new_u = m * u + g
            new_v = v + new_u
    finite = np.abs(new_v) < TOO_LARGE
    v[...] = np.where(finite, new_v, v)
    if u is not None:
        u[...] = np.where(finite, new_u, np.where(np.isfinite(new_v), 0, u))
    grad.fill(0)
    magnitude = np.abs(v)
    largest = np.argsort(-magnitude, kind="stable")[:k]
    indices = np.sort(largest[magnitude[largest] > 0]).astype(np.uint32)
    return indices, bool(finite.all())


def take_entries(indices: np.ndarray, v: np.ndarray, u: Optional[np.ndarray], *, kind: str, mask: bool) -> np.ndarray:
    """Subtracts the selection from the residual v. Returns a row of the values sent, rounded to `kind` ("fp32", "fp16", "bf16"), and,
    with `mask` and u given, a row of u at those indices. v keeps the rounding error; masked u becomes 0."""
    sent = round_values(v[indices], kind)
    v[indices] -= sent
    if not mask or u is None:
        return sent[None]
    rows = np.stack([sent, u[indices]])
    u[indices] = 0
    return rows


def encode_topk(
    grad: np.ndarray, u: Optional[np.ndarray], v: np.ndarray, *, momentum: float = 0.0, nesterov: bool = False, scale: float = 1.0,
    k: int, samples: int, offset: int, kind: str, mask: bool = False,
) -> Encoded:
    """add_to_residual, take_entries of what it has chosen, and their sparse body; none where the gradient was not finite. `undo` of what is
    returned: (indices, rows), as those two return them."""
    indices, finite = add_to_residual(grad, u, v, momentum=momentum, nesterov=nesterov, scale=scale, k=k, samples=samples, offset=offset)
    indices = indices if finite else indices[:0]
    rows = take_entries(indices, v, u, kind=kind, mask=mask)
    return encode_sparse(indices, rows[0], kind=kind)._replace(finite=finite, undo=(indices, rows))
