"""Parts of which programs of all kernels are made."""

import triton
import triton.language as tl

from .. import launches

TOO_LARGE, INFINITY = tl.constexpr(launches.TOO_LARGE), tl.constexpr(launches.INFINITY)


@triton.jit
def rows_of(table, owners, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """(The number of this block's tensor, where its arguments are, this block's first element, and
    how many there are from that on, at most a block.)"""
    owner = tl.load(owners + tl.program_id(0))
    row = table + owner * COLUMNS
    start = (tl.program_id(0) - tl.load(row + 1)) * BLOCK
    return owner, row + 2, start, tl.minimum(tl.load(row) - start, BLOCK).to(tl.int32)


@triton.jit
def block_of(table, owners, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """(As of `rows_of`, but for their number; the block's elements counted from its first, which of
    them there are.)"""
    owner, row, start, size = rows_of(table, owners, COLUMNS, BLOCK)
    i = tl.arange(0, BLOCK)
    return owner, row, start, i, i < size


@triton.jit
def pointer(arguments, column: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(arguments + column).to(tl.pointer_type(TYPE), bitcast=True)


@triton.jit
def floats(arguments, column: tl.constexpr):
    return pointer(arguments, column, tl.float32)


@triton.jit
def float_at(arguments, column: tl.constexpr):
    return tl.load(arguments + column).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def magnitude_of(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
