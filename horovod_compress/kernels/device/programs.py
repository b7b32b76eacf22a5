"""The Triton programs: one function for each pass over memory, and how a pass is launched.

Floats are compared as the native kernels compare them: for finite ones the bits without the sign order as the absolute values do, and infinity
and NaN are the largest. A program that adds up or compares leaves one number for its block, and torch adds those up: nothing depends on the order
in which blocks run.
"""
from typing import Any

import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret
# Elements of a block. Eight for each of 128 threads, so that loads are of 16 bytes; the interpreter takes a NumPy call for each block and line.
BLOCK = 1 << 16 if INTERPRETED else 1024
WORD_BLOCK = BLOCK // 4  # words of a block, each of which is several elements: more take more registers
MARK_BLOCK = BLOCK // 2  # elements of a block where what is sent is marked, for the same reason
TOO_LARGE = 0x76800000  # bits of 2^110, as in the native kernels
INFINITY = 0x7F800000
SAMPLED = 64  # consecutive elements that are sampled together, as in the native kernels, whose threshold would else be another
_TOO_LARGE, _INFINITY, _SAMPLED = tl.constexpr(TOO_LARGE), tl.constexpr(INFINITY), tl.constexpr(SAMPLED)
WORDS = {4: tl.int32, 8: tl.int64}  # by the bytes of a word
NONE, VANILLA, NESTEROV = 0, 1, 2  # kinds of momentum


def blocks_of(numel: int) -> int:
    """The number of blocks for so many elements."""
    return -(-numel // BLOCK)


def launch(program: Any, numel: int, *arguments: Any, BLOCK: int = BLOCK, **constants: Any) -> None:
    """Starts a program for `numel` elements, or words, a number that follows its other arguments, on the current stream."""
    if numel:
        program[(-(-numel // BLOCK),)](*arguments, numel, **constants, BLOCK=BLOCK, enable_fp_fusion=False)


@triton.jit
def _elements(BLOCK: tl.constexpr):
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _from_base(g, base, inside, BASED: tl.constexpr):
    """What a gradient is, where it counts from `base`."""
    return g - tl.load(base, mask=inside, other=0.0) if BASED else g


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


@triton.jit(do_not_specialize=["stride", "shift"])  # which differ from tensor to tensor, and from step to step
def sample(grad, base, u, v, magnitudes, momentum, scale, stride, shift, numel, KIND: tl.constexpr, BASED: tl.constexpr, BLOCK: tl.constexpr):
    """The magnitudes, as bits, that v is about to have at sampled elements: of every `stride`-th stretch of 64, from number `shift` on."""
    i = _elements(BLOCK)
    inside = i < numel
    at = (i // _SAMPLED * stride + shift) * _SAMPLED + i % _SAMPLED
    g = scale * _from_base(tl.load(grad + at, mask=inside, other=0.0), base + at, inside, BASED)
    old_u = tl.load(u + at, mask=inside, other=0.0) if KIND else g
    _, new_v = _advanced(g, old_u, tl.load(v + at, mask=inside, other=0.0), momentum, KIND)
    bits = _magnitude(new_v)
    tl.store(magnitudes + i, tl.where(bits < _TOO_LARGE, bits, 0), mask=inside)


@triton.jit
def advance(grad, base, u, v, floor, counts, peaks, momentum, scale, numel, KIND: tl.constexpr, BASED: tl.constexpr, BLOCK: tl.constexpr):
    """Advances u and v, and leaves the gradient as `base` is, or zero. For its block: how many of the new magnitudes reach the floor, and the largest
    one that was to be."""
    i = _elements(BLOCK)
    inside = i < numel
    g = scale * _from_base(tl.load(grad + i, mask=inside, other=0.0), base + i, inside, BASED)
    old_v = tl.load(v + i, mask=inside, other=0.0)
    old_u = tl.load(u + i, mask=inside, other=0.0) if KIND else old_v
    new_u, new_v = _advanced(g, old_u, old_v, momentum, KIND)
    bits = tl.where(inside, _magnitude(new_v), 0)
    if KIND:
        # One that is finite would soon make v as large again; of one that is not, nothing is known.
        tl.store(u + i, tl.where(bits < _TOO_LARGE, new_u, tl.where(bits < _INFINITY, 0.0, old_u)), mask=inside)
    kept = tl.where(bits < _TOO_LARGE, new_v, old_v)
    tl.store(v + i, kept, mask=inside)
    tl.store(grad + i, tl.load(base + i, mask=inside, other=0.0) if BASED else tl.zeros_like(g), mask=inside)
    hits = inside & (_magnitude(kept) >= tl.load(floor))
    tl.store(counts + tl.program_id(0), tl.sum(hits.to(tl.int32)))
    tl.store(peaks + tl.program_id(0), tl.max(bits))


@triton.jit(do_not_specialize=["capacity"])
def collect(v, floor, counts, ends, indices, magnitudes, capacity, numel, BLOCK: tl.constexpr):
    """Indices and magnitudes of the elements that reach the floor, in order, as many as there is room for. ends: sums of the blocks' counts."""
    block = tl.program_id(0)
    count = tl.load(counts + block)
    if count > 0:
        i = _elements(BLOCK)
        inside = i < numel
        bits = _magnitude(tl.load(v + i, mask=inside, other=0.0))
        hits = inside & (bits >= tl.load(floor))
        at = tl.load(ends + block) - count + tl.cumsum(hits.to(tl.int32)) - 1
        wanted = hits & (at < capacity)
        tl.store(indices + at, i.to(tl.int32), mask=wanted)
        tl.store(magnitudes + at, bits, mask=wanted)


@triton.jit
def accumulate_variance(
    grad, squares, r, v, marks, counts, peaks, alpha, zeta, tau, numel, GIVEN: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds the gradient to r and squares to v, the gradient's own where none are given, and zeroes the gradient. Marks what is to be sent; elsewhere
    v decays. For its block: how many are marked, and 0 where all was finite."""
    i = _elements(BLOCK)
    inside = i < numel
    g = tl.load(grad + i, mask=inside, other=0.0)
    old_r = tl.load(r + i, mask=inside, other=0.0)
    old_v = tl.load(v + i, mask=inside, other=0.0)
    new_r = old_r + g
    new_v = old_v + (tl.load(squares + i, mask=inside, other=0.0) if GIVEN else g * g)
    good = (_magnitude(new_r) < _TOO_LARGE) & (_magnitude(new_v) < _INFINITY)
    new_r = tl.where(good, new_r, old_r)
    new_v = tl.where(good, new_v, old_v)
    fires = inside & (new_r * new_r > alpha * new_v) & (tl.abs(new_r) > tau)
    tl.store(r + i, new_r, mask=inside)
    tl.store(v + i, tl.where(fires, new_v, zeta * new_v), mask=inside)
    tl.store(grad + i, tl.zeros_like(g), mask=inside)
    tl.store(marks + i, fires.to(tl.int8), mask=inside)
    tl.store(counts + tl.program_id(0), tl.sum(fires.to(tl.int32)))
    tl.store(peaks + tl.program_id(0), tl.max(tl.where(good, 0, _INFINITY)))


@triton.jit(do_not_specialize=["length"])
def accumulate_bins(grad, residual, maxima, peaks, numel, length, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the gradient, which stays, to the residual of `count` bins of `length` elements, BLOCK of them together, WIDTH elements of each at a time.
    Leaves the largest magnitude of each bin, and for all of its bins the largest one that was to be."""
    one = _elements(BLOCK)
    largest = tl.zeros([BLOCK], tl.int32)
    worst = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, WIDTH):
        within = start + tl.arange(0, WIDTH)
        i = one[:, None] * length + within[None, :]
        inside = (within < length)[None, :] & (i < numel)
        old = tl.load(residual + i, mask=inside, other=0.0)
        moved = old + tl.load(grad + i, mask=inside, other=0.0)
        bits = tl.where(inside, _magnitude(moved), 0)
        kept = tl.where(bits < _TOO_LARGE, moved, old)
        tl.store(residual + i, kept, mask=inside)
        worst = tl.maximum(worst, tl.max(bits, 1))
        largest = tl.maximum(largest, tl.max(tl.where(inside, _magnitude(kept), 0), 1))
    tl.store(maxima + one, largest.to(tl.float32, bitcast=True), mask=one < count)
    tl.store(peaks + tl.program_id(0), tl.max(worst))


@triton.jit(do_not_specialize=["length"])
def mark_bins(grad, residual, maxima, marks, counts, more, length, numel, BLOCK: tl.constexpr):
    """Marks what `more` times the newest gradient would lift over its bin's largest, and zeroes the gradient. For its block: how many are marked."""
    i = _elements(BLOCK)
    inside = i < numel
    g = tl.load(grad + i, mask=inside, other=0.0)
    kept = tl.load(residual + i, mask=inside, other=0.0)
    largest = tl.load(maxima + i.to(tl.int32) // length, mask=inside, other=0.0)
    lifted = inside & (tl.abs(kept + more * g) >= largest) & (kept != 0)
    tl.store(grad + i, tl.zeros_like(g), mask=inside)
    tl.store(marks + i, lifted.to(tl.int8), mask=inside)
    tl.store(counts + tl.program_id(0), tl.sum(lifted.to(tl.int32)))


@triton.jit
def collect_marked(marks, counts, ends, indices, numel, BLOCK: tl.constexpr):
    """Indices of the marked elements, in order. ends: sums of the blocks' counts."""
    block = tl.program_id(0)
    count = tl.load(counts + block)
    if count > 0:
        i = _elements(BLOCK)
        hits = tl.load(marks + i, mask=i < numel, other=0) != 0
        at = tl.load(ends + block) - count + tl.cumsum(hits.to(tl.int32)) - 1
        tl.store(indices + at, i.to(tl.int32), mask=hits)


@triton.jit
def add_entries(out, indices, values, peaks, scale, numel, BLOCK: tl.constexpr):
    """Adds scale·values at indices, which do not repeat. For its block: the largest new magnitude."""
    i = _elements(BLOCK)
    inside = i < numel
    at = tl.load(indices + i, mask=inside, other=0).to(tl.int64)
    added = tl.load(out + at, mask=inside, other=0.0) + scale * tl.load(values + i, mask=inside, other=0.0)
    tl.store(out + at, added, mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(tl.where(inside, _magnitude(added), 0)))


@triton.jit
def average_momentum(out, u, new_u, peaks, momentum, numel, NESTEROV: tl.constexpr, BLOCK: tl.constexpr):
    """new_u ← m·u + out, then out ← new_u, or out + m·new_u. For its block: the largest new magnitude of both."""
    i = _elements(BLOCK)
    inside = i < numel
    g = tl.load(out + i, mask=inside, other=0.0)
    moved = momentum * tl.load(u + i, mask=inside, other=0.0) + g
    result = g + momentum * moved if NESTEROV else moved
    tl.store(new_u + i, moved, mask=inside)
    tl.store(out + i, result, mask=inside)
    largest = tl.maximum(_magnitude(moved), _magnitude(result))
    tl.store(peaks + tl.program_id(0), tl.max(tl.where(inside, largest, 0)))


@triton.jit
def to_float16(x, half, peaks, numel, BLOCK: tl.constexpr):
    """Float16, ties to even, as bits; a NaN is the same for all. For its block: the largest magnitude."""
    i = _elements(BLOCK)
    inside = i < numel
    value = tl.load(x + i, mask=inside, other=0.0)
    bits = _magnitude(value)
    sign = (value.to(tl.int32, bitcast=True) >> 16 & 0x8000).to(tl.int16)
    code = tl.where(bits > _INFINITY, sign | 0x7E00, value.to(tl.float16).to(tl.int16, bitcast=True))
    tl.store(half + i, code, mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(bits))


@triton.jit
def from_float16(half, out, peaks, numel, BLOCK: tl.constexpr):
    """The numbers that are in float16, as bits. For its block: the largest magnitude."""
    i = _elements(BLOCK)
    inside = i < numel
    value = tl.load(half + i, mask=inside, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    tl.store(out + i, value, mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(_magnitude(value)))


@triton.jit
def to_bfloat16(grad, codes, peaks, numel, BLOCK: tl.constexpr):
    """Bfloat16, ties to even, as bits; numbers too large become the largest finite one. Zeroes the gradient. For its block: the largest magnitude."""
    i = _elements(BLOCK)
    inside = i < numel
    value = tl.load(grad + i, mask=inside, other=0.0)
    bits = _magnitude(value)
    rounded = tl.minimum(bits + 0x7FFF + (bits >> 16 & 1) >> 16, 0x7F7F)
    tl.store(codes + i, (value.to(tl.int32, bitcast=True) >> 16 & 0x8000 | rounded).to(tl.int16), mask=inside)
    tl.store(grad + i, tl.zeros_like(value), mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(bits))


@triton.jit
def add_bfloat16(out, codes, peaks, scale, numel, BLOCK: tl.constexpr):
    """Adds scale times numbers that are in bfloat16, as bits. For its block: the largest new magnitude."""
    i = _elements(BLOCK)
    inside = i < numel
    value = (tl.load(codes + i, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    added = tl.load(out + i, mask=inside, other=0.0) + scale * value
    tl.store(out + i, added, mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(_magnitude(added)))


@triton.jit
def _fields(word, numel, count, FIELDS: tl.constexpr):
    """Where a word's first element is, and how many elements later each of the others is: words come in blocks of 64, of which all first elements
    come first, then the second …, as kernels/reference/quantization.py says."""
    whole = numel // (FIELDS * 64) * 64
    within = word < whole
    return tl.where(within, word // 64 * 64 * FIELDS + word % 64, whole * FIELDS + word - whole), tl.where(within, 64, count - whole)


@triton.jit
def _of_scale(numbers, scales, inside, SCALES: tl.constexpr):
    """The number of each element's scale, or the only one."""
    return tl.load(numbers + tl.load(scales, mask=inside, other=0).to(tl.int32)) if SCALES else numbers


@triton.jit(do_not_specialize=["key_low", "key_high"])
def quantize(
    x, words, scales, factors, numel, key_low, key_high, limit, before, count, FRACTION: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr,
    WORD: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
):
    """Words of the codes of elements, which are rounded at random; fields of a word share a draw of bits. factors: one number, or with SCALES one for
    each scale that an element may have."""
    word = _elements(BLOCK)
    inside = word < count
    first, apart = _fields(word, numel, count, FIELDS)
    bits = word.to(tl.uint32) * 0x9E3779B9 + key_low.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13) ^ key_high.to(tl.uint32, bitcast=True)) * 0xC2B2AE35
    bits ^= bits >> 16
    sums = tl.zeros([BLOCK], WORD)
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        mine = inside & (i < numel)
        y = tl.load(x + i, mask=mine, other=0.0) * before * _of_scale(factors, scales + i, mine, SCALES)
        magnitude = tl.minimum(_magnitude(y), limit)
        fixed = magnitude.to(tl.float32, bitcast=True).to(tl.int32)
        fixed = tl.where(y < 0, -fixed, fixed)
        code = (fixed + (bits >> (32 - FRACTION)).to(tl.int32)) >> FRACTION
        sums += tl.where(i < numel, code, 0).to(WORD) << (field * WIDTH)
        bits *= 0xFAF2BB1D
    tl.store(words + word, sums, mask=inside)


@triton.jit
def dequantize(
    words, out, scales, units, numel, largest, count, OFFSETS: tl.constexpr, WIDTH: tl.constexpr, FIELDS: tl.constexpr, SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Elements from the ranks' sums of words: their scale's unit times the sum of their codes, which is at most `largest` in magnitude."""
    word = _elements(BLOCK)
    inside = word < count
    first, apart = _fields(word, numel, count, FIELDS)
    sums = tl.load(words + word, mask=inside, other=0) + OFFSETS
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        mine = inside & (i < numel)
        code = (sums >> (field * WIDTH) & ((1 << WIDTH) - 1)).to(tl.int32) - largest
        tl.store(out + i, code.to(tl.float32) * _of_scale(units, scales + i, mine, SCALES), mask=mine)


@triton.jit
def count_fits(
    x, words, numel, limit, before, factor, count, WIDTH: tl.constexpr, FIELDS: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr
):
    """Words with a 1 for each element whose code in a scale is at most `limit`, as bits."""
    word = _elements(BLOCK)
    inside = word < count
    first, apart = _fields(word, numel, count, FIELDS)
    sums = tl.zeros([BLOCK], WORD)
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        mine = inside & (i < numel)
        fits = mine & (_magnitude(tl.load(x + i, mask=mine, other=0.0) * before * factor) <= limit)
        sums += fits.to(WORD) << (field * WIDTH)
    tl.store(words + word, sums, mask=inside)


@triton.jit(do_not_specialize=["scale", "size"])
def find_scales(words, scales, numel, scale, size, count, WIDTH: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr):
    """Gives `scale` to the elements that it fits on all `size` ranks, by the sums of their words."""
    word = _elements(BLOCK)
    inside = word < count
    first, apart = _fields(word, numel, count, FIELDS)
    sums = tl.load(words + word, mask=inside, other=0)
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        fits = (sums >> (field * WIDTH) & ((1 << WIDTH) - 1)) == size
        tl.store(scales + i, tl.zeros([BLOCK], tl.int8) + scale.to(tl.int8), mask=inside & (i < numel) & fits)
