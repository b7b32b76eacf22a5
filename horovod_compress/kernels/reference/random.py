"""Randomness from counters, where any place of any stream can be computed alone; and rounding at
random."""

import numpy as np

_NEXT = 0xFAF2BB1D


def random_bits(*, key: int, n: int) -> np.ndarray:
    """The first n uint32 numbers of the stream of a 64-bit key."""
    x: np.ndarray = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x += np.uint32(key & 0xFFFFFFFF)
    x ^= x >> 16
    x *= np.uint32(0x85EBCA6B)
    x ^= (x >> 13) ^ np.uint32(key >> 32)
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def next_bits(bits: np.ndarray, count: int) -> np.ndarray:
    """Rows of random bits for `count` codes that share a draw. Each row is the one before times a
    constant."""
    powers = [pow(_NEXT, i, 2**32) for i in range(count)]
    return bits * np.array(powers, np.uint32)[:, None]


def draw_coordinates(*, key: int, numel: int, first: int, count: int) -> np.ndarray:
    """Elements first … first+count-1, uint32, of a permutation of 0 … numel-1 that follows from a
    64-bit key."""
    if count > numel or first > numel - count:
        raise ValueError("more coordinates than elements")
    bits = max(numel - 1, 0).bit_length()
    mask, shift = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
    draws = random_bits(key=key, n=8).astype(np.uint64)
    x = np.arange(first, first + count, dtype=np.uint64)
    outside = np.ones(count, bool)
    while outside.any():
        y = x[outside]
        for times, plus in zip(draws[::2] | np.uint64(1), draws[1::2]):
            y = (y * times + plus) & mask
            y ^= y >> shift
        x[outside] = y
        outside = x >= numel
    return x.astype(np.uint32)


def one_of(largest: float) -> int:
    """The fixed-point 1 of `round_at_random`: 2^30 over the power of two above the largest step."""
    return 2 ** (30 - int(largest).bit_length())


def round_at_random(y: np.ndarray, bits: np.ndarray, largest: float) -> np.ndarray:
    """int64 codes ⌊y⌋ + Bernoulli(y − ⌊y⌋), at most `largest` in magnitude. y: float32 in units of
    1/one_of(largest), of which fractions are cut off; bits: uint32 random bits."""
    one = one_of(largest)
    most = np.float32(largest) * np.float32(one)
    fixed = np.clip(y, -most, most).astype(np.int64)
    return (
        fixed + (bits >> np.uint32(33 - one.bit_length())).astype(np.int64) >> one.bit_length() - 1
    )
