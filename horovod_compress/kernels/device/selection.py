"""Accumulation with momentum, and the choice of the largest entries: what kernels/native/select.hpp
does, on a device, for many tensors at once.

1. `advance` advances u and v, zeroes the gradient, and keeps and counts the largest magnitude of
each line of 32 elements.
2. `narrow`, three times, and `count` find the k-th magnitude of each tensor to the last bit, by
counting what has 11, 10 and 10 more of its bits. They read only lines whose maximum may reach it.
3. The sums of blocks' counts say where entries belong, and `collect` writes them there, in the
order of their indices, of equal ones the first. They come to the CPU, with what v and u hold there,
in one copy, and nothing waits for the device before.
4. The CPU codes the entries. `put` writes what they leave in v and u.
"""

import functools
from typing import Any, Callable, List, NamedTuple, Sequence, Tuple

import numpy as np
import torch

from .. import cpu
from ..encoded import Encoded
from ..lists import Late, in_groups, then
from . import launches
from .array import DeviceArray
from .entries import Frame, payloads_of, put
from .programs import selection as programs
from .shared import kernel, same_length, starts_of, within_limits

# Lines of a tile.
_TILE = launches.BLOCK // programs.LINE


class _Entries(NamedTuple):
    """The entries chosen of a tensor, on the CPU: ascending indices, uint32; rows of what the
    states hold there; whether every new v was finite."""

    indices: np.ndarray
    rows: np.ndarray
    finite: bool


def _states(call: Any) -> List[DeviceArray]:
    """The arrays that entries are taken out of."""
    return [call.v] if call.u is None or not call.masked else [call.v, call.u]


def _momentum_of(call: Any) -> Tuple[int, bool]:
    """The kind of momentum, and whether the gradient counts from a base."""
    given = programs.NESTEROV if call.nesterov else programs.VANILLA
    return programs.NONE if call.u is None else given, call.base is not None


def _advanced(
    calls: List[Any], *columns: Sequence[int]
) -> Tuple[List[launches.Row], torch.Tensor, torch.Tensor]:
    """Advances u and v. Returns a table of the programs that follow, which has the columns besides,
    the tensors' bins, and the largest magnitudes of lines."""
    device, (kind, based) = calls[0].v.device, _momentum_of(calls[0])
    for call in calls:
        same_length(grad=call.grad, v=call.v, u=call.u, base=call.base)
        within_limits(call.grad)
    *lines, of_lines = starts_of([-(-call.v.size // programs.LINE) for call in calls])
    table = [
        (
            call.v.size,
            call.grad.tensor,
            # Not used where there are none.
            (call.base if based else call.grad).tensor,
            (call.v if call.u is None else call.u).tensor,
            call.v.tensor,
            float(call.momentum),
            float(call.scale),
            *its,
        )
        for call, *its in zip(calls, lines, *columns)
    ]
    bins = torch.zeros((len(calls), programs.ROW), dtype=torch.int32, device=device)
    maxima = torch.empty(of_lines, dtype=torch.int32, device=device)
    launches.launch(programs.advance, table, bins, maxima, KIND=kind, BASED=based)
    return table, bins, maxima


@functools.partial(kernel, key=_momentum_of)
def add_to_residual(calls: List[Any]) -> Sequence[bool]:
    """As `kernels.reference.add_to_residual`. ValueError for arrays of different lengths, and for
    more than 2^31 - 1 elements."""
    _, bins, _ = _advanced(calls)
    peaks = bins[:, programs.PEAK]
    late = launches.late(peaks, lambda found: [peak < launches.TOO_LARGE for peak in found])
    late.there = DeviceArray(torch.where(peaks < launches.TOO_LARGE, -0.0, float("nan")).float())
    return late


def _chosen_alike(call: Any) -> Tuple[Any, ...]:
    return (*_momentum_of(call), not call.chunk, call.kind == "fp32")


@functools.partial(kernel, key=_chosen_alike)
def encode_topk(calls: List[Any]) -> Sequence[Encoded]:
    """As `kernels.reference.encode_topk`, with the native kernel's choice. The body is made on the
    CPU, when the entries have come there."""
    # Values that are sent as they are, of whole tensors, are taken out of the states at once.
    taken = calls[0].kind == "fp32" and not calls[0].chunk
    chosen = _of_chunks(calls) if calls[0].chunk else _of_tensors(calls, taken)
    return then(chosen, functools.partial(_coded, calls, taken))


def _coded(calls: List[Any], taken: bool, found: Sequence[_Entries]) -> List[Encoded]:
    chosen = [
        entries
        if entries.finite
        else entries._replace(indices=entries.indices[:0], rows=entries.rows[:, :0])
        for entries in found
    ]
    coded: Any = [(its.indices, its.rows, its.rows[0], ()) for its in chosen]
    if not taken:
        coded = _take(calls, chosen)
    indices, rows, values, scales = map(list, zip(*coded))
    return payloads_of(
        indices,
        values,
        [call.kind for call in calls],
        scales,
        [entries.finite for entries in chosen],
        zip(indices, rows),
    )


@kernel
def take_entries(
    calls: List[Any],
) -> List[Tuple[np.ndarray, np.ndarray, np.ndarray, Sequence[float]]]:
    """As `kernels.reference.take_entries`; indices, rows and values are on the CPU."""
    chosen = [
        _Entries(
            call.indices, np.stack([np.asarray(its[call.indices]) for its in _states(call)]), True
        )
        for call in calls
    ]
    return _take(calls, chosen)


def _take(
    calls: List[Any], chosen: List[_Entries]
) -> List[Tuple[np.ndarray, np.ndarray, np.ndarray, Sequence[float]]]:
    """The CPU codes the entries, as if they were the whole tensor; v then keeps the error there,
    and u becomes 0 where it is masked."""
    errors = [entries.rows[0].copy() for entries in chosen]
    coded = cpu.take_entries(
        [np.arange(len(error), dtype=np.uint32) for error in errors],
        errors,
        None,
        kind=[call.kind for call in calls],
        masked=0,
    )
    taken, left = [], []
    for call, entries, error, (places, _, values, scales) in zip(calls, chosen, errors, coded):
        rows = entries.rows[:, places]
        indices = entries.indices[places]
        taken.append((indices, rows, values, scales))
        left.append(np.where(indices < call.masked, np.float32(0), rows))
        left[-1][0] = error[places]
    put([_states(call) for call in calls], [indices for indices, *_ in taken], left)
    return taken


def _of_tensors(calls: List[Any], taken: bool) -> Late:
    """Advances, and chooses the k largest of each tensor. taken: whether they are taken out of the
    states at once."""
    sizes, two = [call.v.size for call in calls], calls[0].u is not None
    frame = Frame([call.k for call in calls], 2 + two, calls[0].v.device)
    table, bins, maxima = _advanced(
        calls,
        [call.k for call in calls],
        frame.starts,
        [call.masked for call in calls],
    )
    search = functools.partial(launches.launch, BLOCK=launches.SEARCHED, TILE=_TILE)
    for stage in (1, 2, 3):
        search(programs.narrow, table, bins, maxima, STAGE=stage)
    counts = launches.blocks(sizes, calls[0].v.device, launches.SEARCHED).new(2)
    search(programs.count, table, bins, maxima, counts)
    ends = counts.cumsum(1)
    held = frame.entries.view(torch.float32)
    of_entries = (frame.facts, frame.entries[0], held[1], held[-1])
    # Half a tile takes half the registers.
    collect = functools.partial(search, programs.collect, TILE=_TILE // 2, TWO=two)
    collect(table, bins, maxima, counts, ends, *of_entries, TAKEN=taken)
    late = Late(functools.partial(_brought, calls, frame.landing()))
    late.there = frame if taken else None
    return late


def _brought(calls: List[Any], landed: Callable[[], Any]) -> List[_Entries]:
    return [
        _Entries(
            its[0].view(np.uint32),
            its[1 : 1 + len(_states(call))].view(np.float32),
            peak < launches.TOO_LARGE,
        )
        for call, (peak, its) in zip(calls, landed())
    ]


def _of_chunks(calls: List[Any]) -> Late:
    """Advances, and chooses the k largest of each chunk, of equal ones the first, and none of
    zeros."""
    _, bins, _ = _advanced(calls)
    peaks = launches.landing(bins[:, programs.PEAK])
    chosen = in_groups(calls, lambda call: (call.k, call.chunk, len(_states(call))), _largest)

    def judged(found: Sequence[_Entries]) -> List[_Entries]:
        return [
            entries._replace(finite=peak < launches.TOO_LARGE)
            for entries, peak in zip(found, peaks().tolist())
        ]

    return Late(lambda: then(chosen, judged))


def _largest(calls: List[Any]) -> Sequence[_Entries]:
    """The entries of `_of_chunks`, of tensors whose v is as it is to be."""
    k, chunk = calls[0].k, calls[0].chunk
    states = [[state.tensor for state in its] for its in zip(*map(_states, calls))]
    if not k:
        return [
            _Entries(np.empty(0, np.uint32), np.empty((len(states), 0), np.float32), True)
        ] * len(calls)
    starts = starts_of([-(-call.v.size // chunk) for call in calls])
    none = states[0][0].new_zeros(chunk)
    padded = [
        torch.cat([part for v in its for part in (v, none[: -v.numel() % chunk])]).view(-1, chunk)
        for its in states
    ]
    # By magnitude, and of equal ones the first: no two are alike.
    behind = torch.arange(chunk - 1, -1, -1, dtype=torch.int64, device=padded[0].device)
    keys = padded[0].view(torch.int32).bitwise_and(0x7FFFFFFF).long() << 32 | behind
    largest = keys.topk(k, dim=1, sorted=False).values
    places = chunk - 1 - (largest & 0xFFFFFFFF)
    # Zeros are not sent. They come last.
    places = torch.where(largest >> 32 > 0, places, chunk).sort(dim=1).values
    held = [its.gather(1, places.clamp(max=chunk - 1)).view(torch.int32) for its in padded]
    landed = launches.landing(torch.stack([places.int(), *held]))

    def chosen() -> List[_Entries]:
        found, entries = landed(), []
        for start, end in zip(starts, starts[1:]):
            own = found[:, start:end].reshape(len(found), -1)
            firsts = np.repeat(np.arange(end - start, dtype=np.int64) * chunk, k)
            sent = own[0] < chunk
            indices = (firsts + own[0])[sent].astype(np.uint32)
            entries.append(_Entries(indices, own[1:, sent].view(np.float32), True))
        return entries

    return Late(chosen)
