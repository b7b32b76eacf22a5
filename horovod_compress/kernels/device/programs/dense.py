"""Programs of operations on whole tensors."""

import triton
import triton.language as tl

from .parts import INFINITY, block_of, float_at, floats, magnitude_of


@triton.jit
def find_largest(table, owners, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """For its block: the largest magnitude.

    x."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    tl.store(
        peaks + tl.program_id(0),
        tl.max(magnitude_of(tl.load(floats(row, 0) + start + i, mask=inside, other=0.0))),
    )


@triton.jit
def average_momentum(
    table,
    owners,
    largest,
    peaks,
    NESTEROV: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the tensor's largest magnitude is finite: new_u ← m·u + out, then out ← new_u, or out +
    m·new_u. For its block: the largest new magnitude of both.

    out, u, new_u, m."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    finite = tl.load(largest + owner) < INFINITY
    inside = inside & (i < tl.where(finite, BLOCK, 0))
    momentum = float_at(row, 3)
    g = tl.load(floats(row, 0) + start + i, mask=inside, other=0.0)
    moved = momentum * tl.load(floats(row, 1) + start + i, mask=inside, other=0.0) + g
    result = g + momentum * moved if NESTEROV else moved
    tl.store(floats(row, 2) + start + i, moved, mask=inside)
    tl.store(floats(row, 0) + start + i, result, mask=inside)
    found = tl.max(tl.where(inside, tl.maximum(magnitude_of(moved), magnitude_of(result)), 0))
    tl.store(peaks + tl.program_id(0), tl.where(finite, found, INFINITY))
