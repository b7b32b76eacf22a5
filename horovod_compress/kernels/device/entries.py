"""Entries of tensors on a device, and how they come and go.

Some become payloads on the CPU, as those of the CPU's kernels, and are added to tensors from there.
Others stay, between ranks whose transport gathers on devices: nobody waits for them, and the CPU
learns later whether all was right. What a rollback would need of them is copied to the CPU.

A frame of those is of int32 words: a head of what all ranks must have alike, as `wire.head` makes
it; of each tensor its largest magnitude, as bits, and how many entries it sends; of all tensors
indices, then values, with room for k of each. What is behind is not sent.
"""

from typing import Any, Callable, Iterable, List, Sequence, Tuple

import numpy as np
import torch

from .. import cpu
from ..encoded import Encoded
from ..lists import in_groups, then
from . import launches
from .array import DeviceArray
from .dense import are_finite
from .programs import entries as programs
from .shared import kernel, starts_of

HEAD = 3


def payloads_of(
    indices: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    kind: Any,
    scales: Sequence[Any],
    finite: Sequence[bool],
    undo: Iterable[Tuple[Any, ...]],
) -> List[Encoded]:
    """Payloads of entries that have come to the CPU. kind: of all, or a list. finite, undo: as of
    `Encoded`."""
    encoded = cpu.encode_sparse(indices, values, kind=kind, scales=scales)
    return [
        each._replace(finite=whether, undo=its) for each, whether, its in zip(encoded, finite, undo)
    ]


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


@kernel
def decode_add_sparse(calls: List[Any]) -> Sequence[bool]:
    """out[indices] += scale·values of a sparse body, in place. ValueError, and nothing added, for
    an invalid body. Returns whether the new elements are finite."""
    found = cpu.decode_sparse(
        [call.body for call in calls], numel=[call.out.size for call in calls]
    )
    device, counts = calls[0].out.device, [len(indices) for indices, _ in found]
    indices, values = (launches.copied(each, device) for each in zip(*found))
    rows = [
        (count, call.out.tensor, float(call.scale), start)
        for count, call, start in zip(counts, calls, starts_of(counts))
    ]
    return are_finite(launches.largest(programs.add_entries, rows, indices, values))


class Frame:
    """A frame, and its parts in memory.

    Args:
        rooms: how many entries of each tensor there is room for.
        rows: arrays of entries: indices, values, and what is not sent.
        device: where it is.
    """

    def __init__(self, rooms: Sequence[int], rows: int, device: torch.device) -> None:
        tensors = len(rooms)
        self.rooms, self._begin = rooms, HEAD + 2 * tensors
        *self.starts, self.total = starts_of(rooms)
        self.words = torch.zeros(self._begin + rows * self.total, dtype=torch.int32, device=device)
        self.facts = self.words[HEAD : self._begin]
        self.entries = self.words[self._begin :].view(rows, self.total)

    def landing(self) -> Callable[[], List[Tuple[int, np.ndarray]]]:
        """Begins to bring it to the CPU. Returns a function that waits for that, and returns of
        each tensor its largest magnitude, as bits, and its rows of entries."""
        landed = launches.landing(self.words)

        def brought() -> List[Tuple[int, np.ndarray]]:
            words = landed()
            entries = words[self._begin :].reshape(self.entries.shape)
            facts = words[HEAD : self._begin].reshape(-1, 2).tolist()
            return [
                (peak, entries[:, start : start + count])
                for (peak, count), start in zip(facts, self.starts)
            ]

        return brought

    def sealed(self, head: np.ndarray) -> DeviceArray:
        """The part that is sent. head: HEAD words, int32."""
        self.words[:HEAD] = launches.copied([head], self.words.device)
        return DeviceArray(self.words[: self._begin + 2 * self.total])

    def add(
        self,
        frames: DeviceArray,
        outs: Sequence[DeviceArray],
        rank: int,
        scale: float,
        check: Callable[[np.ndarray], None],
    ) -> Sequence[bool]:
        """Adds scale times the entries in all ranks' frames, in rank order.

        Args:
            frames: one behind the other, of which this rank's own is the `rank`th.
            outs: the gradients' memory.
            check: raises for heads of which one is not as it must be. Nothing is added then.

        Returns:
            Of each tensor whether it is finite on all ranks, and so is the sum. It is late; who
            reads it has the heads checked.
        """
        words = self._begin + 2 * self.total
        size = frames.size // words
        table = [
            (
                out.size,
                out.tensor,
                float(scale),
                words,
                size,
                rank,
                HEAD + 2 * number,
                self._begin + start,
                self._begin + self.total + start,
                room,
            )
            for number, (out, start, room) in enumerate(zip(outs, self.starts, self.rooms))
        ]
        peaks = launches.largest(programs.add_frames, table, frames.tensor, BLOCK=launches.SEARCHED)
        heads = launches.landing(frames.tensor.view(size, words)[:, :HEAD].contiguous())

        def checked(finite: Sequence[bool]) -> List[bool]:
            check(heads())
            return list(finite)

        return then(are_finite(peaks), checked)
