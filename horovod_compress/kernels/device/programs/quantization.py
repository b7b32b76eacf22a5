"""Programs of integer codes that many ranks can add up in one word. The elements of their tables
are words, and the second of their arguments is the tensor's number of elements."""

import triton
import triton.language as tl

from .parts import INFINITY, block_of, float_at, floats, magnitude_of

WORDS = {4: tl.int32, 8: tl.int64}  # by the bytes of a word


@triton.jit
def _words_of(table, owners, FIELDS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """(the number of this block's tensor, where its arguments are, this block's words, which of
    them there are, the tensor's number of elements, where each word's first element is, how many
    elements later each of the others is): words come in blocks of 64, of which all first elements
    come first, then the second …, as kernels/reference/quantization.py says."""
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    word, count, numel = start + i, tl.load(row - 2), tl.load(row + 1)
    whole = numel // (FIELDS * 64) * 64
    within = word < whole
    first = tl.where(within, word // 64 * 64 * FIELDS + word % 64, whole * FIELDS + word - whole)
    return owner, row, word, inside, numel, first, tl.where(within, 64, count - whole)


@triton.jit
def _before(w):
    """The power of two by which w is multiplied first, so that it stays in range."""
    exponent = tl.maximum(tl.minimum((magnitude_of(w) >> 23) - 127, 120), -120)
    return tl.where(w > 0, ((127 - exponent) << 23).to(tl.float32, bitcast=True), 1.0)


@triton.jit
def _factor(w, step, FRACTION: tl.constexpr):
    """As the second factor of the reference's `_scaled`; 0 where w is 0, or not finite."""
    used = (w > 0) & (magnitude_of(w) < INFINITY)
    divided = tl.div_rn(step, tl.where(used, w * _before(w), 1.0))
    return tl.where(used, divided * (1 << FRACTION), 0.0)


@triton.jit
def _first_factor(w, step, FRACTION: tl.constexpr):
    """As `_factor`; in the first scale w itself becomes at most `step`."""
    factor = _factor(w, step, FRACTION)
    above = w * _before(w) * factor > step * (1 << FRACTION)
    return (factor.to(tl.int32, bitcast=True) - above.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def quantize(
    table,
    owners,
    words,
    scales,
    norms,
    FRACTION: tl.constexpr,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    WORD: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words of the codes of elements, which are rounded at random; fields of a word share a draw of
    bits. norms: of each tensor, the largest of all ranks.

    In a row: x, the tensor's number of elements, where in `scales`, where in `words`, the lower and
    upper half of the key, the steps of each scale."""
    owner, row, word, inside, numel, first, apart = _words_of(table, owners, FIELDS, COLUMNS, BLOCK)
    x, w = floats(row, 0), tl.load(norms + owner)
    before, factor = _before(w), _first_factor(w, float_at(row, 6), FRACTION)
    most = float_at(row, 6) * (1 << FRACTION)
    # Where all codes are 0, those of what is not finite are.
    limit = magnitude_of(tl.where(factor > 0, most, 0.0))
    scales += tl.load(row + 2)
    bits = word.to(tl.uint32) * 0x9E3779B9 + tl.load(row + 4).to(tl.uint32)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13) ^ tl.load(row + 5).to(tl.uint32)) * 0xC2B2AE35
    bits ^= bits >> 16
    sums = tl.zeros([BLOCK], WORD)
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        mine = inside & (i < numel)
        y = tl.load(x + i, mask=mine, other=0.0) * before
        if SCALES == 1:
            y *= factor
        else:
            scale = tl.load(scales + i, mask=mine, other=0)
            its = tl.where(scale == 0, factor, 0.0)
            for finer in tl.static_range(1, SCALES):
                its = tl.where(scale == finer, _factor(w, float_at(row, 6 + finer), FRACTION), its)
            y *= its
        magnitude = tl.minimum(magnitude_of(y), limit)
        fixed = magnitude.to(tl.float32, bitcast=True).to(tl.int32)
        fixed = tl.where(y < 0, -fixed, fixed)
        code = (fixed + (bits >> (32 - FRACTION)).to(tl.int32)) >> FRACTION
        sums += tl.where(i < numel, code, 0).to(WORD) << (field * WIDTH)
        bits *= 0xFAF2BB1D
    tl.store(words + tl.load(row + 3) + word, sums, mask=inside)


@triton.jit
def _unit(w, row, scale: tl.constexpr):
    """w/s · the factor, in float64, as float32."""
    step = tl.load(row + 6 + scale).to(tl.float64, bitcast=True)
    return (w.to(tl.float64) / step * tl.load(row + 5).to(tl.float64, bitcast=True)).to(tl.float32)


@triton.jit
def dequantize(
    table,
    owners,
    words,
    scales,
    norms,
    peaks,
    OFFSETS: tl.constexpr,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Elements from the ranks' sums of words: their scale's unit times the sum of their codes. For
    its block: the largest magnitude.

    In a row: out, the tensor's number of elements, where in `scales`, where in `words`, the largest
    magnitude of a sum; as bits of float64 the factor, and the steps of each scale."""
    owner, row, word, inside, numel, first, apart = _words_of(table, owners, FIELDS, COLUMNS, BLOCK)
    out, largest = floats(row, 0), tl.load(row + 4).to(tl.int32)
    w = tl.load(norms + owner)
    unit, finite = _unit(w, row, 0), magnitude_of(w) < INFINITY
    peak = tl.where(finite, 0, INFINITY)
    scales += tl.load(row + 2)
    sums = tl.load(words + tl.load(row + 3) + word, mask=inside, other=0) + OFFSETS
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        mine = inside & (i < numel)
        code = (sums >> (field * WIDTH) & ((1 << WIDTH) - 1)).to(tl.int32) - largest
        its = unit
        if SCALES > 1:
            scale = tl.load(scales + i, mask=mine, other=0)
            its = tl.where(scale == 0, unit, 0.0)
            for finer in tl.static_range(1, SCALES):
                its = tl.where(scale == finer, _unit(w, row, finer), its)
        result = tl.where(finite, code.to(tl.float32) * its, float("nan"))
        tl.store(out + i, result, mask=mine)
        peak = tl.maximum(peak, tl.max(tl.where(mine, magnitude_of(result), 0)))
    tl.store(peaks + tl.program_id(0), peak)


@triton.jit
def count_fits(
    table,
    owners,
    words,
    norms,
    WIDTH: tl.constexpr,
    FIELDS: tl.constexpr,
    WORD: tl.constexpr,
    FRACTION: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words with a 1 for each element whose code in a scale is at most the largest of the first.
    norms: as of `quantize`.

    In a row: x, the tensor's number of elements, where in `words`, the steps of the first scale,
    and of this one."""
    owner, row, word, inside, numel, first, apart = _words_of(table, owners, FIELDS, COLUMNS, BLOCK)
    w = tl.load(norms + owner)
    before, factor = _before(w), _factor(w, float_at(row, 4), FRACTION)
    limit = magnitude_of(float_at(row, 3) * (1 << FRACTION))
    sums = tl.zeros([BLOCK], WORD)
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        mine = inside & (i < numel)
        y = tl.load(floats(row, 0) + i, mask=mine, other=0.0) * before * factor
        sums += (mine & (magnitude_of(y) <= limit)).to(WORD) << (field * WIDTH)
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

    In a row: where in `words`, the tensor's number of elements, where in `scales`, the scale, the
    number of ranks."""
    owner, row, word, inside, numel, first, apart = _words_of(table, owners, FIELDS, COLUMNS, BLOCK)
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
