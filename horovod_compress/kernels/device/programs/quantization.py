"""Programs of integer codes that many ranks can add up in one word. The elements of their tables
are words, and the second of their arguments is the tensor's number of elements."""

import triton
import triton.language as tl

from .parts import block_of, float_at, floats, magnitude_of

WORDS = {4: tl.int32, 8: tl.int64}  # by the bytes of a word


@triton.jit
def _words_of(table, owners, FIELDS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """(where the arguments of this block's tensor are, this block's words, which of them there are,
    the tensor's number of elements, where each word's first element is, how many elements later
    each of the others is): words come in blocks of 64, of which all first elements come first, then
    the second …, as kernels/reference/quantization.py says."""
    _, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    word, count, numel = start + i, tl.load(row - 2), tl.load(row + 1)
    whole = numel // (FIELDS * 64) * 64
    within = word < whole
    first = tl.where(within, word // 64 * 64 * FIELDS + word % 64, whole * FIELDS + word - whole)
    return row, word, inside, numel, first, tl.where(within, 64, count - whole)


@triton.jit
def _of_scale(numbers, scales, inside, SCALES: tl.constexpr):
    """The number of each element's scale, or the only one."""
    return (
        tl.load(numbers + tl.load(scales, mask=inside, other=0).to(tl.int32))
        if SCALES
        else tl.load(numbers)
    )


@triton.jit
def quantize(
    table,
    owners,
    words,
    scales,
    factors,
    FRACTION: tl.constexpr,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    WORD: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words of the codes of elements, which are rounded at random; fields of a word share a draw of
    bits. factors: one number for each scale.

    x, the tensor's number of elements, where in `scales`, where in `words`, where in `factors`, the
    lower and upper half of the key, the largest magnitude, what elements are multiplied by
    before."""
    row, word, inside, numel, first, apart = _words_of(table, owners, FIELDS, COLUMNS, BLOCK)
    x, limit, before = floats(row, 0), tl.load(row + 7).to(tl.int32), float_at(row, 8)
    scales += tl.load(row + 2)
    factors += tl.load(row + 4)
    bits = word.to(tl.uint32) * 0x9E3779B9 + tl.load(row + 5).to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13) ^ tl.load(row + 6).to(tl.uint32)) * 0xC2B2AE35
    bits ^= bits >> 16
    sums = tl.zeros([BLOCK], WORD)
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        mine = inside & (i < numel)
        y = (
            tl.load(x + i, mask=mine, other=0.0)
            * before
            * _of_scale(factors, scales + i, mine, SCALES)
        )
        magnitude = tl.minimum(magnitude_of(y), limit)
        fixed = magnitude.to(tl.float32, bitcast=True).to(tl.int32)
        fixed = tl.where(y < 0, -fixed, fixed)
        code = (fixed + (bits >> (32 - FRACTION)).to(tl.int32)) >> FRACTION
        sums += tl.where(i < numel, code, 0).to(WORD) << (field * WIDTH)
        bits *= 0xFAF2BB1D
    tl.store(words + tl.load(row + 3) + word, sums, mask=inside)


@triton.jit
def dequantize(
    table,
    owners,
    words,
    scales,
    units,
    OFFSETS: tl.constexpr,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Elements from the ranks' sums of words: their scale's unit times the sum of their codes.

    out, the tensor's number of elements, where in `scales`, where in `words`, where in `units`, the
    largest magnitude of a sum."""
    row, word, inside, numel, first, apart = _words_of(table, owners, FIELDS, COLUMNS, BLOCK)
    out, largest = floats(row, 0), tl.load(row + 5).to(tl.int32)
    scales += tl.load(row + 2)
    units += tl.load(row + 4)
    sums = tl.load(words + tl.load(row + 3) + word, mask=inside, other=0) + OFFSETS
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        mine = inside & (i < numel)
        code = (sums >> (field * WIDTH) & ((1 << WIDTH) - 1)).to(tl.int32) - largest
        tl.store(
            out + i, code.to(tl.float32) * _of_scale(units, scales + i, mine, SCALES), mask=mine
        )


@triton.jit
def count_fits(
    table,
    owners,
    words,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    WORD: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words with a 1 for each element whose code in a scale is at most `limit`.

    x, the tensor's number of elements, where in `words`, the bits of limit, what elements are
    multiplied by before, the scale's factor."""
    row, word, inside, numel, first, apart = _words_of(table, owners, FIELDS, COLUMNS, BLOCK)
    sums = tl.zeros([BLOCK], WORD)
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        mine = inside & (i < numel)
        y = tl.load(floats(row, 0) + i, mask=mine, other=0.0) * float_at(row, 4) * float_at(row, 5)
        sums += (mine & (magnitude_of(y) <= tl.load(row + 3))).to(WORD) << (field * WIDTH)
    tl.store(words + tl.load(row + 2) + word, sums, mask=inside)


@triton.jit
def find_scales(
    table,
    owners,
    words,
    scales,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gives a scale to the elements that it fits on all ranks, by the sums of their words.

    where in `words`, the tensor's number of elements, where in `scales`, the scale, the number of
    ranks."""
    row, word, inside, numel, first, apart = _words_of(table, owners, FIELDS, COLUMNS, BLOCK)
    sums = tl.load(words + tl.load(row) + word, mask=inside, other=0)
    scales += tl.load(row + 2)
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        fits = (sums >> (field * WIDTH) & ((1 << WIDTH) - 1)) == tl.load(row + 4)
        tl.store(
            scales + i,
            tl.zeros([BLOCK], tl.int8) + tl.load(row + 3).to(tl.int8),
            mask=inside & (i < numel) & fits,
        )
