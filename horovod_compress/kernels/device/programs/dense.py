"""Programs of operations on whole tensors, and of 16-bit floats."""

import triton
import triton.language as tl

from .parts import INFINITY, block_of, float_at, floats, magnitude_of, pointer


@triton.jit
def find_largest(table, owners, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """For its block: the largest magnitude.

    In a row: x."""
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

    In a row: out, u, new_u, m."""
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


@triton.jit
def from_float16(table, owners, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers that are in float16, as bits. For its block: the largest magnitude.

    In a row: half, out."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    value = (
        tl.load(pointer(row, 0, tl.int16) + start + i, mask=inside, other=0)
        .to(tl.float16, bitcast=True)
        .to(tl.float32)
    )
    tl.store(floats(row, 1) + start + i, value, mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(magnitude_of(value)))


@triton.jit
def to_bfloat16(table, owners, codes, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Bfloat16, ties to even, as bits; numbers too large become the largest finite one. Zeroes the
    gradient. For its block: the largest magnitude.

    In a row: grad, where in `codes`."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    value = tl.load(floats(row, 0) + start + i, mask=inside, other=0.0)
    bits = magnitude_of(value)
    rounded = tl.minimum(bits + 0x7FFF + (bits >> 16 & 1) >> 16, 0x7F7F)
    tl.store(
        codes + tl.load(row + 1) + start + i,
        (value.to(tl.int32, bitcast=True) >> 16 & 0x8000 | rounded).to(tl.int16),
        mask=inside,
    )
    tl.store(floats(row, 0) + start + i, tl.zeros_like(value), mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(bits))


@triton.jit
def add_bfloat16(table, owners, codes, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds scale times numbers that are in bfloat16, as bits. For its block: the largest new
    magnitude.

    In a row: out, scale, where in `codes`."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    value = (
        tl.load(codes + tl.load(row + 2) + start + i, mask=inside, other=0).to(tl.int32) << 16
    ).to(tl.float32, bitcast=True)
    out = floats(row, 0) + start + i
    added = tl.load(out, mask=inside, other=0.0) + float_at(row, 1) * value
    tl.store(out, added, mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(magnitude_of(added)))
