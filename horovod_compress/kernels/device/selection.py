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
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from .. import cpu
from ..encoded import Encoded
from ..late import Late, then
from ..lists import in_groups
from . import launches
from .array import DeviceArray
from .frames import Frame
from .programs import selection as programs
from .shared import kernel, same_length, starts_of, within_limits

# Lines of a tile.
_TILE = launches.BLOCK // programs.LINE


class _Update(NamedTuple):
    """The arguments of `encode_topk`, and with defaults for the last two those of
    `add_to_residual`."""

    grad: DeviceArray
    u: Optional[DeviceArray]
    v: DeviceArray
    base: Optional[DeviceArray] = None
    momentum: float = 0.0
    nesterov: bool = False
    scale: float = 1.0
    k: int = 0
    samples: int = 0
    offset: int = 0
    chunk: int = 0
    kind: str = "fp32"
    masked: int = 0

    @property
    def states(self) -> List[DeviceArray]:
        """The arrays that entries are taken out of."""
        return [self.v] if self.u is None or not self.masked else [self.v, self.u]

    @property
    def program(self) -> Tuple[int, bool]:
        """The kind of momentum, and whether the gradient counts from a base."""
        return (
            programs.NONE
            if self.u is None
            else programs.NESTEROV
            if self.nesterov
            else programs.VANILLA,
            self.base is not None,
        )

    @property
    def is_whole(self) -> bool:
        """True if values are sent as they are."""
        return self.narrowed and self.kind == "fp32"

    @property
    def narrowed(self) -> bool:
        """True if a threshold is found for the tensor as a whole."""
        return not self.chunk and (self.k > 0 or not self.v.size)

    @property
    def operands(self) -> Tuple[Any, ...]:
        """Of `advance`. Where there is no momentum, u is v, and not used, and so is the gradient as
        base where that is zero."""
        base, u = (
            self.grad if self.base is None else self.base,
            self.v if self.u is None else self.u,
        )
        return (
            self.grad.tensor,
            base.tensor,
            u.tensor,
            self.v.tensor,
            float(self.momentum),
            float(self.scale),
        )


class _Entries(NamedTuple):
    """The entries chosen of a tensor, on the CPU: ascending indices, uint32; rows of what the
    states hold there; whether every new v was finite; whether the states have them no more."""

    indices: np.ndarray
    rows: np.ndarray
    finite: bool
    taken: bool = False


@functools.partial(kernel, arguments=_Update)
def add_to_residual(calls: List[_Update]) -> Sequence[Tuple[np.ndarray, bool]]:
    """As the native kernel, with its choice; the indices are on the CPU. ValueError for arrays of
    different lengths, and for more than 2^31 - 1 elements."""
    return then(
        _chosen(calls), lambda chosen: [(entries.indices, entries.finite) for entries in chosen]
    )


@functools.partial(kernel, arguments=_Update)
def encode_topk(calls: List[_Update]) -> Sequence[Encoded]:
    """As `kernels.reference.encode_topk`, with the native kernel's choice. The body is made on the
    CPU, when the entries have come there."""
    return then(_chosen(calls, taken=True), functools.partial(_coded, calls))


def _coded(calls: List[_Update], found: Sequence[_Entries]) -> List[Encoded]:
    chosen = [
        entries
        if entries.finite
        else entries._replace(indices=entries.indices[:0], rows=entries.rows[:, :0])
        for entries in found
    ]
    indices, rows, values, scales = map(list, zip(*_take(calls, chosen)))
    encoded = cpu.encode_sparse(indices, values, kind=[call.kind for call in calls], scales=scales)
    return [
        each._replace(finite=entries.finite, undo=undo)
        for each, entries, undo in zip(encoded, chosen, zip(indices, rows))
    ]


@kernel
def take_entries(
    calls: List[Any],
) -> List[Tuple[np.ndarray, np.ndarray, np.ndarray, Sequence[float]]]:
    """As `kernels.reference.take_entries`; indices, rows and values are on the CPU."""
    updates = [
        _Update(call.v, call.u, call.v, kind=call.kind, masked=call.masked) for call in calls
    ]
    chosen = [
        _Entries(
            call.indices, np.stack([np.asarray(its[call.indices]) for its in update.states]), True
        )
        for call, update in zip(calls, updates)
    ]
    return _take(updates, chosen)


def put(
    tensors: Sequence[Sequence[DeviceArray]],
    indices: Sequence[np.ndarray],
    numbers: Sequence[np.ndarray],
) -> None:
    """Writes float32 numbers into tensors' arrays, as many of each tensor, at indices, uint32, that
    do not repeat; numbers: a row for each array."""

    def written(which: Sequence[int]) -> List[None]:
        device, arrays = tensors[which[0]][0].device, len(tensors[which[0]])
        at = launches.copied([indices[i] for i in which], device)
        rows = [launches.copied([numbers[i][row] for i in which], device) for row in range(arrays)]
        starts = starts_of([len(indices[i]) for i in which])
        table = [
            (len(indices[i]), tensors[i][0].tensor, tensors[i][-1].tensor, start)
            for i, start in zip(which, starts)
        ]
        launches.launch(programs.put, table, at, rows[0], rows[-1], TWO=arrays == 2)
        return [None] * len(which)

    in_groups(range(len(tensors)), lambda i: len(tensors[i]), written)


def _take(
    calls: List[_Update], chosen: List[_Entries]
) -> List[Tuple[np.ndarray, np.ndarray, np.ndarray, Sequence[float]]]:
    """The CPU codes the entries, as if they were the whole tensor; v then keeps the error there,
    and u becomes 0 where it is masked."""
    if all(entries.taken for entries in chosen):
        return [(entries.indices, entries.rows, entries.rows[0], ()) for entries in chosen]
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
    put([call.states for call in calls], [indices for indices, *_ in taken], left)
    return taken


def _chosen(calls: List[_Update], taken: bool = False) -> Sequence[_Entries]:
    """Advances, and chooses the k largest of each tensor, or with `chunk` of each chunk. taken:
    whether values that are sent as they are, of whole tensors, are taken out of the states."""
    for call in calls:
        same_length(grad=call.grad, v=call.v, u=call.u, base=call.base)
        within_limits(call.grad)
    return in_groups(
        calls,
        lambda call: (call.program, call.narrowed, taken and call.is_whole),
        functools.partial(_chosen_alike, taken),
    )


def _chosen_alike(taken: bool, calls: List[_Update]) -> Sequence[_Entries]:
    device, (kind, based), two = calls[0].v.device, calls[0].program, calls[0].u is not None
    *lines, of_lines = starts_of([-(-call.v.size // programs.LINE) for call in calls])
    frame = Frame([call.k for call in calls], 2 + two, device)
    table = [
        (call.v.size, *call.operands, call.k, line, start, call.masked)
        for call, line, start in zip(calls, lines, frame.starts)
    ]
    bins = torch.zeros((len(calls), programs.ROW), dtype=torch.int32, device=device)
    maxima = torch.empty(of_lines, dtype=torch.int32, device=device)
    launches.launch(programs.advance, table, bins, maxima, KIND=kind, BASED=based)
    if not calls[0].narrowed:
        peaks, chosen = launches.landing(bins[:, programs.PEAK]), _of_all(calls)

        def judged(found: Sequence[_Entries]) -> List[_Entries]:
            return [
                entries._replace(finite=peak < launches.TOO_LARGE)
                for entries, peak in zip(found, peaks().tolist())
            ]

        late = Late(lambda: then(chosen, judged))
        if not calls[0].k:
            finite = bins[:, programs.PEAK] < launches.TOO_LARGE
            late.there = DeviceArray(torch.where(finite, -0.0, float("nan")).float())
        return late
    search = functools.partial(launches.launch, BLOCK=launches.SEARCHED, TILE=_TILE)
    for stage in (1, 2, 3):
        search(programs.narrow, table, bins, maxima, STAGE=stage)
    sizes = [call.v.size for call in calls]
    counts = launches.blocks(sizes, device, launches.SEARCHED).new(2)
    search(programs.count, table, bins, maxima, counts)
    ends = counts.cumsum(1)
    taken = taken and calls[0].is_whole
    held = frame.entries.view(torch.float32)
    of_entries = (frame.facts, frame.entries[0], held[1], held[-1])
    # Half a tile takes half the registers.
    collect = functools.partial(search, programs.collect, TILE=_TILE // 2, TWO=two)
    collect(table, bins, maxima, counts, ends, *of_entries, TAKEN=taken)
    late = Late(functools.partial(_brought, calls, frame.landing(), taken))
    late.there = frame if taken else None
    return late


def _brought(calls: List[_Update], landed: Callable[[], Any], taken: bool) -> List[_Entries]:
    return [
        _Entries(
            its[0].view(np.uint32),
            its[1 : 1 + len(call.states)].view(np.float32),
            peak < launches.TOO_LARGE,
            taken,
        )
        for call, (peak, its) in zip(calls, landed())
    ]


def _of_all(calls: List[_Update]) -> Sequence[_Entries]:
    """Of tensors whose v is as it is to be, the k largest of each chunk, or of the tensor, of equal
    ones the first, and none of zeros."""
    return in_groups(
        calls, lambda call: (call.k, call.chunk or call.v.size, len(call.states)), _of_chunks
    )


def _of_chunks(calls: List[_Update]) -> Sequence[_Entries]:
    k, chunk = calls[0].k, calls[0].chunk or calls[0].v.size
    states = [[state.tensor for state in its] for its in zip(*(call.states for call in calls))]
    if not k or not chunk:
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
