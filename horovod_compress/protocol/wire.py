"""Payloads as self-checking frames of bytes; docs/wire-format.md describes every field. A frame
carries its length, because an allgather joins the frames of all ranks, and a checksum. Whatever is
cut off, changed or meant for another group of tensors is a WireError, never a wrong result."""

from typing import Callable, List, Sequence, Tuple

import numpy as np

from .. import kernels
from ..kernels import HEADROOM, Encoded
from ..kernels.reference.frames import VERSION as VERSION
from ..kernels.reference.frames import table_size

# Frames after which their length is chosen anew.
_WINDOW = 8


class WireError(ValueError):
    """A payload that is not what this rank expects: truncated, changed, or of other tensors,
    another step or configuration."""


# From the least length that a frame can have, the one that it gets.
FrameLength = Callable[[int], int]


def exact(length: int) -> int:
    """No padding."""
    return length


class Steady:
    """Lengths that hardly ever change, so that a cache of them can answer an allgather: the most
    that frames of late have needed, and up to a 64th more where they differ. Frames that would grow
    by over an eighth have no padding, until they come to vary less."""

    def __init__(self) -> None:
        self._length = 0  # 0: each frame's own
        self._seen: List[int] = []

    def __call__(self, length: int) -> int:
        self._seen.append(length)
        if len(self._seen) == _WINDOW:
            self._length = self._chosen()
            self._seen.clear()
        elif self._length and length > self._length:
            self._length = _rounded_up(length)
        return self._length or length

    def _chosen(self) -> int:
        least, most, mean = min(self._seen), max(self._seen), sum(self._seen) / len(self._seen)
        wanted = most if least == most else _rounded_up(most)
        kept = wanted <= self._length <= 17 / 16 * wanted
        for length in (self._length, wanted) if kept else (wanted,):
            if 8 * length <= 9 * mean:
                return length
        return 0


def _rounded_up(length: int) -> int:
    unit = 1 << max(length.bit_length() - 7, 0)
    return -(-length // unit) * unit


def seal(
    payloads: Sequence[Encoded],
    number: int,
    digest: int,
    step: int,
    rank: int,
    frame_length: FrameLength = exact,
) -> np.ndarray:
    """The frame of a group's payloads; that of one is made in its buffer where that is long enough.

    Args:
        payloads: of the group's tensors.
        number: the compressor's id on the wire.
        digest: uint32 of configuration and tensors.
        step: the number of the step, of which the low 32 bits travel.
        rank: which makes the frame.
        frame_length: chooses the frame's length.
    """
    buffers = [payload.buffer for payload in payloads]
    bodies = sum(map(len, buffers)) - (HEADROOM + 1) * len(buffers)
    return kernels.cpu.seal_frame(
        buffers,
        size=frame_length(HEADROOM + table_size(len(buffers)) + bodies),
        number=number,
        digest=digest + rank & 0xFFFFFFFF,
        step=step & 0xFFFFFFFF,
        finite=[payload.finite for payload in payloads],
    )


def head(number: int, digest: int, step: int, rank: int) -> np.ndarray:
    """The head of a frame that stays on a device, three int32 words. Arguments as of `seal`."""
    words = [VERSION << 16 | number, digest + rank, step]
    return np.array([word & 0xFFFFFFFF for word in words], np.uint32).view(np.int32)


def check_heads(heads: np.ndarray, number: int, digest: int, step: int) -> None:
    """WireError where one of the heads, a row from each rank, is not as `head` makes it."""
    for rank, found in enumerate(heads):
        expected = head(number, digest, step, rank)
        if found[2] != expected[2]:
            raise WireError(
                f"payload of rank {rank}: of step {found[2]}, this rank is at step {step}; was a "
                "state loaded on some ranks only?"
            )
        if (found != expected).any():
            raise WireError(
                f"payload of rank {rank}: made for another compressor, configuration or tensor"
            )


def unseal(
    data: np.ndarray,
    frames: int,
    tensors: int,
    number: int,
    digest: int,
    step: int,
    first: int = 0,
) -> Tuple[List[List[np.ndarray]], List[bool]]:
    """The bodies in joined frames.

    Args:
        data: uint8, exactly the frames.
        frames: how many, made by the ranks from `first` on, in this order.
        tensors: of each frame.
        number, digest, step: as of `seal`.
        first: the rank that has made the first.

    Returns:
        For each frame the bodies of its tensors, and for each tensor whether its gradient was
        finite on all ranks.

    Raises:
        WireError: anything else came. It names the rank.
    """
    try:
        return kernels.cpu.open_frames(
            data,
            frames=frames,
            tensors=tensors,
            number=number,
            digest=digest + first & 0xFFFFFFFF,
            step=step & 0xFFFFFFFF,
        )
    except ValueError as error:
        raise WireError(str(error)) from None
