"""Operations on whole tensors: norms, finiteness, momentum after averaging."""
from typing import Optional

import numpy as np
import torch

from . import programs
from .array import DeviceArray


def max_abs(x: DeviceArray, peaks: Optional[np.ndarray] = None) -> float:
    """max |x|; infinity where anything is infinite or NaN, 0 for no elements. `peaks`, which save the host a pass, are not filled."""
    largest = float(torch.linalg.vector_norm(x.tensor, float("inf"))) if x.size else 0.0
    return largest if largest == largest else float("inf")


def squared_norm(x: DeviceArray) -> float:
    """Σ x², in float64, to rounding what the host's kernels find."""
    return float(torch.linalg.vector_norm(x.tensor, dtype=torch.float64)) ** 2


def apply_momentum(out: DeviceArray, u: DeviceArray, new_u: DeviceArray, *, momentum: float, nesterov: bool) -> bool:
    """new_u ← m·u + out, then out ← new_u, or out + m·new_u for Nesterov. Where `out` is not finite everywhere, nothing is written. Returns whether
    out, before and after, and new_u are finite. ValueError where lengths differ."""
    same_length(out=out, u=u, new_u=new_u)
    if max_abs(out) == float("inf"):
        return False
    peaks = peaks_beside(out.tensor, out.size)
    programs.launch(programs.average_momentum, out.size, out.tensor, u.tensor, new_u.tensor, peaks, momentum, NESTEROV=nesterov)
    return are_finite(peaks)


def peaks_beside(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    """Memory for the largest magnitude of each block of `numel` elements, as bits; one more, which is 0."""
    return tensor.new_zeros(programs.blocks_of(numel) + 1, dtype=torch.int32)


def largest_of(peaks: torch.Tensor) -> float:
    """The largest of these magnitudes, infinity for NaN; waits for the device."""
    return float(np.int32(min(int(peaks.max()), programs.INFINITY)).view(np.float32))


def are_finite(peaks: torch.Tensor) -> bool:
    """Whether these magnitudes are of finite numbers; waits for the device."""
    return int(peaks.max()) < programs.INFINITY


def same_length(**arrays: DeviceArray) -> None:
    """ValueError where arrays differ in length."""
    if len({array.size for array in arrays.values()}) > 1:
        raise ValueError(f"{', '.join(arrays)} must have the same length, not {[array.size for array in arrays.values()]}")
