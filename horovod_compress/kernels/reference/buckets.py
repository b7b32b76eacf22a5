"""Levels by bucket, each bucket against its own norm (QSGD, Alistarh et al., NeurIPS 2017, arXiv
1610.02132).

A body has a byte for the coding (0 fixed width, 1 Elias) and a float32 norm for each bucket. At
fixed width follow, for each bucket, a byte for the width w that holds the largest level possible
for its elements, then all levels + 2^(w−1) − 1 in columns of w bits. In Elias' code follow a uint32
count and, for each level that is not 0, the gamma code of the number of zeros before it plus 1, a
sign bit, and the gamma code of the level's magnitude. The gamma code of n is as many ones as n has
bits after the first, a zero, and those bits.
"""

import struct
from typing import Optional

import numpy as np

from ..encoded import Encoded, new_body
from .columns import BLOCK, block_bits, columns_of, from_columns, to_columns
from .dense import add
from .random import one_of, round_at_random

_FIXED, _ELIAS = 0, 1
# Every 16th bucket is sampled; all of them where there are fewer than 64.
_SAMPLED, _FEW = 16, 64
_LARGEST = np.finfo(np.float32).max


def encode_buckets(
    grad: np.ndarray,
    spare: Optional[np.ndarray] = None,
    *,
    steps: int,
    bucket: int,
    l2: bool,
    limit: float,
    key: int,
) -> Encoded:
    """Levels sign(x)·(⌊y⌋ + Bernoulli(y − ⌊y⌋)), y = |x|/norm·steps, with the norm of the bucket:
    max |x|, or ‖x‖₂ with l2.

    limit: Elias' code is used where it takes less than this share of the bytes at fixed width. grad
    is left zero. Nothing is sent of a gradient that is not finite. undo: (memory,), which is
    `spare` of the native function's next call.
    """
    n = len(grad)
    bucket = min(bucket, max(n, 1))
    finite = bool(np.isfinite(grad).all())
    norms = np.zeros(-(-n // bucket), np.float32)
    widths = np.zeros(len(norms), np.uint8)
    levels = np.zeros(n, np.int64)
    packed = []
    blocks = -(-bucket // BLOCK)
    bits = block_bits(len(norms) * blocks, key).reshape(len(norms), blocks * BLOCK)
    for b in range(len(norms) if finite else 0):
        x = grad[b * bucket : (b + 1) * bucket]
        norms[b] = norm = _norm(x, l2)
        lift = np.float32(2**64 if norm < 2**-90 else 1)  # so that the factor is in range
        y = x * lift * (_factor(norm * lift, steps) if norm > 0 else np.float32(0))
        rounded = round_at_random(y, bits[b, : len(x)], steps)
        widths[b] = _width(-int(-np.abs(y).max()) // -one_of(steps))
        packed.append(to_columns(rounded, int(widths[b]), _offset(int(widths[b]))))
        levels[b * bucket : b * bucket + len(x)] = rounded
    grad.fill(0)
    fixed = np.concatenate([np.empty(0, np.uint32), *packed])
    sample = [
        levels[b * bucket : (b + 1) * bucket]
        for b in range(0, len(norms), 1 if len(norms) < _FEW else _SAMPLED)
    ]
    elias_bits, counted, whole = (
        sum(len(_elias(part)) for part in sample),
        sum(map(len, sample)),
        len(widths) + fixed.nbytes,
    )
    # Native code writes Elias' code only where the estimate is promising.
    estimate = elias_bits * n / counted if counted and limit < 1 else 0
    coded = _elias(levels) if limit else ""
    most = min(whole, int(np.float32(limit) * np.float32(whole)))
    if finite and estimate < 8 * most and 4 + (len(coded) + 7) // 8 < most:
        stream = np.packbits(np.frombuffer(coded.encode(), np.uint8) - ord("0"), bitorder="little")
        body = new_body(bytes([_ELIAS]), norms, struct.pack("<I", np.count_nonzero(levels)), stream)
    else:
        body = new_body(bytes([_FIXED]), norms, widths, fixed)
    return Encoded(body, n, finite, (body,))


def decode_add_buckets(
    out: np.ndarray, body: np.ndarray, *, steps: int, bucket: int, scale: float
) -> bool:
    """out += scale · norm/steps · levels, in place; returns whether out is finite. ValueError, and
    nothing changed, for a body that encode_buckets cannot have made."""
    n = len(out)
    bucket = min(bucket, max(n, 1))
    at = 1 + 4 * -(-n // bucket)
    if len(body) < at:
        raise ValueError("shorter than its norms")
    norms = np.frombuffer(body[1:at].tobytes(), np.float32)
    if not ((norms >= 0) & (norms <= _LARGEST)).all():
        raise ValueError("norm out of range")
    if body[0] > _ELIAS:
        raise ValueError("unknown coding of levels")
    levels = (
        _read_elias(body[at:], n, steps)
        if body[0] == _ELIAS
        else _read_fixed(body[at:], n, bucket, steps)
    )
    units = np.repeat(np.float32(scale) / np.float32(steps) * norms, bucket)[:n]
    return add(out, units * levels.astype(np.float32), 1.0)


def _width(largest: int) -> int:
    """Bits that hold -largest … largest."""
    return (2 * largest).bit_length()


def _offset(width: int) -> int:
    return (1 << width - 1) - 1 if width else 0


def _norm(x: np.ndarray, l2: bool) -> np.float32:
    peak = np.abs(x).max(initial=0)
    if not l2 or peak == 0:
        return peak
    down = np.ldexp(np.float32(1), -int(np.clip(np.frexp(peak)[1] - 1, -120, 120)))
    norm = np.linalg.norm((x * down).astype(np.float64)) / np.float64(down)
    return max(np.float32(min(norm, np.float64(_LARGEST))), peak)


def _factor(norm: np.float32, steps: int) -> np.float32:
    """The factor from numbers up to norm to steps in units of 1/one_of(steps), by which norm itself
    becomes at most `steps`."""
    most = np.float32(steps) * np.float32(one_of(steps))
    factor = most / norm
    return np.nextafter(factor, np.float32(0)) if norm * factor > most else factor


def _elias(levels: np.ndarray) -> str:
    bits, last = [], -1
    for i in np.flatnonzero(levels).tolist():
        level = int(levels[i])
        bits += [_gamma(i - last), "1" if level < 0 else "0", _gamma(abs(level))]
        last = i
    return "".join(bits)


def _gamma(n: int) -> str:
    """The gamma code of n: a one for each bit after the first, a zero, then those bits from the
    lowest up."""
    rest = n.bit_length() - 1
    return "1" * rest + "0" + "".join(str(n >> j & 1) for j in range(rest))


def _read_fixed(data: np.ndarray, n: int, bucket: int, steps: int) -> np.ndarray:
    buckets = -(-n // bucket)
    widths = data[:buckets].astype(int)
    if len(widths) < buckets or (widths > _width(steps)).any():
        raise ValueError("width out of range")
    counts = [min(bucket, n - b * bucket) for b in range(buckets)]
    sizes = [4 * columns_of(count) * width for count, width in zip(counts, widths)]
    if len(data) != buckets + sum(sizes):
        raise ValueError("not of the length that its widths say")
    levels = [
        from_columns(np.frombuffer(part.tobytes(), np.uint32), count, width, _offset(width))
        for part, count, width in zip(
            np.split(data[buckets:], np.cumsum(sizes)), counts, widths.tolist()
        )
    ]
    found = np.concatenate([np.empty(0, np.int64), *levels])
    if np.abs(found).max(initial=0) > steps:
        raise ValueError("level out of range")
    return found


def _read_elias(data: np.ndarray, n: int, steps: int) -> np.ndarray:
    if len(data) < 4:
        raise ValueError("cut off before its levels")
    (count,) = struct.unpack("<I", data[:4].tobytes())
    if count > n:
        raise ValueError("more entries than the tensor has elements")
    bits = iter(np.unpackbits(data[4:], bitorder="little").tolist())
    levels, index = np.zeros(n, np.int64), -1

    def gamma() -> int:
        rest = 0
        while next(bits):
            rest += 1
        if rest > 31:
            raise ValueError("a number out of range")
        return 1 << rest | sum([next(bits) << j for j in range(rest)])

    try:
        for _ in range(count):
            index += gamma()
            if index >= n:
                raise ValueError("index outside the tensor")
            minus, level = next(bits), gamma()
            if level > steps:
                raise ValueError("level out of range")
            levels[index] = -level if minus else level
    except StopIteration:
        raise ValueError("bits end too early") from None
    rest = list(bits)
    if len(rest) >= 8 or any(rest):
        raise ValueError("longer than its entries")
    return levels
