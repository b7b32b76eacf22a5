"""Levels by bucket, each bucket against its own norm (QSGD, Alistarh et al., NeurIPS 2017, arXiv 1610.02132).

Body: coding (0 fixed width, 1 Elias), width, a float32 norm for each bucket, and the levels: as fields of `width` bits, or, as a uint32
count and for each level that is not 0: gamma code of the zeros before it plus 1, a sign bit, gamma code of its magnitude.
"""
import struct

import numpy as np

from .quantization import SECOND, bits_at, pack, unpack
from .sparse import new_body

_FIXED, _ELIAS = 0, 1
_LARGEST = np.finfo(np.float32).max


def encode_buckets(grad, steps, bucket, l2, smaller, key, spare=None):
    """Levels sign(x)·(⌊y⌋ + Bernoulli(y − ⌊y⌋)), y = |x|/norm·steps, with the norm of the bucket: max |x|, or ‖x‖₂ with l2.

    smaller: in Elias' code where that is smaller than fields of fixed width. grad is left zero. Returns (buffer of the body, number of
    elements, finite); of a gradient that is not finite nothing is sent.
    """
    n = len(grad)
    finite = bool(np.isfinite(grad).all())
    norms = np.zeros(-(-n // bucket), np.float32)
    levels = np.zeros(n, np.int64)
    half = (bucket + 1) // 2
    for b in range(len(norms) if finite else 0):
        x = grad[b * bucket : (b + 1) * bucket]
        norms[b] = norm = _norm(x, l2)
        exponent = int(np.clip(np.frexp(norm)[1] - 1, -120, 120)) if norm > 0 else 0
        before = np.ldexp(np.float32(1), -exponent)
        factor = np.float32(steps) / (norm * before) if norm > 0 else np.float32(0)
        y = np.minimum(np.abs(x) * before * factor, np.float32(steps))
        drawn = bits_at(np.uint32(b * half) + np.arange(half, dtype=np.uint32), key)
        drawn = np.concatenate([drawn, drawn[: bucket - half] * np.uint32(SECOND)])[: len(x)]
        whole = np.floor(y)
        up = (drawn >> 8).astype(np.float32) * np.float32(2.0**-24) < y - whole
        levels[b * bucket : b * bucket + len(x)] = np.where(np.signbit(x), -1, 1) * (whole + up).astype(np.int64)
    grad.fill(0)
    width = max(1, int(2 * np.abs(levels).max(initial=0)).bit_length())
    words = pack(levels, width, 0)
    bits = _elias(levels) if smaller else ""
    if smaller and 4 + (len(bits) + 7) // 8 < words.nbytes:
        stream = np.packbits(np.frombuffer(bits.encode(), np.uint8) - ord("0"), bitorder="little")
        return new_body(bytes([_ELIAS, width]), norms, struct.pack("<I", np.count_nonzero(levels)), stream), n, finite
    return new_body(bytes([_FIXED, width]), norms, words), n, finite


def add_buckets(out, body, steps, bucket, scale):
    """out += scale · norm/steps · levels, in place; returns whether out is finite. ValueError, and nothing changed, for a body that
    encode_buckets cannot have made."""
    n = len(out)
    at = 2 + 4 * -(-n // bucket)
    if len(body) < at:
        raise ValueError("shorter than its norms")
    norms = np.frombuffer(body[2:at].tobytes(), np.float32)
    if not ((norms >= 0) & (norms <= _LARGEST)).all():
        raise ValueError("norm out of range")
    coding, width = int(body[0]), int(body[1])
    if coding > _ELIAS or not 1 <= width <= max(1, (2 * steps).bit_length()):
        raise ValueError("unknown coding of levels")
    levels = _read_elias(body[at:], n, steps) if coding == _ELIAS else _read_fixed(body[at:], n, width)
    if np.abs(levels).max(initial=0) > steps:
        raise ValueError("level out of range")
    with np.errstate(over="ignore", invalid="ignore"):
        out += np.repeat(np.float32(scale) / np.float32(steps) * norms, bucket)[:n] * levels.astype(np.float32)
    return bool(np.isfinite(out).all())


def _norm(x, l2):
    peak = np.abs(x).max(initial=0)
    if not l2 or peak == 0:
        return peak
    down = np.ldexp(np.float32(1), -int(np.clip(np.frexp(peak)[1] - 1, -120, 120)))
    scaled = x * down
    lanes = np.zeros(16, np.float32)
    whole = len(x) // 16 * 16
    for line in (scaled * scaled)[:whole].reshape(-1, 16):
        lanes += line
    for rest in scaled[whole:]:
        lanes[0] += rest * rest
    return np.float32(min(np.sqrt(lanes.astype(np.float64).sum()) / np.float64(down), np.float64(_LARGEST)))


def _elias(levels):
    bits, last = [], -1
    for i in np.flatnonzero(levels).tolist():
        level = int(levels[i])
        bits += [_gamma(i - last), "1" if level < 0 else "0", _gamma(abs(level))]
        last = i
    return "".join(bits)


def _gamma(n):
    """As many ones as n has bits after the first, a zero, those bits from the lowest up."""
    rest = n.bit_length() - 1
    return "1" * rest + "0" + "".join(str(n >> j & 1) for j in range(rest))


def _read_fixed(data, n, width):
    fields_32, fields_64 = 32 // width, 64 // width
    wide = 20 * fields_32 * 11 < 10 * fields_64 * 10
    dtype, fields = (np.int64, fields_64) if wide else (np.int32, fields_32)
    if len(data) != -(-n // fields) * np.dtype(dtype).itemsize:
        raise ValueError("not of the length that a tensor of this size has")
    return unpack(np.frombuffer(data.tobytes(), dtype), n, width, 0, (1 << width - 1) - 1)


def _read_elias(data, n, steps):
    if len(data) < 4:
        raise ValueError("cut off before its levels")
    (count,) = struct.unpack("<I", data[:4].tobytes())
    if count > n:
        raise ValueError("more entries than the tensor has elements")
    bits = np.unpackbits(data[4:], bitorder="little").tolist()
    levels = np.zeros(n, np.int64)
    at, index = 0, -1

    def gamma():
        nonlocal at
        rest = 0
        while bits[at]:
            rest += 1
            at += 1
        if rest > 31:
            raise ValueError("a number out of range")
        value = 1 << rest | sum(bits[at + 1 + j] << j for j in range(rest))
        at += 1 + rest
        return value

    try:
        for _ in range(count):
            index += gamma()
            if index >= n:
                raise ValueError("index outside the tensor")
            minus = bits[at]
            at += 1
            level = gamma()
            if level > steps:
                raise ValueError("level out of range")
            levels[index] = -level if minus else level
    except IndexError:
        raise ValueError("bits end too early") from None
    if len(bits) - at >= 8 or any(bits[at:]):
        raise ValueError("longer than its entries")
    return levels
