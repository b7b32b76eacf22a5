"""Programs of accumulation with momentum, and of the choice of the largest entries.

A threshold is found by counting, in a row of bins of each tensor: the upper 11 bits of the largest
magnitude of each line, then of magnitudes the upper 11 bits, the next 10, and the last 10. A
program finds the bin of the stage before in its tensor's row, where an earlier launch has left it,
so that nothing waits for the host.
"""

import triton
import triton.language as tl

from .parts import INFINITY, TOO_LARGE, float_at, floats, magnitude_of, rows_of

# Elements that share one maximum.
LINE = 32
# Numbers in a tensor's row: bins of lines, and of the three stages from these places on; what was
# found.
FOUND, ROW = 6144, 6152
# Of what was found: the largest magnitude that was to be; then of elements whose upper bits, or
# upper and middle bits, are those of the threshold, these bits and how many of them are wanted; the
# threshold itself, and how many that equal it are wanted.
PEAK, UPPER, OF_UPPER, MIDDLE, OF_MIDDLE, THRESHOLD, TIES = range(FOUND, FOUND + 7)
NONE, VANILLA, NESTEROV = 0, 1, 2  # kinds of momentum

_LINE, _ROW = tl.constexpr(LINE), tl.constexpr(ROW)
_PEAK, _UPPER, _OF_UPPER = tl.constexpr(PEAK), tl.constexpr(UPPER), tl.constexpr(OF_UPPER)
_MIDDLE, _OF_MIDDLE = tl.constexpr(MIDDLE), tl.constexpr(OF_MIDDLE)
_THRESHOLD, _TIES = tl.constexpr(THRESHOLD), tl.constexpr(TIES)


@triton.jit
def _advanced(g, u, v, momentum, KIND: tl.constexpr):
    """The new u and v of Deep Gradient Compression (arXiv 1712.01887), section 3.2."""
    if KIND == 0:
        v = v + g
    elif KIND == 1:
        u = momentum * u + g
        v = v + u
    else:
        u = momentum * (u + g)
        v = v + (u + g)
    return u, v


@triton.jit
def advance(
    table,
    owners,
    bins,
    lines,
    KIND: tl.constexpr,
    BASED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Advances u and v, and leaves the gradient as `base` is, or zero. Counts the lines' largest
    new magnitudes, and notes the largest one that was to be.

    In a row: grad, base, u, v, momentum, scale, first line."""
    owner, row, start, size = rows_of(table, owners, COLUMNS, BLOCK)
    line = tl.arange(0, BLOCK // _LINE)
    i = line[:, None] * _LINE + tl.arange(0, _LINE)[None, :]
    inside = i < size
    grad, base, u, v = (
        floats(row, 0) + start + i,
        floats(row, 1) + start + i,
        floats(row, 2) + start + i,
        floats(row, 3) + start + i,
    )
    g = tl.load(grad, mask=inside, other=0.0)
    left = tl.load(base, mask=inside, other=0.0) if BASED else tl.zeros_like(g)
    tl.store(grad, left, mask=inside)
    g = float_at(row, 5) * (g - left if BASED else g)
    old_v = tl.load(v, mask=inside, other=0.0)
    old_u = tl.load(u, mask=inside, other=0.0) if KIND else old_v
    new_u, new_v = _advanced(g, old_u, old_v, float_at(row, 4), KIND)
    bits = tl.where(inside, magnitude_of(new_v), 0)
    if KIND:
        # One that is finite would soon make v as large again; of one that is not, nothing is known.
        tl.store(
            u,
            tl.where(bits < TOO_LARGE, new_u, tl.where(bits < INFINITY, 0.0, old_u)),
            mask=inside,
        )
    kept = tl.where(bits < TOO_LARGE, new_v, old_v)
    tl.store(v, kept, mask=inside)
    its = bins + owner * _ROW
    tl.atomic_max(its + _PEAK, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    highest = tl.max(tl.where(inside, magnitude_of(kept), 0), 1)
    there = line * _LINE < size
    tl.store(lines + tl.load(row + 6) + start // _LINE + line, highest, mask=there)
    tl.atomic_add(its + (highest >> 20), 1, mask=there & (highest > 0), sem="relaxed")


@triton.jit
def _bin_of(counts, wanted, SIZE: tl.constexpr):
    """(The highest bin from which on so many elements are, -1 where there are fewer; how many of
    that bin's are wanted.)"""
    numbers = tl.arange(0, SIZE)
    count = tl.load(counts + numbers)
    from_here = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    found = tl.max(tl.where(from_here >= wanted, numbers, -1), 0)
    return found, wanted - tl.sum(tl.where(numbers > found, count, 0), 0)


@triton.jit
def _tile_of(row, lines, start, size, tile, floor, TILE: tl.constexpr):
    """(So many lines' elements, counted from the block's first; their magnitudes, 0 in lines in
    which none reaches the floor; what they are.)"""
    line = tile + tl.arange(0, TILE)
    highest = tl.load(
        lines + tl.load(row + 6) + start // _LINE + line, mask=line * _LINE < size, other=0
    )
    i = line[:, None] * _LINE + tl.arange(0, _LINE)[None, :]
    wanted = (highest >= floor)[:, None] & (i < size)
    value = tl.load(floats(row, 3) + start + i, mask=wanted, other=0.0)
    return i, magnitude_of(value), value


@triton.jit
def narrow(
    table,
    owners,
    bins,
    lines,
    STAGE: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts elements by the upper, middle or lower bits of their magnitudes: all that may be
    above the threshold, then those that have its upper bits, then its upper and middle bits.

    In a row: as of `advance`, and k."""
    owner, row, start, size = rows_of(table, owners, COLUMNS, BLOCK)
    its, k = bins + owner * _ROW, tl.load(row + 7).to(tl.int32)
    first = start == 0
    if STAGE == 1:
        # At least one element of each line reaches its maximum.
        upper, of_upper = _bin_of(its, k, 2048)
        floor = tl.maximum(upper << 20, 1)
    elif STAGE == 2:
        upper, of_upper = _bin_of(its + 2048, k, 2048)
        tl.store(its + _UPPER, upper, mask=first)
        tl.store(its + _OF_UPPER, of_upper, mask=first)
        floor = tl.maximum(upper << 20, 1)
    else:
        upper = tl.load(its + _UPPER)
        middle, of_middle = _bin_of(its + 4096, tl.load(its + _OF_UPPER), 1024)
        tl.store(its + _MIDDLE, middle, mask=first)
        tl.store(its + _OF_MIDDLE, of_middle, mask=first)
        floor = tl.maximum(upper << 20 | middle << 10, 1)
    for tile in range(0, BLOCK // _LINE, TILE):
        i, bits, value = _tile_of(row, lines, start, size, tile, floor, TILE)
        if STAGE == 1:
            tl.atomic_add(its + 2048 + (bits >> 20), 1, mask=bits >= floor, sem="relaxed")
        elif STAGE == 2:
            alike = (bits >= floor) & (bits >> 20 == upper)
            tl.atomic_add(its + 4096 + (bits >> 10 & 1023), 1, mask=alike, sem="relaxed")
        else:
            alike = (bits >= floor) & (bits >> 10 == (upper << 10 | middle))
            tl.atomic_add(its + 5120 + (bits & 1023), 1, mask=alike, sem="relaxed")


@triton.jit
def count(
    table,
    owners,
    bins,
    lines,
    counts,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds the threshold. For its block: how many are above it, and how many equal it; of the
    latter none where fewer than k are not zero, which are all above then."""
    owner, row, start, size = rows_of(table, owners, COLUMNS, BLOCK)
    its, first = bins + owner * _ROW, start == 0
    upper = tl.load(its + _UPPER)
    lower, ties = _bin_of(its + 5120, tl.load(its + _OF_MIDDLE), 1024)
    threshold = tl.where(upper < 0, 0, upper << 20 | tl.load(its + _MIDDLE) << 10 | lower)
    tl.store(its + _THRESHOLD, threshold, mask=first)
    tl.store(its + _TIES, tl.where(threshold > 0, ties, 0), mask=first)
    above, equal = 0, 0
    for tile in range(0, BLOCK // _LINE, TILE):
        i, bits, value = _tile_of(row, lines, start, size, tile, tl.maximum(threshold, 1), TILE)
        above += tl.sum(tl.sum((bits > threshold).to(tl.int32), 1), 0)
        equal += tl.sum(tl.sum(((bits == threshold) & (bits > 0)).to(tl.int32), 1), 0)
    tl.store(counts + tl.program_id(0), above)
    tl.store(counts + tl.num_programs(0) + tl.program_id(0), equal)


@triton.jit
def _before(flags):
    """Of each element of a tile in which one row follows the other, how many flags are before."""
    ones = flags.to(tl.int32)
    of_rows = tl.sum(ones, 1)
    return tl.cumsum(ones, 1) - ones + (tl.cumsum(of_rows, 0) - of_rows)[:, None]


@triton.jit
def collect(
    table,
    owners,
    bins,
    lines,
    counts,
    ends,
    facts,
    indices,
    of_v,
    of_u,
    TWO: tl.constexpr,
    TAKEN: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes, in the order of indices, those of what is chosen, and what v, and with TWO u, hold
    there; and for each tensor the largest magnitude that was to be, and how many are chosen. With
    TAKEN none are of a tensor that was not to be finite, and v becomes 0 there, and u below
    `masked`. counts, ends: of blocks, and their sums.

    In a row: as of `narrow`, where in those arrays its entries begin, and masked."""
    owner, row, start, size = rows_of(table, owners, COLUMNS, BLOCK)
    block, blocks = tl.program_id(0), tl.num_programs(0)
    its, first = bins + owner * _ROW, tl.load(row - 1)
    threshold, ties = tl.load(its + _THRESHOLD), tl.load(its + _TIES)
    above = tl.load(ends + block) - tl.load(ends + first - 1, mask=first > 0, other=0)
    above = above.to(tl.int32) - tl.load(counts + block)
    ends, counts = ends + blocks, counts + blocks
    equal = tl.load(ends + block) - tl.load(ends + first - 1, mask=first > 0, other=0)
    equal = equal.to(tl.int32) - tl.load(counts + block)
    entry, masked = tl.load(row + 8), tl.load(row + 9)
    if TAKEN:
        # No magnitude is above infinity.
        good = tl.load(its + _PEAK) < TOO_LARGE
        threshold, ties = tl.where(good, threshold, INFINITY), tl.where(good, ties, 0)
        above, equal = tl.where(good, above, 0), tl.where(good, equal, 0)
    for tile in range(0, BLOCK // _LINE, TILE):
        i, bits, value = _tile_of(row, lines, start, size, tile, tl.maximum(threshold, 1), TILE)
        larger, tie = bits > threshold, (bits == threshold) & (bits > 0)
        ties_before = tl.minimum(equal + _before(tie), ties)
        chosen = larger | tie & (ties_before < ties)
        at = entry + above + _before(larger) + ties_before
        tl.store(indices + at, (start + i).to(tl.int32), mask=chosen)
        tl.store(of_v + at, value, mask=chosen)
        if TWO:
            its_u = tl.load(floats(row, 2) + start + i, mask=chosen, other=0.0)
            tl.store(of_u + at, its_u, mask=chosen)
            if TAKEN:
                below = chosen & (start + i < masked)
                tl.store(floats(row, 2) + start + i, tl.zeros_like(value), mask=below)
        if TAKEN:
            tl.store(floats(row, 3) + start + i, tl.zeros_like(value), mask=chosen)
        above += tl.sum(tl.sum(larger.to(tl.int32), 1), 0)
        equal += tl.sum(tl.sum(tie.to(tl.int32), 1), 0)
    last = start + size == tl.load(row - 2)
    tl.store(facts + 2 * owner, tl.load(its + _PEAK), mask=last)
    tl.store(facts + 2 * owner + 1, above + tl.minimum(equal, ties), mask=last)
