"""The program that adds entries."""

import triton
import triton.language as tl

from .parts import block_of, float_at, floats, magnitude_of


@triton.jit
def add_entries(table, owners, indices, values, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds scale·values at indices, which do not repeat. For its block: the largest new magnitude.

    out, scale, where in `indices` and `values`."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    entry = tl.load(row + 2) + start + i
    out = floats(row, 0) + tl.load(indices + entry, mask=inside, other=0).to(tl.int64)
    added = tl.load(out, mask=inside, other=0.0) + float_at(row, 1) * tl.load(
        values + entry, mask=inside, other=0.0
    )
    tl.store(out, added, mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(tl.where(inside, magnitude_of(added), 0)))
