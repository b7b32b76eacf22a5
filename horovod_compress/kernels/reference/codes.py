"""Whole tensors in narrower numbers: 16-bit floats, signs, powers of two.

Encoders leave grad zero, so that decoded values can be added there. Native encoders write into
`spare`, an earlier step's buffer, where it is given.
"""

from typing import Optional

import numpy as np

from ..encoded import Encoded, new_body
from .columns import BLOCK, block_bits, columns_of, from_columns, to_columns
from .dense import add, advance, max_abs
from .quantization import pack, unpack
from .sparse import load, store


def encode_float16(x: np.ndarray, half: np.ndarray) -> float:
    """half = x in float16, as uint16 bits, ties to even; numbers too large become infinite. Returns
    max |x|, infinity for NaN."""
    half[...] = x.astype(np.float16).view(np.uint16)
    half[np.isnan(x)] = half[np.isnan(x)] & 0x8000 | 0x7E00
    return max_abs(x)


def decode_float16(half: np.ndarray, out: np.ndarray) -> float:
    """out = float16 given as uint16 bits. Returns max |out|, infinity for NaN."""
    out[...] = half.view(np.float16)
    return max_abs(out)


def encode_bf16(grad: np.ndarray, spare: Optional[np.ndarray] = None) -> Encoded:
    """bfloat16, ties to even; numbers too large become the largest finite value."""
    finite = bool(np.isfinite(grad).all())
    body = new_body(store(np.nan_to_num(grad, nan=0.0), "bf16"))
    grad.fill(0)
    return Encoded(body, len(grad), finite)


def decode_add_bf16(out: np.ndarray, body: np.ndarray, *, scale: float) -> bool:
    """out += scale · body, in place; returns whether out is finite."""
    return add(out, load(_exactly(body, 2 * len(out)).tobytes(), "bf16"), scale)


def encode_one_bit(
    grad: np.ndarray,
    residual: np.ndarray,
    spare: Optional[np.ndarray] = None,
    *,
    growth: float,
    symmetric: bool,
) -> Encoded:
    """r ← growth·r + g; one bit an element for its sign, 0 counting as positive, decoded to one of
    two numbers a tensor; r keeps the error.

    symmetric: ±Σ|r|/d (EF-SignSGD, Karimireddy et al., ICML 2019); else the means of the two halves
    (1-bit SGD, Seide et al., Interspeech 2014). An element whose new r would be TOO_LARGE or NaN
    becomes growth·r, or keeps its old r where that would be too large; then nothing is sent.
    """
    grown = np.float32(growth) * residual
    advance(residual, grown)
    finite = advance(residual, grown + grad)
    grad.fill(0)
    below = residual < 0
    units = np.zeros(2, np.float32)
    if finite and len(grad):
        wide = residual.astype(np.float64)
        halves = [wide] * 2 if symmetric else [wide[~below], wide[below]]
        units[:] = [np.abs(half).mean() if len(half) else 0 for half in halves]
        units[1] *= -1
    residual -= np.where(below, units[1], units[0])
    return Encoded(new_body(units, pack(below.astype(np.int64), 1, 0)), len(grad), finite)


def decode_add_one_bit(out: np.ndarray, body: np.ndarray, *, scale: float) -> bool:
    """Decodes a body of encode_one_bit and adds it, times scale, to out. Returns whether out is
    finite."""
    n = len(out)
    body = _exactly(body, 8 + 4 * -(-n // 32))
    plus, minus = np.frombuffer(body[:8].tobytes(), np.float32)
    if not (np.isfinite(plus) and np.isfinite(minus)):
        raise ValueError("scale not finite")
    below = unpack(np.frombuffer(body[8:].tobytes(), np.int32), n, 1, 0, 0)
    return add(out, np.where(below, np.float32(scale) * minus, np.float32(scale) * plus), 1.0)


def encode_natural(grad: np.ndarray, spare: Optional[np.ndarray] = None, *, key: int) -> Encoded:
    """Natural compression (Horvath et al., 2019): sign and exponent, rounded to one of the two
    nearest powers of two so that the mean is exact. 0 and powers of two stay the same; numbers
    below 2^-126 become that or 0; 2^127 is the largest."""
    finite = bool(np.isfinite(grad).all())
    bits = grad.view(np.uint32)
    drawn = block_bits(-(-len(grad) // BLOCK), key).reshape(-1)[: len(grad)] >> 9
    exponent = np.minimum(((bits & 0x7FFFFFFF) + drawn) >> 23, 254)
    words = to_columns((bits >> 31 << 8 | exponent).astype(np.int64), 9)
    grad.fill(0)
    return Encoded(new_body(words), len(grad), finite)


def decode_add_natural(out: np.ndarray, body: np.ndarray, *, scale: float) -> bool:
    """Decodes a body of encode_natural and adds it, times scale, to out. Returns whether out is
    finite."""
    n = len(out)
    words = np.frombuffer(_exactly(body, 4 * 9 * columns_of(n)).tobytes(), np.uint32)
    codes = from_columns(words, n, 9).astype(np.uint32)
    return add(out, ((codes & 0x100) << 23 | (codes & 0xFF) << 23).view(np.float32), scale)


def _exactly(body: np.ndarray, size: int) -> np.ndarray:
    if len(body) != size:
        raise ValueError("not of the length that a tensor of this size has")
    return body
