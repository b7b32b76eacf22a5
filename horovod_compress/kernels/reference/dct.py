"""Chunks of a matrix in the discrete cosine transform: the largest coefficients of each, as a
sparse body (DeMo, arXiv 2411.19870).

A flat tensor is a matrix of some columns, cut into chunks of h by w. Coefficients are numbered
chunk by chunk, row by row of chunks, and within a chunk row by row. rows and columns are flat
orthonormal DCT-II matrices of h·h and w·w, a frequency in each row. Every sum is added up in the
order of its terms: all kernels give the same bits.
"""

import math

import numpy as np

from ..encoded import Encoded
from .dense import advance
from .selection import largest_of
from .sparse import code_entries, decode_sparse, encode_sparse

# Of what is left of an element: what was sent must not take it to TOO_LARGE.
_MOST = np.float32(2.0**109)


def encode_dct(
    grad: np.ndarray,
    residual: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    *,
    width: int,
    k: int,
    decay: float,
    scale: float = 1.0,
    kind: str,
) -> Encoded:
    """residual ← decay·residual + scale·grad; the k largest coefficients of each chunk, of equal
    ones the first and none of zeros, are sent as values of `kind`, see code_values; residual ←
    residual − what they decode to. width: the matrix's columns.

    grad is left zero. An element whose new residual would be TOO_LARGE or NaN keeps its old one,
    and then nothing is sent.
    """
    finite = advance(residual, np.float32(decay) * residual + np.float32(scale) * grad)
    grad.fill(0)
    chunks = _chunks(residual, rows, columns, width)
    coefficients = _product(_product(chunks, _square(columns).T), _square(rows), left=True).reshape(
        -1
    )
    size = max(chunks.shape[2] * chunks.shape[3], 1)
    chosen = largest_of(coefficients, k if finite else 0, size)
    indices, values, scales = code_entries(chosen, coefficients, kind)
    touched = np.zeros((*chunks.shape[:2], 1, 1), bool)
    touched.reshape(-1)[indices // size] = True
    left = np.clip(chunks - _decoded(indices, values, chunks.shape, rows, columns), -_MOST, _MOST)
    chunks[...] = np.where(touched, left, chunks)
    return encode_sparse(indices, values, kind=kind, scales=scales)._replace(finite=finite)


def decode_add_dct(
    out: np.ndarray,
    body: np.ndarray,
    rows: np.ndarray,
    columns: np.ndarray,
    *,
    width: int,
    scale: float,
) -> bool:
    """out += scale · what a body of encode_dct decodes to, in chunks that have coefficients. Raises
    ValueError, and changes nothing, for an invalid body. Returns whether the new elements are
    finite."""
    chunks = _chunks(out, rows, columns, width)
    indices, values = decode_sparse(body, numel=out.size)
    chunks += np.float32(scale) * _decoded(indices, values, chunks.shape, rows, columns)
    touched = np.unique(indices // max(chunks.shape[2] * chunks.shape[3], 1))
    return bool(np.isfinite(chunks.reshape(-1, *chunks.shape[2:])[touched]).all())


def _square(matrix: np.ndarray) -> np.ndarray:
    size = math.isqrt(len(matrix))
    if size * size != len(matrix) or not size:
        raise ValueError("the transform of rows and that of columns must be square matrices")
    return matrix.reshape(size, size)


def _chunks(tensor: np.ndarray, rows: np.ndarray, columns: np.ndarray, width: int) -> np.ndarray:
    """A view: chunks in two dimensions, and each chunk's elements in two more."""
    h, w = len(_square(rows)), len(_square(columns))
    if width < 1 or width % w or tensor.size % width or tensor.size // width % h:
        raise ValueError("the tensor must be a matrix of whole chunks")
    return tensor.reshape(tensor.size // width // h, h, width // w, w).swapaxes(1, 2)


def _product(chunks: np.ndarray, matrix: np.ndarray, left: bool = False) -> np.ndarray:
    """chunk · matrix, or matrix · chunk, of each chunk."""
    total = np.zeros_like(chunks)
    for i in range(len(matrix)):
        total += (
            matrix[:, i, None] * chunks[..., i, None, :]
            if left
            else chunks[..., :, i, None] * matrix[i]
        )
    return total


def _decoded(
    indices: np.ndarray, values: np.ndarray, shape: tuple, rows: np.ndarray, columns: np.ndarray
) -> np.ndarray:
    """The chunks that have these coefficients, and no others."""
    coefficients = np.zeros(math.prod(shape), np.float32)
    coefficients[indices] = values
    return _product(
        _product(coefficients.reshape(shape), _square(columns)), _square(rows).T, left=True
    )
