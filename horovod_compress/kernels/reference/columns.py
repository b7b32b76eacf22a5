"""Codes of any width packed without free bits, for payloads whose words need not add up.

A block of 512 elements is 32 rows of 16 columns; the last block has ⌈count/32⌉ columns. Element
r·columns + c of a block stands in row r of column c. The codes of a column, `width` bits each,
follow each other, lowest bits first, in `width` uint32 words. Word k of column c lies at
k·columns + c of the block's.
"""

import numpy as np

from .random import next_bits, random_bits

BLOCK, _ROWS, _DRAWS = 512, 32, 64


def to_columns(codes: np.ndarray, width: int, offset: int = 0) -> np.ndarray:
    """uint32 words of int64 codes + offset."""
    blocks = (codes[first : first + BLOCK] for first in range(0, len(codes), BLOCK))
    return np.concatenate(
        [np.empty(0, np.uint32), *(_put(block, width, offset) for block in blocks)]
    )


def from_columns(words: np.ndarray, count: int, width: int, offset: int = 0) -> np.ndarray:
    """int64 codes, from words of codes + offset."""
    counts = [min(BLOCK, count - first) for first in range(0, count, BLOCK)]
    blocks = np.split(words, np.cumsum([columns_of(its) * width for its in counts]))
    codes = [_take(block, its, width) for block, its in zip(blocks, counts)]
    return np.concatenate([np.empty(0, np.int64), *codes]) - offset


def columns_of(count: int) -> int:
    return -(-count // _ROWS)


def block_bits(count: int, key: int) -> np.ndarray:
    """A row of 512 random bits for each of `count` blocks: elements 64 apart share a draw."""
    drawn = random_bits(key=key, n=count * _DRAWS)
    return (
        next_bits(drawn, BLOCK // _DRAWS)
        .reshape(BLOCK // _DRAWS, count, _DRAWS)
        .swapaxes(0, 1)
        .reshape(count, BLOCK)
    )


def _put(codes: np.ndarray, width: int, offset: int) -> np.ndarray:
    columns = columns_of(len(codes))
    padded = np.zeros(_ROWS * columns, np.int64)
    padded[: len(codes)] = codes
    bits = (padded + offset).reshape(_ROWS, 1, columns) >> np.arange(width)[:, None] & 1
    words = bits.reshape(width, 32, columns) << np.arange(32)[:, None]
    return words.sum(axis=1).astype(np.uint32).reshape(-1)


def _take(words: np.ndarray, count: int, width: int) -> np.ndarray:
    columns = columns_of(count)
    bits = words.astype(np.int64).reshape(width, 1, columns) >> np.arange(32)[:, None] & 1
    codes = bits.reshape(_ROWS, width, columns) << np.arange(width)[:, None]
    return codes.sum(axis=1).reshape(-1)[:count]
