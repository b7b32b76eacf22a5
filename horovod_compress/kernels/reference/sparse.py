"""Index and value coding of sparse payloads (docs/wire-format.md).

A body has the number of entries, the kind of values and the Rice parameter r; its scales where the
kind has any; the values; the r low bits of all gaps between indices; and for each gap as many zeros
as its high bits say, then a one. Encoding tries all r for the fewest bits.
"""

import struct
from typing import Sequence, Tuple

import numpy as np

from ..encoded import Encoded, new_body
from .dense import Float, scatter_add

HEAD = struct.Struct("<IBB")  # count, kind, Rice parameter
_KINDS = ("fp32", "fp16", "bf16", "sign", "power", "2bit")
VALUE_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "power": 4, "2bit": 2, "sign": 1}
SCALES = {"sign": 1, "power": 1, "2bit": 4}
_MAX_RICE = 31


def encode_sparse(
    indices: np.ndarray, values: np.ndarray, *, kind: str, scales: Sequence[Float] = ()
) -> Encoded:
    """A sparse body: ascending uint32 indices and float32 values, which are finite.

    kind: "fp32", "fp16", "bf16" round the values, and have no scales; "sign" keeps their signs,
    they decode to ±scale; "power" takes values that are exactly ±scale/2^d with d from 0 to 7,
    scale being a power of two; "2bit" takes values that are exactly one of four scales.
    """
    gaps: np.ndarray = np.diff(indices.astype(np.int64), prepend=-1) - 1
    costs = [int((gaps >> r).sum()) + len(gaps) * (r + 1) for r in range(_MAX_RICE + 1)]
    r = int(np.argmin(costs))
    high = np.zeros(int((gaps >> r).sum()) + len(gaps), bool)
    high[np.cumsum((gaps >> r) + 1) - 1] = True
    if len(scales) != SCALES.get(kind, 0):
        raise ValueError(f"values of kind {kind} have {SCALES.get(kind, 0)} scales")
    body = new_body(
        HEAD.pack(len(indices), _KINDS.index(kind), r),
        np.array(scales, np.float32),
        store(values, kind, scales),
        _pack_bits(gaps[:, None] >> np.arange(r) & 1),
        _pack_bits(high),
    )
    return Encoded(body, len(indices))


def decode_sparse(body: np.ndarray, *, numel: int) -> Tuple[np.ndarray, np.ndarray]:
    """The inverse of encode_sparse: (indices, values). Raises ValueError for a body that is not,
    down to the last bit, entries of a tensor of `numel` elements."""
    if len(body) < HEAD.size:
        raise ValueError("cut off in the head of its entries")
    count, kind, r = HEAD.unpack_from(body.data)
    if count > numel:
        raise ValueError("more entries than the tensor has elements")
    if kind >= len(_KINDS):
        raise ValueError("unknown kind of values")
    if r > _MAX_RICE:
        raise ValueError("Rice parameter out of range")
    kind = _KINDS[kind]
    at, bits = HEAD.size + 4 * SCALES.get(kind, 0), count * VALUE_BITS[kind]
    end = at + (bits + 7) // 8
    if len(body) < end:
        raise ValueError("shorter than its values")
    scales = np.frombuffer(body[HEAD.size : at].tobytes(), "<f4")
    if not np.isfinite(scales).all():
        raise ValueError("scale not finite")
    if bits % 8 and body[end - 1] >> bits % 8:
        raise ValueError("longer than its values")
    values = load(body[at:end].tobytes(), kind, count, tuple(scales))
    high = end + (count * r + 7) // 8
    if len(body) < high:
        raise ValueError("shorter than its gaps")
    low, rest = np.split(np.unpackbits(body[end:high], bitorder="little"), [count * r])
    places = np.flatnonzero(np.unpackbits(body[high:], bitorder="little"))
    if len(places) != count or rest.any() or len(body) - high != places.max(initial=-1) // 8 + 1:
        raise ValueError("not the gaps of as many entries")
    gaps = (np.diff(places, prepend=-1) - 1 << r) + low.reshape(count, r) @ (1 << np.arange(r))
    indices = np.cumsum(gaps + 1) - 1
    if count and indices[-1] >= numel:
        raise ValueError("index outside the tensor")
    return indices.astype(np.uint32), values


def decode_add_sparse(out: np.ndarray, body: np.ndarray, *, scale: float) -> bool:
    """out[indices] += scale·values of a sparse body, in place. Raises ValueError, and changes
    nothing, for an invalid body. Returns whether the new elements are finite."""
    indices, values = decode_sparse(body, numel=out.size)
    return scatter_add(out, indices, values, scale=scale)


def code_values(values: np.ndarray, kind: str) -> Tuple[np.ndarray, Sequence[Float]]:
    """(what float32 values will be decoded to, the kind's scales).

    fp16, bf16: the nearest, ties to even; numbers too large become the largest finite value. sign:
    ± the mean magnitude. power: the nearest power of two, the largest ones down; 0 where that is
    below a 128th of the largest's, or a denormal number. 2bit: SparseLoCo's (arXiv 2508.15706):
    four bins of 1.5 standard deviations, the third around the mean, the outer ones open; a value
        becomes the mean of its bin.
    """
    if kind == "fp32":
        return values, ()
    if kind == "sign":
        scale = np.float32(_sum(np.abs(values)) / max(len(values), 1))
        return np.copysign(scale, values), (scale,)
    if kind == "power":
        return _powers(values)
    if kind == "2bit":
        return _means_of_bins(values)
    return load(store(values, kind).tobytes(), kind), ()


def code_entries(
    indices: np.ndarray, x: np.ndarray, kind: str
) -> Tuple[np.ndarray, np.ndarray, Sequence[Float]]:
    """(indices, values, scales): `code_values` of x at indices, without those that have no code."""
    values, scales = code_values(x[indices], kind)
    coded = (values != 0) | (kind != "power")
    return indices[coded], values[coded], scales


def _powers(values: np.ndarray) -> Tuple[np.ndarray, Sequence[Float]]:
    mantissa, exponent = np.frexp(np.abs(values))  # in [0.5, 1)·2^exponent
    top = exponent.max(initial=-1000, where=mantissa > 0)
    # Nothing, or denormal numbers only.
    if top < -125:
        return np.zeros_like(values), (0.0,)
    # 2^-126 has no power below.
    exponent = np.minimum(exponent + ((mantissa >= 0.75) | (exponent == -126)), top)
    has_code = (mantissa > 0) & (exponent >= -125) & (top - exponent <= 7)
    powers = np.copysign(np.ldexp(np.float32(0.5), exponent), values)
    return np.where(has_code, powers, np.float32(0)), (float(np.ldexp(0.5, top)),)


def _means_of_bins(values: np.ndarray) -> Tuple[np.ndarray, Sequence[Float]]:
    wide = values.astype(np.float64)
    mean = _sum(wide) / max(len(wide), 1)
    width = 1.5 * np.sqrt(_sum((wide - mean) * (wide - mean)) / max(len(wide) - 1, 1))
    bins = np.clip(np.rint((wide - mean) / width + 2), 0, 3) if width > 0 else np.full(len(wide), 2)
    means = np.array(
        [_sum(wide[bins == b]) / max(int(np.count_nonzero(bins == b)), 1) for b in range(4)],
        np.float32,
    )
    return means[bins.astype(np.intp)], tuple(means)


def _sum(values: np.ndarray) -> float:
    """Added up in float64 in order, as native code does."""
    return float(np.cumsum(values, dtype=np.float64)[-1]) if len(values) else 0.0


def store(values: np.ndarray, kind: str, scales: Sequence[Float] = ()) -> np.ndarray:
    """The values as they are on the wire."""
    if kind == "fp32":
        return values
    if kind == "fp16":
        return np.clip(values, -65504, 65504).astype(np.float16)
    if kind == "sign":
        return _pack_bits(np.signbit(values))
    if kind == "power":
        codes = np.signbit(values) * 8 + (
            np.frexp(np.float32(scales[0]))[1] - np.frexp(values)[1] & 7
        )
        return _pack_bits(codes[:, None] >> np.arange(4) & 1)
    if kind == "2bit":
        codes = np.argmax(values[:, None] == np.array(scales, np.float32), axis=1)
        return _pack_bits(codes[:, None] >> np.arange(2) & 1)
    bits = values.view(np.uint32)
    magnitude = (bits & 0x7FFFFFFF).astype(np.uint64)
    rounded = np.minimum((magnitude + 0x7FFF + (magnitude >> 16 & 1)) >> 16, 0x7F7F)
    return (bits >> 16 & 0x8000 | rounded.astype(np.uint32)).astype(np.uint16)


def load(data: bytes, kind: str, count: int = 0, scales: Sequence[Float] = ()) -> np.ndarray:
    """float32 from the bytes on the wire."""
    if kind == "fp32":
        return np.frombuffer(data, "<f4").copy()
    if kind == "fp16":
        return np.frombuffer(data, "<f2").astype(np.float32)
    if kind == "bf16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if kind == "2bit":
        return np.array(scales, np.float32)[bits.reshape(-1, 2)[:count] @ np.array([1, 2])]
    scale = np.float32(scales[0])
    if kind == "sign":
        return np.where(bits[:count], -scale, scale)
    codes = bits.reshape(-1, 4)[:count] @ np.array([1, 2, 4, 8])
    return np.where(codes & 8, -scale, scale) * np.float32(0.5) ** (codes & 7).astype(np.float32)


def _pack_bits(bits: np.ndarray) -> np.ndarray:
    return np.packbits(np.asarray(bits, np.uint8), bitorder="little")
