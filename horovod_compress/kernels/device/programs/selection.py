"""Programs of accumulation with momentum, and of the choice of the largest entries."""

import triton
import triton.language as tl

from .parts import INFINITY, TOO_LARGE, block_of, float_at, floats, magnitude_of

# Consecutive elements that are sampled together, as in the native kernels, whose threshold would
# else be another.
SAMPLED = 64
# Less a magnitude, as bits: what sorts the largest first.
NO_MAGNITUDE = 0x7FFFFFFF
_SAMPLED, _NO_MAGNITUDE = tl.constexpr(SAMPLED), tl.constexpr(NO_MAGNITUDE)
NONE, VANILLA, NESTEROV = 0, 1, 2  # kinds of momentum


@triton.jit
def _from_base(g, base, inside, BASED: tl.constexpr):
    """A gradient, where it counts from `base`."""
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
    """A key that sorts by tensor, and the largest magnitudes first."""
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
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    i = start + i
    at = (i // _SAMPLED * tl.load(row + 6) + tl.load(row + 7)) * _SAMPLED + i % _SAMPLED
    g = float_at(row, 5) * _from_base(
        tl.load(floats(row, 0) + at, mask=inside, other=0.0), floats(row, 1) + at, inside, BASED
    )
    old_u = tl.load(floats(row, 2) + at, mask=inside, other=0.0) if KIND else g
    _, new_v = _advanced(
        g, old_u, tl.load(floats(row, 3) + at, mask=inside, other=0.0), float_at(row, 4), KIND
    )
    bits = magnitude_of(new_v)
    tl.store(
        orders + tl.load(row + 8) + i,
        _order(owner, tl.where(bits < TOO_LARGE, bits, 0)),
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
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
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
    hits = inside & (magnitude_of(kept) >= tl.load(floors + owner))
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
        owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
        first = tl.load(row - 1)
        before = tl.load(ends + first - 1, mask=first > 0, other=0)
        value = tl.load(floats(row, 0) + start + i, mask=inside, other=0.0)
        bits = magnitude_of(value)
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
                tl.load(floats(row, 1) + start + i, mask=wanted, other=0.0),
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
    owner, row, start, i, inside = block_of(table, owners, COLUMNS, BLOCK)
    entry = tl.load(row + 2) + start + i
    at = tl.load(indices + entry, mask=inside, other=0).to(tl.int64)
    tl.store(floats(row, 0) + at, tl.load(for_a + entry, mask=inside, other=0.0), mask=inside)
    if TWO:
        tl.store(floats(row, 1) + at, tl.load(for_b + entry, mask=inside, other=0.0), mask=inside)
