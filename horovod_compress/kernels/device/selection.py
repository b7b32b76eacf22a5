"""Accumulation with momentum, and the choice of the largest entries: what kernels/native/select.hpp
does, on a device, for many tensors at once.

1. `sample` shows what v is about to become at the elements that the native kernel samples too, and
the floor is of the same rank among them.
2. `advance` advances u and v, zeroes the gradient, and counts the elements of each block that reach
its tensor's floor.
3. The sums of those counts say where each block's candidates belong, and `collect` writes them
there, in the order of their indices.
4. Of the candidates each tensor's k largest are chosen, of equal ones the first. They come to the
CPU, with what v and u hold there, in one copy,
   and nothing waits for the device before.
5. Where fewer than k reach the floor, or more than there is room for, which that copy says too, v
is searched as a whole.
6. The CPU codes the entries. `put` writes what they leave in v and u.
"""

import functools
import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import torch

from .. import cpu
from ..encoded import Encoded
from . import launches
from .array import DeviceArray
from .programs import selection as programs
from .shared import in_groups, kernel, same_length, starts_of, within_limits

# Standard deviations, as kSampleMargin in native/tuning.hpp.
_MARGIN = 2
# For candidates: times k, and at least.
_ROOM, _LEAST_ROOM = 4, 4096
_NOTHING = 2**31 - 1  # a floor above every magnitude


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
    def sampled(self) -> bool:
        """True if candidates are found by a floor."""
        return self.k > 0 and not self.chunk and self.v.size > 0

    @property
    def room(self) -> int:
        """For candidates."""
        return min(self.v.size, max(_ROOM * self.k, _LEAST_ROOM))

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
    states hold there; whether every new v was finite."""

    indices: np.ndarray
    rows: np.ndarray
    finite: bool


class _Sample(NamedTuple):
    """The elements that the native kernel samples: `stretches` of 64, every `stride`-th from number
    `shift` on; rank: of the floor among them."""

    stretches: int
    stride: int
    shift: int
    rank: int


@functools.partial(kernel, arguments=_Update)
def add_to_residual(calls: List[_Update]) -> List[Tuple[np.ndarray, bool]]:
    """As the native kernel, with its choice; the indices are on the CPU. ValueError for arrays of
    different lengths, and for more than 2^31 - 1 elements."""
    return [(entries.indices, entries.finite) for entries in _chosen(calls)]


@functools.partial(kernel, arguments=_Update)
def encode_topk(calls: List[_Update]) -> List[Encoded]:
    """As `kernels.reference.encode_topk`, with the native kernel's choice. The body is made on the
    CPU."""
    chosen = [
        entries if entries.finite else _Entries(entries.indices[:0], entries.rows[:, :0], False)
        for entries in _chosen(calls)
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


def _chosen(calls: List[_Update]) -> List[_Entries]:
    """Advances, and chooses the k largest of each tensor, or with `chunk` of each chunk."""
    for call in calls:
        same_length(grad=call.grad, v=call.v, u=call.u, base=call.base)
        within_limits(call.grad)
    return in_groups(
        calls, lambda call: (call.program, call.sampled, len(call.states)), _chosen_alike
    )


def _chosen_alike(calls: List[_Update]) -> List[_Entries]:
    device, (kind, based), sampled = calls[0].v.device, calls[0].program, calls[0].sampled
    floors = (
        _sampled_floors(calls)
        if sampled
        else torch.full((len(calls),), _NOTHING, dtype=torch.int32, device=device)
    )
    blocks = launches.blocks([call.v.size for call in calls], device)
    counts, peaks = blocks.new(2)
    launches.launch(
        programs.advance,
        [(call.v.size, *call.operands) for call in calls],
        floors,
        counts,
        peaks,
        KIND=kind,
        BASED=based,
    )
    largest, found = blocks.largest(peaks), blocks.sums(counts)
    if not sampled:
        return [
            entries._replace(finite=peak < launches.TOO_LARGE)
            for entries, peak in zip(_of_all(calls), largest.tolist())
        ]
    candidates = _of_candidates(calls, floors, counts)
    facts, entries = np.split(
        torch.cat([largest, found, floors, candidates.reshape(-1)]).cpu().numpy(), [3 * len(calls)]
    )
    rows, start, chosen, again = entries.reshape(len(candidates), -1), 0, [], []
    for number, (call, peak, found_here, floor) in enumerate(
        zip(calls, *facts.reshape(3, -1).tolist())
    ):
        end = start + min(call.k, found_here, call.room)
        its = rows[:, start:end]
        finite = peak < launches.TOO_LARGE
        chosen.append(_Entries(its[0].view(np.uint32), its[1:].view(np.float32), finite))
        if found_here > call.room or found_here < call.k and floor != 1:
            again.append(number)
        start = end
    for number, found_there in zip(again, _of_all([calls[number] for number in again])):
        chosen[number] = found_there._replace(finite=chosen[number].finite)
    return chosen


def _sample_of(call: _Update) -> Optional[_Sample]:
    """As sampled_floor of the native kernel has it; None where the sample would be no smaller than
    what is looked for."""
    stretches = call.v.size // programs.SAMPLED
    wanted = min(stretches, -(-call.samples // programs.SAMPLED))
    expected = call.k * (wanted * programs.SAMPLED) / call.v.size
    rank = int(expected + _MARGIN * math.sqrt(expected) + 2)
    if rank >= wanted * programs.SAMPLED:
        return None
    stride = stretches // wanted
    return _Sample(wanted, stride, call.offset % stride, rank)


def _sampled_floors(calls: List[_Update]) -> torch.Tensor:
    """Of each tensor a magnitude, as bits, that somewhat more than k will reach, or where that is
    unknown 1."""
    device, (kind, based), samples = (
        calls[0].v.device,
        calls[0].program,
        [_sample_of(call) for call in calls],
    )
    floors = torch.ones(len(calls), dtype=torch.int32, device=device)
    known = [(i, call, sample) for i, (call, sample) in enumerate(zip(calls, samples)) if sample]
    if not known:
        return floors
    *starts, total = starts_of([sample.stretches * programs.SAMPLED for _, _, sample in known])
    rows = [
        (sample.stretches * programs.SAMPLED, *call.operands, sample.stride, sample.shift, start)
        for (_, call, sample), start in zip(known, starts)
    ]
    orders = torch.empty(total, dtype=torch.int64, device=device)
    launches.launch(
        programs.sample, rows, orders, KIND=kind, BASED=based, BLOCK=launches.MARK_BLOCK
    )
    places = [start + sample.rank for (_, _, sample), start in zip(known, starts)]
    which, at = launches.copied(
        [np.array([i for i, _, _ in known]), np.array(places)], device
    ).chunk(2)
    orders = orders.sort().values
    below, least = (
        programs.NO_MAGNITUDE - (orders[at - back] & programs.NO_MAGNITUDE) for back in (0, 1)
    )
    floors[which] = torch.where(below > 0, least, 1).int()
    return floors


def _of_candidates(
    calls: List[_Update], floors: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """A row of indices, and rows of what the states hold there, as bits, of what is chosen of all
    tensors, at most k of each, one tensor's behind the other's; after those anything."""
    device, states = counts.device, len(calls[0].states)
    *starts, total = starts_of([call.room for call in calls])
    ends = counts.cumsum(0)
    columns = zip(*((start, call.room, call.k) for start, call in zip(starts, calls)))
    begins, rooms, ks = launches.copied([np.array(column) for column in columns], device).chunk(3)
    tensors = torch.arange(len(calls), dtype=torch.int64, device=device)
    tensors = tensors.repeat_interleave(rooms, output_size=total)
    orders = tensors << 32 | programs.NO_MAGNITUDE
    rows = torch.empty((1 + states, total), dtype=torch.int32, device=device)
    table = [
        (call.v.size, call.states[0].tensor, call.states[-1].tensor, start, call.room)
        for call, start in zip(calls, starts)
    ]
    held = rows.view(torch.float32)
    launches.launch(
        programs.collect,
        table,
        floors,
        counts,
        ends,
        orders,
        rows[0],
        held[1],
        held[-1],
        TWO=states == 2,
    )
    # By tensors, which stay where they are.
    orders, order = orders.sort(stable=True)
    number = torch.arange(total, dtype=torch.int64, device=device)
    largest = (number - begins[tensors] < ks[tensors]) & (
        orders & programs.NO_MAGNITUDE != programs.NO_MAGNITUDE
    )
    chosen = torch.empty_like(largest)
    chosen[order] = largest
    places = chosen.cumsum(0)
    # What is not chosen comes behind.
    places = torch.where(chosen, places - 1, places[-1] + number - places)
    in_order = torch.empty_like(rows)
    in_order[:, places] = rows
    return in_order[:, : sum(call.k for call in calls)]


def _of_all(calls: List[_Update]) -> List[_Entries]:
    """Of tensors whose v is as it is to be, the k largest of each chunk, or of the tensor, of equal
    ones the first, and none of zeros."""
    return in_groups(
        calls, lambda call: (call.k, call.chunk or call.v.size, len(call.states)), _of_chunks
    )


def _of_chunks(calls: List[_Update]) -> List[_Entries]:
    k, chunk = calls[0].k, calls[0].chunk or calls[0].v.size
    states = [[state.tensor for state in its] for its in zip(*(call.states for call in calls))]
    if not k or not chunk:
        return [
            _Entries(np.empty(0, np.uint32), np.empty((len(states), 0), np.float32), True)
        ] * len(calls)
    starts = starts_of([-(-call.v.size // chunk) * chunk for call in calls])
    none = states[0][0].new_zeros(chunk)
    padded = [
        torch.cat([part for v in its for part in (v, none[: -v.numel() % chunk])]) for its in states
    ]
    chosen = (
        _largest(padded[0].view(torch.int32).bitwise_and(0x7FFFFFFF).view(-1, chunk), k)
        .view(-1)
        .nonzero()
        .view(-1)
    )
    rows, places = torch.stack([its[chosen] for its in padded]).cpu().numpy(), chosen.cpu().numpy()
    bounds = np.searchsorted(places, starts).tolist()
    return [
        _Entries((places[low:high] - start).astype(np.uint32), rows[:, low:high], True)
        for start, low, high in zip(starts, bounds, bounds[1:])
    ]


def _largest(magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    """For each row, where its k largest are, of equal ones the first, and no zeros."""
    least = magnitudes.topk(k, dim=1).values[:, -1:]
    above, equal = magnitudes > least, (magnitudes == least) & (magnitudes > 0)
    return above | equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True))
