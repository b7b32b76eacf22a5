"""Programs that write entries, and that add them: those of one payload, or those of all ranks'
frames, as `kernels.device.entries` lays them out."""

import triton
import triton.language as tl

from .parts import INFINITY, TOO_LARGE, block_of, float_at, floats, magnitude_of, rows_of


@triton.jit
def put(
    table,
    owners,
    indices,
    for_a,
    for_b,
    TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes numbers into a, and with TWO others into b, at indices that do not repeat.

    In a row: a, b, where in `indices` and in the numbers."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    entry = tl.load(row + 2) + start + i
    at = tl.load(indices + entry, mask=inside, other=0).to(tl.int64)
    tl.store(floats(row, 0) + at, tl.load(for_a + entry, mask=inside, other=0.0), mask=inside)
    if TWO:
        tl.store(floats(row, 1) + at, tl.load(for_b + entry, mask=inside, other=0.0), mask=inside)


@triton.jit
def add_entries(table, owners, indices, values, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds scale·values at indices, which do not repeat. For its block: the largest new magnitude.

    In a row: out, scale, where in `indices` and `values`."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    entry = tl.load(row + 2) + start + i
    out = floats(row, 0) + tl.load(indices + entry, mask=inside, other=0).to(tl.int64)
    added = tl.load(out, mask=inside, other=0.0) + float_at(row, 1) * tl.load(
        values + entry, mask=inside, other=0.0
    )
    tl.store(out, added, mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(tl.where(inside, magnitude_of(added), 0)))


@triton.jit
def _first_from(indices, count, wanted):
    """Where the first of so many ascending indices is that is not below the wanted one."""
    low, high = count - count, count
    while low < high:
        middle = (low + high) // 2
        below = tl.load(indices + middle) < wanted
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def add_frames(table, owners, frames, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds scale times the entries of each rank, in rank order, or NaN where a rank's gradient was
    not finite; nothing where a head is not that of this rank's frame. For its block: the largest
    new magnitude.

    In a row: out, scale, the words of a frame, the number of ranks, this one, where in a frame the
    tensor's facts, indices and values are, and how many entries there is room for."""
    owner, row, start, size = rows_of(table, owners, COLUMNS, BLOCK)
    out, scale = floats(row, 0) + start, float_at(row, 1)
    words, ranks, room = tl.load(row + 2), tl.load(row + 3).to(tl.int32), tl.load(row + 8)
    own = frames + tl.load(row + 4) * words
    alike, finite = size >= 0, size >= 0
    for rank in range(ranks):
        head = frames + rank * words
        expected = tl.load(own + 1) - tl.load(row + 4).to(tl.int32) + rank
        alike = alike & (tl.load(head) == tl.load(own)) & (tl.load(head + 1) == expected)
        alike = alike & (tl.load(head + 2) == tl.load(own + 2))
        finite = finite & (tl.load(head + tl.load(row + 5)) < TOO_LARGE)
    peak = tl.where(finite, 0, INFINITY)
    if alike & finite:
        for rank in range(ranks):
            head = frames + rank * words
            indices, values = head + tl.load(row + 6), head + tl.load(row + 7)
            count = tl.minimum(tl.load(head + tl.load(row + 5) + 1), room.to(tl.int32))
            first = _first_from(indices, count, start.to(tl.int32))
            end = _first_from(indices, count, (start + size).to(tl.int32))
            for tile in range(first, end, 128):
                entry = tile + tl.arange(0, 128)
                inside = entry < end
                i = tl.load(indices + entry, mask=inside, other=0) - start
                value = tl.load(values + entry, mask=inside, other=0).to(tl.float32, bitcast=True)
                added = tl.load(out + i, mask=inside, other=0.0) + scale * value
                tl.store(out + i, added, mask=inside)
                peak = tl.maximum(peak, tl.max(tl.where(inside, magnitude_of(added), 0)))
            # Another thread of the program may add to the same element.
            tl.debug_barrier()
    elif alike:
        for tile in range(0, size, 128):
            i = tile + tl.arange(0, 128)
            tl.store(out + i, float("nan"), mask=i < size)
    tl.store(peaks + tl.program_id(0), peak)
