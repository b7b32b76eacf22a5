"""Programs of variance-based compression and AdaComp."""

import triton
import triton.language as tl

from .parts import INFINITY, TOO_LARGE, block_of, float_at, floats, magnitude_of


@triton.jit
def subtract_signs(table, owners, indices, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Subtracts from the residual, at indices that do not repeat, a scale with the sign that is
    there.

    In a row: residual, scale, where in `indices`."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    at = floats(row, 0) + tl.load(indices + tl.load(row + 2) + start + i, mask=inside, other=0).to(
        tl.int64
    )
    held = tl.load(at, mask=inside, other=0.0)
    sign = held.to(tl.int32, bitcast=True) & -0x80000000
    tl.store(
        at,
        held - (float_at(row, 1).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True),
        mask=inside,
    )


@triton.jit
def accumulate_variance(
    table,
    owners,
    marks,
    counts,
    peaks,
    GIVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the gradient to r and squares to v, the gradient's own where none are given, and zeroes
    the gradient. Marks what is to be sent; elsewhere v decays. For its block: how many are marked,
    and 0 where all was finite.

    In a row: grad, squares, r, v, where in `marks`, alpha, zeta, tau."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    grad, r, v = (
        floats(row, 0) + start + i,
        floats(row, 2) + start + i,
        floats(row, 3) + start + i,
    )
    g = tl.load(grad, mask=inside, other=0.0)
    old_r = tl.load(r, mask=inside, other=0.0)
    old_v = tl.load(v, mask=inside, other=0.0)
    new_r = old_r + g
    new_v = old_v + (
        tl.load(floats(row, 1) + start + i, mask=inside, other=0.0) if GIVEN else g * g
    )
    good = (magnitude_of(new_r) < TOO_LARGE) & (magnitude_of(new_v) < INFINITY)
    new_r = tl.where(good, new_r, old_r)
    new_v = tl.where(good, new_v, old_v)
    fires = inside & (new_r * new_r > float_at(row, 5) * new_v) & (tl.abs(new_r) > float_at(row, 7))
    tl.store(r, new_r, mask=inside)
    tl.store(v, tl.where(fires, new_v, float_at(row, 6) * new_v), mask=inside)
    tl.store(grad, tl.zeros_like(g), mask=inside)
    tl.store(marks + tl.load(row + 4) + start + i, fires.to(tl.int8), mask=inside)
    tl.store(counts + tl.program_id(0), tl.sum(fires.to(tl.int32)))
    tl.store(peaks + tl.program_id(0), tl.max(tl.where(good, 0, INFINITY)))


@triton.jit
def accumulate_bins(
    table, owners, maxima, peaks, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds the gradient, which stays, to the residual, of bins of `length` elements, BLOCK of them
    together, WIDTH elements of each at a time. Leaves the largest magnitude of each bin, and for
    all of its bins the largest one that was to be. The elements of the table are bins.

    In a row: grad, residual, where in `maxima`, the tensor's number of elements, length."""
    owner, row, first, one, is_bin = block_of(table, owners, COLUMNS, BLOCK)
    grad, residual, numel, length = (
        floats(row, 0),
        floats(row, 1),
        tl.load(row + 3),
        tl.load(row + 4),
    )
    largest = tl.zeros([BLOCK], tl.int32)
    worst = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < length:
        within = start + tl.arange(0, WIDTH)
        i = (first + one)[:, None] * length + within[None, :]
        inside = (within < length)[None, :] & (i < numel)
        old = tl.load(residual + i, mask=inside, other=0.0)
        moved = old + tl.load(grad + i, mask=inside, other=0.0)
        bits = tl.where(inside, magnitude_of(moved), 0)
        kept = tl.where(bits < TOO_LARGE, moved, old)
        tl.store(residual + i, kept, mask=inside)
        worst = tl.maximum(worst, tl.max(bits, 1))
        largest = tl.maximum(largest, tl.max(tl.where(inside, magnitude_of(kept), 0), 1))
        start += WIDTH
    tl.store(
        maxima + tl.load(row + 2) + first + one, largest.to(tl.float32, bitcast=True), mask=is_bin
    )
    tl.store(peaks + tl.program_id(0), tl.max(worst))


@triton.jit
def add_maxima(table, owners, maxima, sums, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum, float64, of the largest magnitudes of a tensor's bins, in one block for each tensor,
    which has one element in the table.

    In a row: where in `maxima`, bins."""
    owner, row, _, i, _ = block_of(table, owners, COLUMNS, BLOCK)
    first, bins = tl.load(row), tl.load(row + 1)
    added = tl.zeros([BLOCK], tl.float64)
    start = 0
    while start < bins:
        added += tl.load(maxima + first + start + i, mask=start + i < bins, other=0.0).to(
            tl.float64
        )
        start += BLOCK
    tl.store(sums + owner, tl.sum(added))


@triton.jit
def mark_bins(table, owners, maxima, marks, counts, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Marks what `more` times the newest gradient would lift over its bin's largest, and zeroes the
    gradient. For its block: how many are marked.

    In a row: grad, residual, where in `maxima`, where in `marks`, length, more."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    g = tl.load(floats(row, 0) + start + i, mask=inside, other=0.0)
    kept = tl.load(floats(row, 1) + start + i, mask=inside, other=0.0)
    its = (start + i).to(tl.int32) // tl.load(row + 4).to(tl.int32)
    largest = tl.load(maxima + tl.load(row + 2) + its, mask=inside, other=0.0)
    lifted = inside & (tl.abs(kept + float_at(row, 5) * g) >= largest) & (kept != 0)
    tl.store(floats(row, 0) + start + i, tl.zeros_like(g), mask=inside)
    tl.store(marks + tl.load(row + 3) + start + i, lifted.to(tl.int8), mask=inside)
    tl.store(counts + tl.program_id(0), tl.sum(lifted.to(tl.int32)))


@triton.jit
def collect_marked(
    table,
    owners,
    marks,
    counts,
    ends,
    indices,
    of_a,
    of_b,
    TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Indices of the marked elements, in order, and what a, and with TWO b, hold there. ends: sums
    of the counts of the blocks that marked.

    In a row: a, b, where in `marks`, the first block that marked the tensor, where in `indices`
    less the sum before that block."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    block = tl.program_id(0) - tl.load(row - 1) + tl.load(row + 3)
    count = tl.load(counts + block)
    if count > 0:
        hits = tl.load(marks + tl.load(row + 2) + start + i, mask=inside, other=0) != 0
        first, at = (
            tl.load(row + 4) + tl.load(ends + block) - count,
            tl.cumsum(hits.to(tl.int32)) - 1,
        )
        tl.store(indices + first + at, (start + i).to(tl.int32), mask=hits)
        tl.store(
            of_a + first + at, tl.load(floats(row, 0) + start + i, mask=hits, other=0.0), mask=hits
        )
        if TWO:
            tl.store(
                of_b + first + at,
                tl.load(floats(row, 1) + start + i, mask=hits, other=0.0),
                mask=hits,
            )
