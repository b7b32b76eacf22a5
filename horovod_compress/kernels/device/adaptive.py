"""Variance-based compression and AdaComp on a device: each element, or each bin of them, decides by itself whether it is sent.

One pass advances the states and marks what is sent, a byte an element. `collect_marked` writes the indices of what is marked, in order, once the
host knows how many those are, and they come to the host with what the states hold there. AdaComp's marks depend on its bins' largest, which a pass
over whole bins finds before.
"""
from typing import Any, List, Optional, Tuple

import numpy as np
import torch

from .. import host
from ..encoded import Encoded
from . import programs
from .array import DeviceArray
from .dense import same_length
from .selection import within_limits


def encode_variance(
    grad: DeviceArray, squares: Any, r: DeviceArray, v: DeviceArray, spare: Optional[np.ndarray] = None, *,
    alpha: float, zeta: float, tau: float, error_feedback: bool,
) -> Encoded:
    """As `kernels.reference.encode_variance`; squares may be on the host, and what was sent is coded there. `spare` is not used."""
    given = grad if squares is None else grad.beside(squares)
    same_length(grad=grad, r=r, v=v, squares=given)
    within_limits(grad)
    numel, tensor = grad.size, grad.tensor
    marks, counts, peaks = _memory_of_marks(tensor)
    programs.launch(
        programs.accumulate_variance, numel, tensor, given.tensor, r.tensor, v.tensor, marks, counts, peaks, alpha, zeta, tau,
        GIVEN=squares is not None, BLOCK=programs.MARK_BLOCK,
    )
    ends = counts.cumsum(0, dtype=torch.int32)
    peak, count = torch.stack([peaks.max(), ends[-1]]).tolist()
    finite = peak < programs.INFINITY
    indices, (old_r, old_v) = _marked(marks, counts, ends, count if finite else 0, [r.tensor, v.tensor])
    limit = np.float32(tau)
    if limit > 0:
        values, scales, kind = np.copysign(limit, old_r), [limit], "sign"
        left = np.maximum(old_v - 2 * np.abs(old_r) * limit + limit * limit, 0)
    else:
        error, kind = old_r.copy(), "power"
        places, _, values, scales = host.take_entries(np.arange(len(error), dtype=np.uint32), error, None, kind=kind, mask=False)
        indices, old_r, old_v, left = indices[places], old_r[places], old_v[places], np.float32(0)
    r[indices] = old_r - values if limit > 0 or error_feedback else np.float32(0)
    v[indices] = left
    return host.encode_sparse(indices, values, kind=kind, scales=scales)._replace(finite=finite, undo=(indices, np.stack([old_r, old_v])))


def encode_adacomp(
    grad: DeviceArray, residual: DeviceArray, sent: np.ndarray, *, sent_scale: float, bin_length: int, scale_factor: float
) -> Encoded:
    """As `kernels.reference.encode_adacomp`; `sent` and the body are on the host. The sum of the bins' largest is the same to rounding of float64. A
    bin is one block's work, so that few bins of millions of elements leave a device idle."""
    same_length(grad=grad, residual=residual)
    within_limits(grad)
    if len(sent) and sent.max() >= residual.size:
        raise ValueError("index outside the tensor")
    residual[sent] -= np.copysign(np.float32(sent_scale), residual[sent])
    numel, tensor = grad.size, grad.tensor
    length = min(bin_length, max(numel, 1))
    bins = -(-numel // length)
    width = 1 << min(length - 1, programs.MARK_BLOCK - 1).bit_length()
    together = programs.MARK_BLOCK // width
    marks, counts, _ = _memory_of_marks(tensor)
    maxima, peaks = tensor.new_empty(bins), tensor.new_zeros(bins // together + 2, dtype=torch.int32)
    programs.launch(programs.accumulate_bins, bins, tensor, residual.tensor, maxima, peaks, numel, length, WIDTH=width, BLOCK=together)
    programs.launch(programs.mark_bins, numel, tensor, residual.tensor, maxima, marks, counts, scale_factor - 1, length, BLOCK=programs.MARK_BLOCK)
    ends, total = counts.cumsum(0, dtype=torch.int32), maxima.sum(dtype=torch.float64)
    peak, count, bits = torch.stack([peaks.max(), ends[-1], total.view(torch.int64)]).tolist()
    scale = np.float32(np.int64(bits).view(np.float64) / max(bins, 1))
    finite = peak < programs.TOO_LARGE
    indices, (held,) = _marked(marks, counts, ends, count if finite and scale else 0, [residual.tensor])
    encoded = host.encode_sparse(indices, np.copysign(scale, held), kind="sign", scales=[scale])
    return encoded._replace(finite=finite, undo=(indices, float(scale)))


def _memory_of_marks(tensor: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For a mark for each element, a count for each block, and a largest magnitude; one more of both, which is 0."""
    counts, peaks = tensor.new_zeros((2, -(-tensor.numel() // programs.MARK_BLOCK) + 1), dtype=torch.int32)
    return torch.empty_like(tensor, dtype=torch.int8), counts, peaks


def _marked(
    marks: torch.Tensor, counts: torch.Tensor, ends: torch.Tensor, count: int, states: List[torch.Tensor]
) -> Tuple[np.ndarray, np.ndarray]:
    """On the host, indices of the `count` marked elements, uint32, ascending, and rows of what the states hold there; in one copy."""
    indices = marks.new_empty(count, dtype=torch.int32)
    if count:
        programs.launch(programs.collect_marked, marks.numel(), marks, counts, ends, indices, BLOCK=programs.MARK_BLOCK)
    held = [state[indices.long()].view(torch.int32) for state in states]
    rows = torch.stack([indices, *held]).cpu().numpy()
    return rows[0].view(np.uint32), rows[1:].view(np.float32)
