"""Operations on whole tensors: norms, finiteness, momentum after averaging, adding entries; and the
mode for denormal numbers."""

import math
from typing import Optional, Sequence, Tuple, Union

import numpy as np

Float = Union[float, np.floating]
# Residuals stay below, because otherwise sums of many would stay infinite for ever.
TOO_LARGE = 2.0**110


def max_abs(x: np.ndarray) -> float:
    """max |x| as a float; infinity where anything is infinite or NaN, 0 for no elements."""
    peak = np.abs(x).max(initial=0)
    return float(peak) if np.isfinite(peak) else float("inf")


def norms(x: np.ndarray, peaks: Optional[np.ndarray] = None, *, l2: bool) -> np.ndarray:
    """An array of one number: max |x|, or with l2 ‖x‖₂; infinity where anything is infinite or NaN.
    peaks: uint32 for the bits of the largest magnitude of each 64 elements."""
    if peaks is not None:
        if len(peaks) != -(-len(x) // 64):
            raise ValueError("peaks, one for 64 elements, and x must have the same length")
        bits = np.abs(x).view(np.uint32)
        peaks[...] = np.maximum.reduceat(bits, np.arange(0, len(x), 64)) if len(x) else 0
    norm = math.sqrt(squared_norm(x)) if l2 else max_abs(x)
    return np.array([norm if math.isfinite(norm) else math.inf], np.float32)


def max_abs_and_deviation(x: np.ndarray) -> Tuple[float, float]:
    """(max |x|, standard deviation), as floats. Where anything is infinite or NaN the former is
    infinity, and the latter is meaningless."""
    return max_abs(x), float((x.astype(np.float64) - x[0]).std()) if len(x) else 0.0


def advance(residual: np.ndarray, moved: np.ndarray) -> bool:
    """residual ← moved where that is neither TOO_LARGE nor NaN. Returns whether it was everywhere.
    A part of other kernels, and none itself."""
    finite = np.abs(moved) < TOO_LARGE
    residual[...] = np.where(finite, moved, residual)
    return bool(finite.all())


def add(out: np.ndarray, values: np.ndarray, scale: float) -> bool:
    """out += scale·values, in place. Returns whether out is finite. A part of other kernels."""
    out += np.float32(scale) * values
    return bool(np.isfinite(out).all())


def squared_norm(x: np.ndarray) -> float:
    """Σ x², in float64."""
    x = x.astype(np.float64)
    return float(np.dot(x, x))


def apply_momentum(
    out: np.ndarray, u: np.ndarray, new_u: np.ndarray, *, momentum: float, nesterov: bool
) -> bool:
    """new_u ← m·u + out, then out ← new_u, or out + m·new_u for Nesterov. Where `out` is not finite
    everywhere, nothing is written. Returns whether out, before and after, and new_u are finite."""
    if not np.isfinite(out).all():
        return False
    m = np.float32(momentum)
    np.multiply(m, u, out=new_u)
    new_u += out
    out[...] = out + m * new_u if nesterov else new_u
    return bool(np.isfinite(new_u).all() and np.isfinite(out).all())


def scatter_add(out: np.ndarray, indices: np.ndarray, values: np.ndarray, *, scale: float) -> bool:
    """out[indices] += scale·values, in place; indices do not repeat. Returns whether the new
    elements are finite."""
    out[indices] += np.float32(scale) * values
    return bool(np.isfinite(out[indices]).all())


def move(x: np.ndarray, out: np.ndarray, *, scale: float) -> None:
    """out ← scale·x, then x ← 0."""
    np.multiply(x, np.float32(scale), out=out)
    x.fill(0)


def add_up(out: np.ndarray, parts: Sequence[np.ndarray]) -> None:
    """out ← parts[0] + parts[1] + …, in this order. There is one part at least."""
    if not parts or any(len(part) != len(out) for part in parts):
        raise ValueError(
            "out and every part, of which there is one at least, must have the same length"
        )
    out[...] = parts[0]
    for part in parts[1:]:
        out += part


def flush_denormals(*, mode: int) -> int:
    """Sets the CPU mode by which this thread treats denormal numbers as 0, and returns the mode
    before.

    Mode 0 keeps denormal numbers, which small float16 numbers become in conversions. NumPy cannot
    change the mode, so this does nothing.
    """
    return mode
