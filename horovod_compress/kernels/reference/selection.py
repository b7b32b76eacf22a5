"""Accumulation with momentum, and the choice of the largest entries: Deep Gradient Compression's
pass over memory."""

from typing import Optional, Sequence, Tuple

import numpy as np

from ..encoded import Encoded
from .dense import TOO_LARGE, Float, advance
from .sparse import code_entries, encode_sparse


def add_to_residual(
    grad: np.ndarray,
    u: Optional[np.ndarray],
    v: np.ndarray,
    *,
    base: Optional[np.ndarray] = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    scale: float = 1.0,
) -> bool:
    """Adds a gradient to momentum u and velocity v in place (DGC, arXiv 1712.01887, section 3).

    vanilla: u ← m·u + g, v ← v + u; Nesterov: u ← m·(u + g), v ← v + u + g; without momentum (u
    None): v ← v + g; where g = scale·grad. An element whose new v would be TOO_LARGE or not finite
    keeps its old v. Where that new v would be finite its u becomes 0, so that the next step is not
    as large again; else it keeps its old u. grad is left zero, so that the decoded sum can be added
    there. With `base` the gradient is grad − base, and grad is left as base is: so parameters that
    an optimizer has moved from there go back, and the sum is added to them.

    Returns whether every new v was finite.
    """
    g = np.float32(scale) * (grad if base is None else grad - base)
    m = np.float32(momentum)
    if u is None:
        new_u = new_v = v + g
    elif nesterov:
        new_u = m * (u + g)
        new_v = v + (new_u + g)
    else:
        new_u = m * u + g
        new_v = v + new_u
    if u is not None:
        u[...] = np.where(np.abs(new_v) < TOO_LARGE, new_u, np.where(np.isfinite(new_v), 0, u))
    grad[...] = 0 if base is None else base
    return advance(v, new_v)


def largest_of(values: np.ndarray, k: int, chunk: int) -> np.ndarray:
    """Ascending indices of the k largest magnitudes of each chunk of so many elements, of equal
    ones the first, and none of zeros."""
    found = [np.empty(0, np.int64)]
    for first in range(0, len(values), chunk):
        magnitude = np.abs(values[first : first + chunk])
        largest = np.argsort(-magnitude, kind="stable")[:k]
        found.append(first + np.sort(largest[magnitude[largest] > 0]))
    return np.concatenate(found).astype(np.uint32)


def take_entries(
    indices: np.ndarray, v: np.ndarray, u: Optional[np.ndarray], *, kind: str, masked: int
) -> Tuple[np.ndarray, np.ndarray, np.ndarray, Sequence[Float]]:
    """Subtracts the selection, as it is sent, from the residual v. Returns (indices, rows, values,
    scales).

    values and scales are what `code_values` makes of v there; entries with a value of 0, which kind
    "power" has no code for, are left out of all that is returned. rows: what v held at indices,
    and, with `masked` above 0 and u given, what u held. v keeps the error; u becomes 0 at indices
    below `masked`.
    """
    indices, values, scales = code_entries(indices, v, kind)
    rows = v[indices][None]
    v[indices] -= values
    if masked and u is not None:
        rows = np.stack([rows[0], u[indices]])
        u[indices[indices < masked]] = 0
    return indices, rows, values, scales


def encode_topk(
    grad: np.ndarray,
    u: Optional[np.ndarray],
    v: np.ndarray,
    *,
    base: Optional[np.ndarray] = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    scale: float = 1.0,
    k: int,
    samples: int,
    offset: int,
    chunk: int = 0,
    kind: str,
    masked: int = 0,
) -> Encoded:
    """add_to_residual, take_entries of the k largest |v|, or with `chunk` above 0 of those of each
    chunk of so many elements, and their sparse body. Of equal ones the first are chosen, none of
    zeros, and none where the gradient was not finite. `undo` of what is returned: (indices, rows),
    as take_entries returns them.

    The native kernel finds a threshold from about `samples` sampled elements, the sample shifted by
    `offset`, and trims what passed, but samples nothing for chunks. The reference sorts, and needs
    neither.
    """
    finite = add_to_residual(
        grad, u, v, base=base, momentum=momentum, nesterov=nesterov, scale=scale
    )
    chosen = largest_of(v, k if finite else 0, chunk or max(len(v), 1))
    indices, rows, values, scales = take_entries(chosen, v, u, kind=kind, masked=masked)
    return encode_sparse(indices, values, kind=kind, scales=scales)._replace(
        finite=finite, undo=(indices, rows)
    )
