"""Programs of products of matrices with few vectors, which lie one behind the other. A block of
their tables is a region of a matrix, whose n rows, m columns and number of vectors come first."""

import triton
import triton.language as tl

from .parts import TOO_LARGE, block_of, float_at, floats, magnitude_of, rows_of

# Rows and columns of a region.
TALL, WIDE = 128, 128
# Elements of each vector that a program turns.
TURNED = 4096

_TALL, _WIDE = tl.constexpr(TALL), tl.constexpr(WIDE)
# Of what is left of an element: rounding alone must not take it to TOO_LARGE.
_MOST = tl.constexpr(2.0**109)
# The share left of a squared length, of a vector that lies in the space of those before it.
_ALL = tl.constexpr(1e-12)


@triton.jit
def _region_of(table, owners, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """(Where the matrix's other arguments are, n, m, its vectors, how many regions are side by
    side, this region's row of regions, its place in that.)"""
    owner, row, region, left = rows_of(table, owners, COLUMNS, BLOCK)
    n, m = tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32)
    across = (m + _WIDE - 1) // _WIDE
    region = region.to(tl.int32)
    return row + 3, n, m, tl.load(row + 2).to(tl.int32), region // across, region % across


@triton.jit
def _product(p, q, i, j, n, m, rank, CHUNK: tl.constexpr):
    """Rows i and columns j of P·Qᵀ."""
    found = tl.zeros([CHUNK, _WIDE], tl.float32)
    for k in range(rank):
        left = tl.load(p + k * n + i, mask=i < n, other=0.0)
        right = tl.load(q + k * m + j, mask=j < m, other=0.0)
        found += left[:, None] * right[None, :]
    return found


@triton.jit
def _subtracted(kept, product):
    return tl.maximum(tl.minimum(kept - product, _MOST), -_MOST)


@triton.jit
def project(table, owners, parts, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """residual ← residual − P·Qᵀ, if that is pending, + grad. Of each row, over these columns, the
    sums of its products with Q/length; NaN where an element would not be finite.

    In a row: grad, residual, q, p, pending, two factors of 1/length, where in `parts`."""
    row, n, m, rank, below, beside = _region_of(table, owners, COLUMNS, BLOCK)
    grad, residual, q, p = floats(row, 0), floats(row, 1), floats(row, 2), floats(row, 3)
    pending = tl.load(row + 4)
    parts += tl.load(row + 7) + beside * rank * n
    j = beside * _WIDE + tl.arange(0, _WIDE)
    for chunk in range(0, min(_TALL, n - below * _TALL), CHUNK):
        i = below * _TALL + chunk + tl.arange(0, CHUNK)
        at = i[:, None] * m + j[None, :]
        inside = (i < n)[:, None] & (j < m)[None, :]
        kept = tl.load(residual + at, mask=inside, other=0.0)
        if pending != 0:
            kept = _subtracted(kept, _product(p, q, i, j, n, m, rank, CHUNK))
        moved = kept + tl.load(grad + at, mask=inside, other=0.0)
        good = magnitude_of(moved) < TOO_LARGE
        kept = tl.where(good, moved, kept)
        tl.store(residual + at, kept, mask=inside)
        broken = tl.max((inside & ~good).to(tl.int32), 1) > 0
        for k in range(rank):
            right = tl.load(q + k * m + j, mask=j < m, other=0.0)
            right *= float_at(row, 5)
            right *= float_at(row, 6)
            sums = tl.where(broken, float("nan"), tl.sum(kept * right[None, :], 1))
            tl.store(parts + k * n + i, sums, mask=i < n)


@triton.jit
def project_back(
    table,
    owners,
    parts,
    CHUNK: tl.constexpr,
    VECTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of each column, over these rows, the sums of its products with P.

    In a row: residual, p, where in `parts`."""
    row, n, m, rank, below, beside = _region_of(table, owners, COLUMNS, BLOCK)
    residual, p = floats(row, 0), floats(row, 1)
    parts += tl.load(row + 2) + below * rank * m
    j, number = beside * _WIDE + tl.arange(0, _WIDE), tl.arange(0, VECTORS)
    for first in range(0, rank, VECTORS):
        sums = tl.zeros([VECTORS, _WIDE], tl.float32)
        for chunk in range(0, min(_TALL, n - below * _TALL), CHUNK):
            i = below * _TALL + chunk + tl.arange(0, CHUNK)
            inside = (i < n)[:, None] & (j < m)[None, :]
            kept = tl.load(residual + i[:, None] * m + j[None, :], mask=inside, other=0.0)
            for k in range(min(VECTORS, rank - first)):
                left = tl.load(p + (first + k) * n + i, mask=i < n, other=0.0)
                its = tl.sum(kept * left[:, None], 0)
                sums += tl.where((number == k)[:, None], its[None, :], 0.0)
        k = first + number
        tl.store(
            parts + k[:, None] * m + j[None, :],
            sums,
            mask=(k < rank)[:, None] & (j < m)[None, :],
        )


@triton.jit
def add_parts(table, owners, parts, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """out ← the sum of its parts, the first ones first.

    In a row: out, where in `parts`, how many, out's number of elements."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    parts += tl.load(row + 1) + start
    size = tl.load(row + 3)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(tl.load(row + 2)):
        total += tl.load(parts + part * size + i, mask=inside, other=0.0)
    tl.store(floats(row, 0) + start + i, total, mask=inside)


@triton.jit
def turn(
    table,
    owners,
    dots,
    turns,
    TURNS: tl.constexpr,
    COUNTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """If it TURNS: out ← the combinations of vectors that the tensor's `turns` say. If it COUNTS:
    for its block, the dot products of all pairs of the vectors, as they are then, in float64.

    In a row: vectors, out, their elements, how many."""
    owner, row, start, size = rows_of(table, owners, COLUMNS, BLOCK)
    source, out = floats(row, 0) + start, floats(row, 1) + start
    n, rank = tl.load(row + 2), tl.load(row + 3).to(tl.int32)
    k = tl.arange(0, RANK)
    turns += owner * RANK * RANK
    found = tl.zeros([RANK, RANK], tl.float64)
    for tile in range(0, size, TILE):
        i = tile + tl.arange(0, TILE)
        at, inside = k[:, None] * n + i[None, :], (k < rank)[:, None] & (i < size)[None, :]
        if TURNS:
            turned = tl.zeros([RANK, TILE], tl.float64)
            for other in range(rank):
                its = tl.load(source + other * n + i, mask=i < size, other=0.0).to(tl.float64)
                turned += tl.load(turns + k * RANK + other)[:, None] * its[None, :]
            vectors = turned.to(tl.float32)
            tl.store(out + at, vectors, mask=inside)
        else:
            vectors = tl.load(source + at, mask=inside, other=0.0)
        if COUNTS:
            wide = tl.where(inside, vectors, 0.0).to(tl.float64)
            for other in range(rank):
                its = tl.sum(tl.where((k == other)[:, None], wide, 0.0), 0)
                products = tl.sum(wide * its[None, :], 1)
                found += tl.where((k == other)[None, :], products[:, None], 0.0)
    if COUNTS:
        dots += tl.program_id(0) * RANK * RANK
        tl.store(dots + k[:, None] * RANK + k[None, :], found)


@triton.jit
def find_turns(
    table,
    owners,
    dots,
    turns,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The combinations of vectors that are orthonormal, the first ones first, by Gauss's
    elimination of their dot products. A vector in the space of those before it becomes zero.

    In a row: first block of `dots`, how many, vectors."""
    owner, row, start, size = rows_of(table, owners, COLUMNS, BLOCK)
    rank = tl.load(row + 2).to(tl.int32)
    k = tl.arange(0, RANK)
    at = k[:, None] * RANK + k[None, :]
    dots += tl.load(row) * RANK * RANK
    left = tl.zeros([RANK, RANK], tl.float64)
    for block in range(tl.load(row + 1)):
        left += tl.load(dots + block * RANK * RANK + at)
    diagonal = k[:, None] == k[None, :]
    lengths = tl.sum(tl.where(diagonal, left, 0.0), 0)
    found = tl.where(diagonal, 1.0, 0.0).to(tl.float64)
    for s in range(rank):
        its_row = (k == s)[:, None]
        pivots = tl.sum(tl.where(its_row, left, 0.0), 0)
        turned = tl.sum(tl.where(its_row, found, 0.0), 0)
        pivot = tl.sum(tl.where(k == s, pivots, 0.0), 0)
        # False where they are not finite: those stay NaN.
        gone = pivot <= _ALL * tl.sum(tl.where(k == s, lengths, 0.0), 0)
        inverse = tl.where(gone, 0.0, 1.0 / tl.where(gone, 1.0, pivot))
        column = tl.sum(tl.where((k == s)[None, :], left, 0.0), 1)
        shares = tl.where(k > s, column * inverse, 0.0)
        left -= shares[:, None] * pivots[None, :]
        found -= shares[:, None] * turned[None, :]
        found = tl.where(its_row, found * tl.sqrt(inverse), found)
    tl.store(turns + owner * RANK * RANK + at, found)


@triton.jit
def average(table, owners, used, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """q ← sums/size, which may be the same memory.

    In a row: sums, q, size."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    sums = tl.load(floats(row, 0) + start + i, mask=inside, other=0.0)
    tl.store(floats(row, 1) + start + i, tl.div_rn(sums, float_at(row, 2)), mask=inside)


@triton.jit
def multiply(table, owners, peaks, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """out ← scale·P·Qᵀ. For its region: the largest magnitude.

    In a row: p, q, out, scale."""
    row, n, m, rank, below, beside = _region_of(table, owners, COLUMNS, BLOCK)
    p, q, out, scale = floats(row, 0), floats(row, 1), floats(row, 2), float_at(row, 3)
    j = beside * _WIDE + tl.arange(0, _WIDE)
    peak = 0
    for chunk in range(0, min(_TALL, n - below * _TALL), CHUNK):
        i = below * _TALL + chunk + tl.arange(0, CHUNK)
        inside = (i < n)[:, None] & (j < m)[None, :]
        found = _product(p, q, i, j, n, m, rank, CHUNK) * scale
        tl.store(out + i[:, None] * m + j[None, :], found, mask=inside)
        peak = tl.maximum(peak, tl.max(tl.max(tl.where(inside, magnitude_of(found), 0), 1), 0))
    tl.store(peaks + tl.program_id(0), peak)


@triton.jit
def subtract(table, owners, used, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """residual ← residual − P·Qᵀ.

    In a row: residual, p, q."""
    row, n, m, rank, below, beside = _region_of(table, owners, COLUMNS, BLOCK)
    j = beside * _WIDE + tl.arange(0, _WIDE)
    for chunk in range(0, min(_TALL, n - below * _TALL), CHUNK):
        i = below * _TALL + chunk + tl.arange(0, CHUNK)
        at = floats(row, 0) + i[:, None] * m + j[None, :]
        inside = (i < n)[:, None] & (j < m)[None, :]
        product = _product(floats(row, 1), floats(row, 2), i, j, n, m, rank, CHUNK)
        kept = tl.load(at, mask=inside, other=0.0)
        tl.store(at, _subtracted(kept, product), mask=inside)
