"""Entries of a group that travel as they are on the device, between ranks whose transport gathers
there: nobody waits for them, and the CPU learns later whether all was right. What a rollback would
need of them is copied to the CPU.

A frame is of int32 words: a head of what all ranks must have alike, as `wire.head` makes it; of
each tensor its largest magnitude, as bits, and how many entries it sends; of all tensors indices,
then values, with room for k of each. What is behind is not sent.
"""

from typing import Callable, List, Sequence, Tuple

import numpy as np
import torch

from ..lists import then
from . import launches
from .array import DeviceArray
from .dense import are_finite
from .programs import frames as programs
from .shared import starts_of

HEAD = 3


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
