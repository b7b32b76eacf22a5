"""The Triton programs: one function for each pass over memory, and how a pass over many tensors is
launched.

A launch is for all tensors of a table. In a row are a tensor's number of elements, its first block,
and the program's arguments for it, which the program's docstring lists: `row` points to the first
of them. What blocks find lies in one array for all tensors.

Floats are compared as the native kernels compare them: for finite ones the bits without the sign
order as the absolute values do, and infinity and NaN are the largest. A program that adds up or
compares leaves one number for its block, and torch adds those up: nothing depends on the order in
which blocks run.
"""

import contextlib
import functools
from typing import Any, NamedTuple, Sequence, Tuple

import numpy as np
import torch
import triton
import triton.language as tl

from .array import stream_of

INTERPRETED = triton.knobs.runtime.interpret
# Elements of a block. Eight for each of 128 threads, so that many loads are under way; the
# interpreter takes a NumPy call for each block and line.
BLOCK = 1 << 16 if INTERPRETED else 1024
# Words of a block, each of which is several elements: more take more registers.
WORD_BLOCK = BLOCK // 4
# Elements of a block where what is sent is marked or sampled, for the same reason.
MARK_BLOCK = BLOCK // 2
# Bits of 2^110, as in the native kernels.
TOO_LARGE = 0x76800000
INFINITY = 0x7F800000
# Consecutive elements that are sampled together, as in the native kernels, whose threshold would
# else be another.
SAMPLED = 64
# Less a magnitude, as bits: what sorts the largest first.
NO_MAGNITUDE = 0x7FFFFFFF
_TOO_LARGE, _INFINITY, _SAMPLED, _NO_MAGNITUDE = (
    tl.constexpr(TOO_LARGE),
    tl.constexpr(INFINITY),
    tl.constexpr(SAMPLED),
    tl.constexpr(NO_MAGNITUDE),
)
WORDS = {4: tl.int32, 8: tl.int64}  # by the bytes of a word
NONE, VANILLA, NESTEROV = 0, 1, 2  # kinds of momentum
Row = Tuple[Any, ...]


class Blocks(NamedTuple):
    """How the blocks of a launch are dealt to its tensors. owners: of each block its tensor's
    number, int64 on the device; firsts: of each tensor its first block."""

    owners: torch.Tensor
    firsts: Sequence[int]

    def new(self, rows: int = 1) -> Any:
        """Memory for a number of each block, int32; a tensor for each row."""
        memory = self.owners.new_empty((rows, len(self.owners)), dtype=torch.int32)
        return memory[0] if rows == 1 else memory

    def largest(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of each tensor, the largest of its blocks' numbers, 0 at least."""
        return numbers.new_zeros(len(self.firsts)).scatter_reduce_(0, self.owners, numbers, "amax")

    def sums(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of each tensor, the sum of its blocks' numbers."""
        return numbers.new_zeros(len(self.firsts)).scatter_add_(0, self.owners, numbers)


def copied(arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """A copy on the device of arrays of one type, one behind the other, on the stream that is
    current; the host does not wait for it, because it is made from pinned memory."""
    dtype = arrays[0].dtype
    pinned = device.type == "cuda"
    numel = sum(map(len, arrays))
    staged = torch.empty(numel, dtype=_TORCH_TYPES[dtype], device="cpu", pin_memory=pinned)
    np.concatenate(arrays, out=staged.numpy().view(dtype))
    return staged.to(device, non_blocking=True)


def brought(tensors: Sequence[torch.Tensor], arrays: Sequence[np.ndarray]) -> None:
    """Copies tensors on a device into as many arrays on the host, of the same types and lengths,
    and waits once for all. Copies into pinned memory are under way together."""
    for tensor, array in zip(tensors, arrays):
        torch.from_numpy(array).copy_(tensor, non_blocking=True)
    if tensors and tensors[0].is_cuda:
        torch.cuda.current_stream(tensors[0].device).synchronize()


def pinned(size: int, dtype: torch.dtype, device: torch.device) -> np.ndarray:
    """Memory on the host for so many elements, which a GPU writes without help."""
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=device.type == "cuda").numpy()


_TORCH_TYPES = {  # which has no unsigned ones
    np.dtype(np.float32): torch.float32,
    np.dtype(np.int16): torch.int16,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.int64,
}


@functools.lru_cache(maxsize=256)
def _blocks(sizes: Tuple[int, ...], length: int, device: torch.device, stream: Any) -> Blocks:
    """As `blocks`. stream: the number of the current one, on which alone they can be used: on
    another one the copy may not have arrived."""
    counts = [-(-size // length) for size in sizes]
    return Blocks(
        copied([np.repeat(np.arange(len(sizes)), counts)], device),
        (np.cumsum(counts) - counts).tolist(),
    )


def blocks(sizes: Sequence[int], device: torch.device, length: int = BLOCK) -> Blocks:
    """The blocks, of `length` elements, of tensors with so many elements."""
    return _blocks(tuple(sizes), length, device, stream_of(device))


def blocks_of(tensors: Sequence[torch.Tensor], length: int = BLOCK) -> Blocks:
    """The blocks of `length` elements of these tensors."""
    return blocks([tensor.numel() for tensor in tensors], tensors[0].device, length)


def launch(
    program: Any,
    device: torch.device,
    rows: Sequence[Row],
    *shared: Any,
    BLOCK: int = BLOCK,
    **constants: Any,
) -> None:
    """Starts a program for several tensors, on the current stream. rows: of each tensor the number
    of its elements, or words, and the program's arguments for it, tensors, integers or floats;
    shared: the arguments for all of them."""
    sizes, *columns = zip(*rows)
    owners, firsts = _blocks(sizes, BLOCK, device, stream_of(device))
    if len(owners):
        table = np.array([sizes, firsts, *map(_numbers, columns)], np.int64).T
        constants.update(COLUMNS=table.shape[1], BLOCK=BLOCK, enable_fp_fusion=False)
        # Triton launches on the device that is current.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            program[(len(owners),)](
                copied([table.reshape(-1)], device), owners, *shared, **constants
            )


def _numbers(column: Row) -> Any:
    """A column of a table: addresses, integers, or the bits of floats."""
    if isinstance(column[0], torch.Tensor):
        return [tensor.data_ptr() for tensor in column]
    return np.array(column, np.float32).view(np.int32) if isinstance(column[0], float) else column


def largest_of(bits: int) -> float:
    """A magnitude, infinity for NaN."""
    return float(np.int32(min(bits, INFINITY)).view(np.float32))


@triton.jit
def _block(table, owners, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """(the number of this block's tensor, where its arguments are, this block's first element,
    those counted from it, which of them there are)."""
    owner = tl.load(owners + tl.program_id(0))
    row = table + owner * COLUMNS
    start = (tl.program_id(0) - tl.load(row + 1)) * BLOCK
    i = tl.arange(0, BLOCK)
    return owner, row + 2, start, i, i < tl.minimum(tl.load(row) - start, BLOCK).to(tl.int32)


@triton.jit
def _pointer(arguments, column: tl.constexpr, TYPE: tl.constexpr):
    return tl.load(arguments + column).to(tl.pointer_type(TYPE), bitcast=True)


@triton.jit
def _floats(arguments, column: tl.constexpr):
    return _pointer(arguments, column, tl.float32)


@triton.jit
def _float(arguments, column: tl.constexpr):
    return tl.load(arguments + column).to(tl.int32).to(tl.float32, bitcast=True)


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


@triton.jit
def _order(owner, bits):
    """What sorts by tensor, and the largest magnitudes first."""
    return (owner.to(tl.int64) << 32) | (bits ^ _NO_MAGNITUDE).to(tl.int64)


@triton.jit
def sample(
    table,
    owners,
    orders,
    KIND: tl.constexpr,
    BASED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How the magnitudes that v is about to have are ordered, at sampled elements: of every
    `stride`-th stretch of 64, from number `shift` on.

    grad, base, u, v, momentum, scale, stride, shift, where in `orders`."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    i = start + i
    at = (i // _SAMPLED * tl.load(row + 6) + tl.load(row + 7)) * _SAMPLED + i % _SAMPLED
    g = _float(row, 5) * _from_base(
        tl.load(_floats(row, 0) + at, mask=inside, other=0.0), _floats(row, 1) + at, inside, BASED
    )
    old_u = tl.load(_floats(row, 2) + at, mask=inside, other=0.0) if KIND else g
    _, new_v = _advanced(
        g, old_u, tl.load(_floats(row, 3) + at, mask=inside, other=0.0), _float(row, 4), KIND
    )
    bits = _magnitude(new_v)
    tl.store(
        orders + tl.load(row + 8) + i,
        _order(owner, tl.where(bits < _TOO_LARGE, bits, 0)),
        mask=inside,
    )


@triton.jit
def advance(
    table,
    owners,
    floors,
    counts,
    peaks,
    KIND: tl.constexpr,
    BASED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Advances u and v, and leaves the gradient as `base` is, or zero. For its block: how many of
    the new magnitudes reach the tensor's floor, and the largest one that was to be.

    grad, base, u, v, momentum, scale."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    grad, base, u, v = (
        _floats(row, 0) + start + i,
        _floats(row, 1) + start + i,
        _floats(row, 2) + start + i,
        _floats(row, 3) + start + i,
    )
    g = tl.load(grad, mask=inside, other=0.0)
    left = tl.load(base, mask=inside, other=0.0) if BASED else tl.zeros_like(g)
    tl.store(grad, left, mask=inside)
    g = _float(row, 5) * (g - left if BASED else g)
    old_v = tl.load(v, mask=inside, other=0.0)
    old_u = tl.load(u, mask=inside, other=0.0) if KIND else old_v
    new_u, new_v = _advanced(g, old_u, old_v, _float(row, 4), KIND)
    bits = tl.where(inside, _magnitude(new_v), 0)
    if KIND:
        # One that is finite would soon make v as large again; of one that is not, nothing is known.
        tl.store(
            u,
            tl.where(bits < _TOO_LARGE, new_u, tl.where(bits < _INFINITY, 0.0, old_u)),
            mask=inside,
        )
    kept = tl.where(bits < _TOO_LARGE, new_v, old_v)
    tl.store(v, kept, mask=inside)
    hits = inside & (_magnitude(kept) >= tl.load(floors + owner))
    tl.store(counts + tl.program_id(0), tl.sum(hits.to(tl.int32)))
    tl.store(peaks + tl.program_id(0), tl.max(bits))


@triton.jit
def collect(
    table,
    owners,
    floors,
    counts,
    ends,
    orders,
    indices,
    of_v,
    of_u,
    TWO: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of the elements that reach the tensor's floor, in order, as many as there is room for: how
    they are ordered, their indices, and what v, and with TWO u, hold there. ends: sums of the
    blocks' counts.

    v, u, where in those arrays, room."""
    block = tl.program_id(0)
    count = tl.load(counts + block)
    if count > 0:
        owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
        first = tl.load(row - 1)
        before = tl.load(ends + first - 1, mask=first > 0, other=0)
        value = tl.load(_floats(row, 0) + start + i, mask=inside, other=0.0)
        bits = _magnitude(value)
        hits = inside & (bits >= tl.load(floors + owner))
        at = (
            (tl.load(ends + block) - before - count).to(tl.int32) + tl.cumsum(hits.to(tl.int32)) - 1
        )
        wanted = hits & (at < tl.load(row + 3).to(tl.int32))
        first = tl.load(row + 2)
        tl.store(orders + first + at, _order(owner, bits), mask=wanted)
        tl.store(indices + first + at, (start + i).to(tl.int32), mask=wanted)
        tl.store(of_v + first + at, value, mask=wanted)
        if TWO:
            tl.store(
                of_u + first + at,
                tl.load(_floats(row, 1) + start + i, mask=wanted, other=0.0),
                mask=wanted,
            )


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

    a, b, where in `indices` and in the numbers."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    entry = tl.load(row + 2) + start + i
    at = tl.load(indices + entry, mask=inside, other=0).to(tl.int64)
    tl.store(_floats(row, 0) + at, tl.load(for_a + entry, mask=inside, other=0.0), mask=inside)
    if TWO:
        tl.store(_floats(row, 1) + at, tl.load(for_b + entry, mask=inside, other=0.0), mask=inside)


@triton.jit
def subtract_signs(table, owners, indices, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Subtracts from the residual, at indices that do not repeat, a scale with the sign that is
    there.

    residual, scale, where in `indices`."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    at = _floats(row, 0) + tl.load(indices + tl.load(row + 2) + start + i, mask=inside, other=0).to(
        tl.int64
    )
    held = tl.load(at, mask=inside, other=0.0)
    sign = held.to(tl.int32, bitcast=True) & -0x80000000
    tl.store(
        at,
        held - (_float(row, 1).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True),
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

    grad, squares, r, v, where in `marks`, alpha, zeta, tau."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    grad, r, v = (
        _floats(row, 0) + start + i,
        _floats(row, 2) + start + i,
        _floats(row, 3) + start + i,
    )
    g = tl.load(grad, mask=inside, other=0.0)
    old_r = tl.load(r, mask=inside, other=0.0)
    old_v = tl.load(v, mask=inside, other=0.0)
    new_r = old_r + g
    new_v = old_v + (
        tl.load(_floats(row, 1) + start + i, mask=inside, other=0.0) if GIVEN else g * g
    )
    good = (_magnitude(new_r) < _TOO_LARGE) & (_magnitude(new_v) < _INFINITY)
    new_r = tl.where(good, new_r, old_r)
    new_v = tl.where(good, new_v, old_v)
    fires = inside & (new_r * new_r > _float(row, 5) * new_v) & (tl.abs(new_r) > _float(row, 7))
    tl.store(r, new_r, mask=inside)
    tl.store(v, tl.where(fires, new_v, _float(row, 6) * new_v), mask=inside)
    tl.store(grad, tl.zeros_like(g), mask=inside)
    tl.store(marks + tl.load(row + 4) + start + i, fires.to(tl.int8), mask=inside)
    tl.store(counts + tl.program_id(0), tl.sum(fires.to(tl.int32)))
    tl.store(peaks + tl.program_id(0), tl.max(tl.where(good, 0, _INFINITY)))


@triton.jit
def accumulate_bins(
    table, owners, maxima, peaks, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds the gradient, which stays, to the residual, of bins of `length` elements, BLOCK of them
    together, WIDTH elements of each at a time. Leaves the largest magnitude of each bin, and for
    all of its bins the largest one that was to be. The elements of the table are bins.

    grad, residual, where in `maxima`, the tensor's number of elements, length."""
    owner, row, first, one, is_bin = _block(table, owners, COLUMNS, BLOCK)
    grad, residual, numel, length = (
        _floats(row, 0),
        _floats(row, 1),
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
        bits = tl.where(inside, _magnitude(moved), 0)
        kept = tl.where(bits < _TOO_LARGE, moved, old)
        tl.store(residual + i, kept, mask=inside)
        worst = tl.maximum(worst, tl.max(bits, 1))
        largest = tl.maximum(largest, tl.max(tl.where(inside, _magnitude(kept), 0), 1))
        start += WIDTH
    tl.store(
        maxima + tl.load(row + 2) + first + one, largest.to(tl.float32, bitcast=True), mask=is_bin
    )
    tl.store(peaks + tl.program_id(0), tl.max(worst))


@triton.jit
def add_maxima(table, owners, maxima, sums, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum, float64, of the largest magnitudes of a tensor's bins, in one block for each tensor,
    which has one element in the table.

    where in `maxima`, bins."""
    owner, row, _, i, _ = _block(table, owners, COLUMNS, BLOCK)
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

    grad, residual, where in `maxima`, where in `marks`, length, more."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    g = tl.load(_floats(row, 0) + start + i, mask=inside, other=0.0)
    kept = tl.load(_floats(row, 1) + start + i, mask=inside, other=0.0)
    its = (start + i).to(tl.int32) // tl.load(row + 4).to(tl.int32)
    largest = tl.load(maxima + tl.load(row + 2) + its, mask=inside, other=0.0)
    lifted = inside & (tl.abs(kept + _float(row, 5) * g) >= largest) & (kept != 0)
    tl.store(_floats(row, 0) + start + i, tl.zeros_like(g), mask=inside)
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

    a, b, where in `marks`, the first block that marked the tensor, where in `indices` less the sum
    before that block."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
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
            of_a + first + at, tl.load(_floats(row, 0) + start + i, mask=hits, other=0.0), mask=hits
        )
        if TWO:
            tl.store(
                of_b + first + at,
                tl.load(_floats(row, 1) + start + i, mask=hits, other=0.0),
                mask=hits,
            )


@triton.jit
def find_largest(table, owners, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """For its block: the largest magnitude.

    x."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    tl.store(
        peaks + tl.program_id(0),
        tl.max(_magnitude(tl.load(_floats(row, 0) + start + i, mask=inside, other=0.0))),
    )


@triton.jit
def add_entries(table, owners, indices, values, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds scale·values at indices, which do not repeat. For its block: the largest new magnitude.

    out, scale, where in `indices` and `values`."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    entry = tl.load(row + 2) + start + i
    out = _floats(row, 0) + tl.load(indices + entry, mask=inside, other=0).to(tl.int64)
    added = tl.load(out, mask=inside, other=0.0) + _float(row, 1) * tl.load(
        values + entry, mask=inside, other=0.0
    )
    tl.store(out, added, mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(tl.where(inside, _magnitude(added), 0)))


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

    out, u, new_u, m."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    finite = tl.load(largest + owner) < _INFINITY
    inside = inside & (i < tl.where(finite, BLOCK, 0))
    momentum = _float(row, 3)
    g = tl.load(_floats(row, 0) + start + i, mask=inside, other=0.0)
    moved = momentum * tl.load(_floats(row, 1) + start + i, mask=inside, other=0.0) + g
    result = g + momentum * moved if NESTEROV else moved
    tl.store(_floats(row, 2) + start + i, moved, mask=inside)
    tl.store(_floats(row, 0) + start + i, result, mask=inside)
    found = tl.max(tl.where(inside, tl.maximum(_magnitude(moved), _magnitude(result)), 0))
    tl.store(peaks + tl.program_id(0), tl.where(finite, found, _INFINITY))


@triton.jit
def from_float16(table, owners, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers that are in float16, as bits. For its block: the largest magnitude.

    half, out."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    value = (
        tl.load(_pointer(row, 0, tl.int16) + start + i, mask=inside, other=0)
        .to(tl.float16, bitcast=True)
        .to(tl.float32)
    )
    tl.store(_floats(row, 1) + start + i, value, mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(_magnitude(value)))


@triton.jit
def to_bfloat16(table, owners, codes, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Bfloat16, ties to even, as bits; numbers too large become the largest finite one. Zeroes the
    gradient. For its block: the largest magnitude.

    grad, where in `codes`."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    value = tl.load(_floats(row, 0) + start + i, mask=inside, other=0.0)
    bits = _magnitude(value)
    rounded = tl.minimum(bits + 0x7FFF + (bits >> 16 & 1) >> 16, 0x7F7F)
    tl.store(
        codes + tl.load(row + 1) + start + i,
        (value.to(tl.int32, bitcast=True) >> 16 & 0x8000 | rounded).to(tl.int16),
        mask=inside,
    )
    tl.store(_floats(row, 0) + start + i, tl.zeros_like(value), mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(bits))


@triton.jit
def add_bfloat16(table, owners, codes, peaks, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds scale times numbers that are in bfloat16, as bits. For its block: the largest new
    magnitude.

    out, scale, where in `codes`."""
    owner, row, start, i, inside = _block(table, owners, COLUMNS, BLOCK)
    value = (
        tl.load(codes + tl.load(row + 2) + start + i, mask=inside, other=0).to(tl.int32) << 16
    ).to(tl.float32, bitcast=True)
    out = _floats(row, 0) + start + i
    added = tl.load(out, mask=inside, other=0.0) + _float(row, 1) * value
    tl.store(out, added, mask=inside)
    tl.store(peaks + tl.program_id(0), tl.max(_magnitude(added)))


@triton.jit
def _fields(word, numel, count, FIELDS: tl.constexpr):
    """Where a word's first element is, and how many elements later each of the others is: words
    come in blocks of 64, of which all first elements come first, then the second …, as
    kernels/reference/quantization.py says."""
    whole = numel // (FIELDS * 64) * 64
    within = word < whole
    return tl.where(
        within, word // 64 * 64 * FIELDS + word % 64, whole * FIELDS + word - whole
    ), tl.where(within, 64, count - whole)


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
    bits. factors: one number for each scale. The elements of the table are words.

    x, the tensor's number of elements, where in `scales`, where in `words`, where in `factors`, the
    lower and upper half of the key, the largest magnitude, what elements are multiplied by
    before."""
    owner, row, start, word, inside = _block(table, owners, COLUMNS, BLOCK)
    count, word = tl.load(row - 2), start + word
    x, numel, limit, before = (
        _floats(row, 0),
        tl.load(row + 1),
        tl.load(row + 7).to(tl.int32),
        _float(row, 8),
    )
    scales += tl.load(row + 2)
    factors += tl.load(row + 4)
    first, apart = _fields(word, numel, count, FIELDS)
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
        magnitude = tl.minimum(_magnitude(y), limit)
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
    """Elements from the ranks' sums of words: their scale's unit times the sum of their codes. The
    elements of the table are words.

    out, the tensor's number of elements, where in `scales`, where in `words`, where in `units`, the
    largest magnitude of a sum."""
    owner, row, start, word, inside = _block(table, owners, COLUMNS, BLOCK)
    count, word = tl.load(row - 2), start + word
    out, numel, largest = _floats(row, 0), tl.load(row + 1), tl.load(row + 5).to(tl.int32)
    scales += tl.load(row + 2)
    units += tl.load(row + 4)
    first, apart = _fields(word, numel, count, FIELDS)
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
    """Words with a 1 for each element whose code in a scale is at most `limit`. The elements of the
    table are words.

    x, the tensor's number of elements, where in `words`, the bits of limit, what elements are
    multiplied by before, the scale's factor."""
    owner, row, start, word, inside = _block(table, owners, COLUMNS, BLOCK)
    count, word = tl.load(row - 2), start + word
    numel = tl.load(row + 1)
    first, apart = _fields(word, numel, count, FIELDS)
    sums = tl.zeros([BLOCK], WORD)
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        mine = inside & (i < numel)
        y = tl.load(_floats(row, 0) + i, mask=mine, other=0.0) * _float(row, 4) * _float(row, 5)
        sums += (mine & (_magnitude(y) <= tl.load(row + 3))).to(WORD) << (field * WIDTH)
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
    """Gives a scale to the elements that it fits on all ranks, by the sums of their words. The
    elements of the table are words.

    the tensor's number of elements, where in `words`, where in `scales`, the scale, the number of
    ranks."""
    owner, row, start, word, inside = _block(table, owners, COLUMNS, BLOCK)
    count, word = tl.load(row - 2), start + word
    numel = tl.load(row)
    first, apart = _fields(word, numel, count, FIELDS)
    sums = tl.load(words + tl.load(row + 1) + word, mask=inside, other=0)
    scales += tl.load(row + 2)
    for field in tl.static_range(FIELDS):
        i = first + field * apart
        fits = (sums >> (field * WIDTH) & ((1 << WIDTH) - 1)) == tl.load(row + 4)
        tl.store(
            scales + i,
            tl.zeros([BLOCK], tl.int8) + tl.load(row + 3).to(tl.int8),
            mask=inside & (i < numel) & fits,
        )
