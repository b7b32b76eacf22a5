"""Accumulation with momentum, and the choice of the largest entries: what kernels/native/select.hpp does, on a device.

1. `sample` shows what v is about to become at the elements that the native kernel samples too, and the floor is of the same rank among them.
2. `advance` advances u and v, zeroes the gradient, and counts the elements of each block that reach the floor.
3. The sums of those counts say where each block's candidates belong, and `collect` writes them there, in the order of their indices.
4. Of the candidates the k largest are chosen, of equal ones the first. They come to the host, with what v and u hold there, in one copy, and
   nothing waits for the device before.
5. Where fewer than 0.8·k reach the floor, or more than there is room for, which that copy says too, v is searched as a whole. The native kernel
   finds the same: of fewer it takes all from 0 on, and of more the k largest.
"""
import math
from typing import List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from .. import host
from ..encoded import Encoded
from . import programs
from .array import DeviceArray
from .dense import peaks_beside, same_length

_MARGIN = 2  # standard deviations; decides what is sent, as kSampleMargin in native/tuning.hpp does
_ROOM, _LEAST_ROOM = 4, 4096  # for candidates: times k, and at least
_NOTHING = 2**31 - 1  # a floor above every magnitude


class _Update(NamedTuple):
    """The operands of one tensor's update; where there is no momentum, u is v, and not used, and so is the gradient as base where that is zero."""

    grad: torch.Tensor
    base: torch.Tensor
    u: torch.Tensor
    v: torch.Tensor
    momentum: float
    scale: float
    kind: int
    based: bool


class _Entries(NamedTuple):
    """What was chosen, on the host: ascending indices, uint32; rows of what the states that were asked for hold there; whether every new v was
    finite."""

    indices: np.ndarray
    rows: np.ndarray
    finite: bool


def add_to_residual(
    grad: DeviceArray, u: Optional[DeviceArray], v: DeviceArray, *, base: Optional[DeviceArray] = None, momentum: float = 0.0,
    nesterov: bool = False, scale: float = 1.0, k: int = 0, samples: int = 0, offset: int = 0, chunk: int = 0,
) -> Tuple[np.ndarray, bool]:
    """As the native kernel, with its choice; the indices are on the host. ValueError for arrays of different lengths, and for more than 2^31 - 1
    elements."""
    entries = _chosen(_update(grad, u, v, base, momentum, nesterov, scale), k, samples, offset, chunk, [])
    return entries.indices, entries.finite


def take_entries(
    indices: np.ndarray, v: DeviceArray, u: Optional[DeviceArray], *, kind: str, mask: bool
) -> Tuple[np.ndarray, np.ndarray, np.ndarray, Sequence[float]]:
    """As `kernels.reference.take_entries`; indices, rows and values are on the host."""
    states = _states(v, u, mask)
    rows = np.stack([np.asarray(state[indices]) for state in states])
    return _take(_Entries(indices, rows, True), states, kind)


def encode_topk(
    grad: DeviceArray, u: Optional[DeviceArray], v: DeviceArray, *, base: Optional[DeviceArray] = None, momentum: float = 0.0,
    nesterov: bool = False, scale: float = 1.0, k: int, samples: int, offset: int, chunk: int = 0, kind: str, mask: bool = False,
) -> Encoded:
    """As `kernels.reference.encode_topk`, with the native kernel's choice. The body is made on the host."""
    states = _states(v, u, mask)
    update = _update(grad, u, v, base, momentum, nesterov, scale)
    entries = _chosen(update, k, samples, offset, chunk, [state.tensor for state in states])
    if not entries.finite:
        entries = _Entries(entries.indices[:0], entries.rows[:, :0], False)
    indices, rows, values, scales = _take(entries, states, kind)
    return host.encode_sparse(indices, values, kind=kind, scales=scales)._replace(finite=entries.finite, undo=(indices, rows))


def within_limits(array: DeviceArray) -> None:
    """ValueError for more elements than indices on a device reach."""
    if array.size >= 2**31:
        raise ValueError("a tensor on a device has at most 2^31 - 1 elements")


def _states(v: DeviceArray, u: Optional[DeviceArray], mask: bool) -> List[DeviceArray]:
    """What entries are taken out of."""
    return [v] if u is None or not mask else [v, u]


def _take(entries: _Entries, states: List[DeviceArray], kind: str) -> Tuple[np.ndarray, np.ndarray, np.ndarray, Sequence[float]]:
    """The host codes the entries, as if they were the whole tensor; v then keeps the error there, and u becomes 0."""
    error = entries.rows[0].copy()
    places, _, values, scales = host.take_entries(np.arange(len(error), dtype=np.uint32), error, None, kind=kind, mask=False)
    indices, rows = entries.indices[places], entries.rows[:, places]
    for state, left in zip(states, (error[places], np.float32(0))):
        state[indices] = left
    return indices, rows, values, scales


def _update(
    grad: DeviceArray, u: Optional[DeviceArray], v: DeviceArray, base: Optional[DeviceArray], momentum: float, nesterov: bool, scale: float
) -> _Update:
    same_length(grad=grad, v=v, **{name: array for name, array in (("u", u), ("base", base)) if array is not None})
    within_limits(grad)
    kind = programs.NONE if u is None else programs.NESTEROV if nesterov else programs.VANILLA
    counted_from, moving = grad if base is None else base, v if u is None else u
    return _Update(grad.tensor, counted_from.tensor, moving.tensor, v.tensor, momentum, scale, kind, base is not None)


def _chosen(t: _Update, k: int, samples: int, offset: int, chunk: int, states: List[torch.Tensor]) -> _Entries:
    """Advances, and chooses at most k; with `chunk` exactly the k largest of each chunk."""
    numel, sampled = t.v.numel(), k > 0 and not chunk
    floor = _sampled_floor(t, k, samples, offset) if sampled else t.v.new_full((1,), _NOTHING, dtype=torch.int32)
    counts, peaks = t.v.new_empty(programs.blocks_of(numel), dtype=torch.int32), peaks_beside(t.v, numel)
    operands = t.grad, t.base, t.u, t.v
    programs.launch(programs.advance, numel, *operands, floor, counts, peaks, t.momentum, t.scale, KIND=t.kind, BASED=t.based)
    if sampled:
        room = min(numel, max(_ROOM * k, _LEAST_ROOM))
        reached, count, chosen = _of_candidates(t.v, floor, counts, k, room)
        (peak, found, least, kept), indices, rows = _on_host([peaks.max(), reached, floor[0], count], chosen, states)
        if found <= room and (5 * found >= 4 * k or least == 1):
            return _Entries(indices[:kept], rows[:, :kept], peak < programs.TOO_LARGE)
    chosen = _of_all(t.v, k, chunk or numel) if k else t.v.new_empty(0, dtype=torch.int64)
    (peak,), indices, rows = _on_host([peaks.max()], chosen, states)
    return _Entries(indices, rows, peak < programs.TOO_LARGE)


def _on_host(facts: List[torch.Tensor], chosen: torch.Tensor, states: List[torch.Tensor]) -> Tuple[List[int], np.ndarray, np.ndarray]:
    """The numbers, the indices, and rows of what the states hold there, in one copy."""
    held = [state[chosen].view(torch.int32) for state in states]
    numbers, indices, rows = np.split(torch.cat([torch.stack(facts), chosen.int(), *held]).cpu().numpy(), [len(facts), len(facts) + len(chosen)])
    return numbers.tolist(), indices.view(np.uint32), rows.view(np.float32).reshape(len(states), len(chosen))


def _sampled_floor(t: _Update, k: int, samples: int, offset: int) -> torch.Tensor:
    """A magnitude, as bits, that somewhat more than k will reach, or where that is unknown 1; the same as sampled_floor of the native kernel has."""
    numel, stretch = t.v.numel(), programs.SAMPLED
    stretches = numel // stretch
    wanted = min(stretches, -(-samples // stretch))
    expected = k * (wanted * stretch) / numel
    rank = int(expected + _MARGIN * math.sqrt(expected) + 2)
    if rank >= wanted * stretch:
        return t.v.new_ones(1, dtype=torch.int32)
    stride = stretches // wanted
    magnitudes = t.v.new_empty(wanted * stretch, dtype=torch.int32)
    programs.launch(
        programs.sample, len(magnitudes), t.grad, t.base, t.u, t.v, magnitudes, t.momentum, t.scale, stride, offset % stride,
        KIND=t.kind, BASED=t.based,
    )
    largest = magnitudes.topk(rank + 1).values
    return torch.where(largest[rank:] > 0, largest[rank - 1 : rank], 1)


def _of_candidates(
    v: torch.Tensor, floor: torch.Tensor, counts: torch.Tensor, k: int, room: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many elements reach the floor, how many of these are chosen, at most k, and k indices, the first of which are of those that are."""
    ends = counts.cumsum(0, dtype=torch.int32)
    indices, magnitudes = v.new_zeros((2, room), dtype=torch.int32)
    programs.launch(programs.collect, v.numel(), v, floor, counts, ends, indices, magnitudes, room)
    largest = _largest(magnitudes[None], k)[0]
    places = torch.where(largest, largest.cumsum(0) - 1, k)  # All that are not chosen share the place after the last.
    chosen = indices.new_zeros(k + 1).scatter_(0, places, indices)[:k].long()
    return ends[-1], largest.sum(dtype=torch.int32), chosen


def _of_all(v: torch.Tensor, k: int, chunk: int) -> torch.Tensor:
    """Indices of exactly the k largest of each chunk, of equal ones the first, and none of zeros."""
    chunks = -(-v.numel() // chunk)
    magnitudes = v.new_zeros(chunks * chunk, dtype=torch.int32)
    torch.bitwise_and(v.view(torch.int32), 0x7FFFFFFF, out=magnitudes[: v.numel()])
    return _largest(magnitudes.view(chunks, chunk), k).view(-1).nonzero().view(-1)


def _largest(magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    """For each row, where its k largest are, of equal ones the first, and no zeros."""
    least = magnitudes.topk(k, dim=1).values[:, -1:]
    above, equal = magnitudes > least, (magnitudes == least) & (magnitudes > 0)
    return above | equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True))
