"""Integer codes that many ranks can add up in one word.

Codes of `width` bits lie side by side in words, int32, or int64 where those hold over a tenth more.
Elements go to words by blocks of 64 words: the first fields of a block's words come first, then the
second …. Codes are signed and borrow from the field above, so the sum of the ranks' words is the
word of the sums. A field must hold 2·(ranks · largest code) + 1 values.

w, an array of one number, is the largest norm of all ranks. Where it is not finite, some rank's
gradient is not: all codes are 0 then, and what is decoded is NaN.

The native functions write into `spare`, an earlier step's words, where it is given.
"""

from typing import Optional, Sequence, Tuple, Union

import numpy as np

from .random import next_bits, one_of, random_bits, round_at_random

BLOCK = 64  # words, part of the wire format
Steps = Union[Sequence[float], np.ndarray]


def quantize(
    x: np.ndarray,
    levels: Optional[np.ndarray],
    spare: Optional[np.ndarray] = None,
    *,
    w: np.ndarray,
    clip: float,
    steps: Steps,
    width: int,
    size: int,
    key: int,
) -> np.ndarray:
    """Words of the codes sign(x)·(⌊y⌋ + Bernoulli(y − ⌊y⌋)), y = |x|/w·s, at most steps[0] (arXiv
    2109.12497).

    With one scale, s is steps[0], and |x| counts as at most `clip` and w. With more, s is that of
    the finest scale that fits an element's code on all `size` ranks, and no |x| may be above w.
    `levels` are the ranks' summed words of `encode_scales`, those of x included. With w = 0 all
    codes are 0.
    """
    levels = _finest(levels, len(x), len(steps), size)
    steps = np.asarray(steps, np.float32)
    x, before, factor = _scaled(x, w, steps)
    y = x * before * factor[levels]
    if len(steps) == 1:
        most = np.float32(clip) * before * factor[0]
        y = np.clip(y, -most, most)
    return pack(round_at_random(y, field_bits(len(x), width, key), steps[0]), width, 0)


def dequantize(
    words: np.ndarray,
    levels: Optional[np.ndarray],
    out: np.ndarray,
    *,
    w: np.ndarray,
    steps: Steps,
    width: int,
    size: int,
    scale: float,
) -> bool:
    """out = (sum of `size` ranks' codes) · w/s · scale. levels are those that the codes were
    quantized with. Returns whether out is finite, and w, where there are no elements either."""
    levels = _finest(levels, len(out), len(steps), size)
    unit = (w / np.asarray(steps, np.float64) * scale).astype(np.float32)
    codes = unpack(words, len(out), width, 0, size * int(steps[0])).astype(np.float32)
    finite = bool(np.isfinite(w).all() and np.isfinite(scale))
    out[...] = codes * unit[levels] if finite else np.nan
    return finite and bool(np.isfinite(out).all())


def encode_scales(
    x: np.ndarray,
    peaks: np.ndarray,
    spare: Optional[np.ndarray] = None,
    *,
    w: np.ndarray,
    steps: Steps,
    size: int,
) -> np.ndarray:
    """Words with a 1 for each scale l ≥ 1 and each element whose code at steps[l] is at most
    steps[0]. Words of `size` ranks add up.

    peaks: for each 64 elements, an upper bound of the magnitudes' bits, so that not all of x must
    be read.
    """
    if len(peaks) != -(-len(x) // 64):
        raise ValueError("peaks, one for 64 elements, and x must have the same length")
    steps = np.asarray(steps, np.float32)
    x, before, factor = _scaled(x, w, steps)
    fits = [
        np.abs(x * before * each) <= steps[0] * np.float32(one_of(steps[0])) for each in factor[1:]
    ]
    words = [pack(each.astype(np.int64), size.bit_length(), 1) for each in fits]
    return np.concatenate(words) if words else pack(np.empty(0, np.int64), size.bit_length(), 1)


def encode_signs(x: np.ndarray, spare: Optional[np.ndarray] = None, *, width: int) -> np.ndarray:
    """Words of sign(x), 0 for 0, and one word more, 0, for the compressor's use."""
    words = pack(np.sign(x).astype(np.int64), width, 0)
    return np.append(words, words.dtype.type(0))


def decode_signs(words: np.ndarray, out: np.ndarray, *, width: int, size: int, unit: float) -> None:
    """out = unit · the sign of the sum of `size` ranks' signs; 0 where they tie."""
    out[...] = np.sign(unpack(words[:-1], len(out), width, 0, size)) * np.float32(unit)


def _finest(levels: Optional[np.ndarray], n: int, scales: int, size: int) -> np.ndarray:
    """Each element's scale, from words of `encode_scales`."""
    finest = np.zeros(n, np.intp)
    for scale, words in enumerate(
        () if levels is None or scales == 1 else levels.reshape(scales - 1, -1), 1
    ):
        finest[unpack(words, n, size.bit_length(), 1, 0) == size] = scale
    return finest


def _scaled(
    x: np.ndarray, w: np.ndarray, steps: np.ndarray
) -> Tuple[np.ndarray, np.float32, np.ndarray]:
    """x, as zeros where w is not finite, and two factors from it to steps in units of
    1/one_of(steps[0]), in range even where w is denormal or huge. In the first scale w itself
    becomes at most steps[0]."""
    (w,) = w
    if not 0 < w < np.inf:
        return x if w == 0 else np.zeros_like(x), np.float32(1), np.zeros_like(steps)
    before = np.ldexp(np.float32(1), -int(np.clip(np.frexp(w)[1] - 1, -120, 120)))
    one = np.float32(one_of(steps[0]))
    factor = steps / (w * before) * one
    if w * before * factor[0] > steps[0] * one:
        factor[0] = np.nextafter(factor[0], np.float32(0))
    return x, before, factor


def word_dtype(width: int, spare: int = 0) -> np.dtype:
    """The type of words whose fields have `width` bits: int32, or int64 where that holds over a
    tenth more fields. `spare` bits at the top of a word stay free."""
    return np.dtype(
        np.int64 if 10 * ((64 - spare) // width) > 22 * ((32 - spare) // width) else np.int32
    )


def shape_of(n: int, width: int, spare: int) -> Tuple[int, int, np.dtype]:
    """(fields, words, dtype); `spare` bits at the top of a word stay free."""
    signed = word_dtype(width, spare)
    fields = (8 * signed.itemsize - spare) // width
    return fields, -(-n // fields), np.dtype(f"u{signed.name}")


def _by_field(codes: np.ndarray, fields: int, words: int) -> np.ndarray:
    """Codes of each word, a column of `fields` rows. Fields beyond the last element are 0."""
    padded = np.zeros(fields * words, codes.dtype)
    padded[: len(codes)] = codes
    whole = len(codes) // (fields * BLOCK) * fields * BLOCK
    blocks = padded[:whole].reshape(-1, fields, BLOCK).swapaxes(0, 1).reshape(fields, -1)
    return np.hstack([blocks, padded[whole:].reshape(fields, -1)])


def _by_element(fielded: np.ndarray, n: int) -> np.ndarray:
    """The inverse of `_by_field` for n elements."""
    fields = len(fielded)
    whole = n // (fields * BLOCK) * BLOCK
    blocks = fielded[:, :whole].reshape(fields, -1, BLOCK).swapaxes(0, 1)
    return np.concatenate([blocks.reshape(-1), fielded[:, whole:].reshape(-1)])[:n]


def field_bits(n: int, width: int, key: int) -> np.ndarray:
    """Random bits of each element; the fields of a word share a draw."""
    fields, words, _ = shape_of(n, width, 0)
    return _by_element(next_bits(random_bits(key=key, n=words), fields), n)


def pack(codes: np.ndarray, width: int, spare: int) -> np.ndarray:
    """Words of int64 codes."""
    fields, count, dtype = shape_of(len(codes), width, spare)
    shifts = np.arange(fields, dtype=dtype)[:, None] * dtype.type(width)
    words = (_by_field(codes.astype(dtype), fields, count) << shifts).sum(axis=0, dtype=dtype)
    return words.view(dtype.str.replace("u", "i"))


def unpack(words: np.ndarray, n: int, width: int, spare: int, offset: int) -> np.ndarray:
    """The n sums in words, as int64. `offset` is the largest magnitude of a sum, and 0 where sums
    are not signed."""
    fields, count, dtype = shape_of(n, width, spare)
    if len(words) != count:
        raise ValueError("words, for as many elements, must have the same length")
    offsets = sum(offset << field * width for field in range(fields)) & int(np.iinfo(dtype).max)
    shifts = np.arange(fields, dtype=dtype)[:, None] * dtype.type(width)
    fielded = (words.view(dtype) + dtype.type(offsets)) >> shifts & dtype.type((1 << width) - 1)
    return _by_element(fielded, n).astype(np.int64) - offset
