"""Payloads as self-checking frames of bytes; docs/wire-format.md describes every field. A frame
carries its length, because an allgather joins the frames of all ranks, and a checksum. Whatever is
cut off, changed or meant for another tensor is a WireError, never a wrong result."""

from typing import Callable, List, Tuple

import numpy as np

from .. import kernels
from ..kernels import HEADROOM, Encoded
from ..kernels.reference.frames import HEADER
from ..kernels.reference.frames import VERSION as VERSION

# Frames after which their length is chosen anew.
_WINDOW = 8


class WireError(ValueError):
    """A payload that is not what this rank expects: truncated, changed, or of another tensor, step
    or configuration."""


# From the least length that a frame can have, the one that it gets.
FrameLength = Callable[[int], int]


def exact(length: int) -> int:
    """No padding."""
    return length


class Steady:
    """Lengths that hardly ever change, so that Horovod answers an allgather from its response
    cache: what frames of late have needed at most, and up to a 64th more where they differ. Frames
    that would grow by over an eighth have no padding, until they come to vary less."""

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
    payload: Encoded,
    number: int,
    digest: int,
    step: int,
    rank: int,
    frame_length: FrameLength = exact,
) -> np.ndarray:
    """The frame of an Encoded payload, made in the payload's buffer where that is long enough.
    number: the compressor's id on the wire; digest: uint32 of configuration and tensor; step: the
    number of the step, of which the low 32 bits travel; rank: which makes it."""
    return kernels.cpu.seal_frame(
        payload.buffer,
        size=frame_length(len(payload.buffer) - 1),
        number=number,
        digest=digest + rank & 0xFFFFFFFF,
        step=step & 0xFFFFFFFF,
        finite=payload.finite,
    )


def unseal(
    data: np.ndarray, frames: int, number: int, digest: int, step: int, first: int = 0
) -> Tuple[List[np.ndarray], bool]:
    """(bodies, finite): the bodies of exactly `frames` joined frames in `data`, uint8, made by the
    ranks from `first` on, in this order, and whether every rank's gradient was finite. Raises
    WireError, naming the rank, for anything else."""
    try:
        return kernels.cpu.open_frames(
            data,
            frames=frames,
            number=number,
            digest=digest + first & 0xFFFFFFFF,
            step=step & 0xFFFFFFFF,
        )
    except ValueError as error:
        raise WireError(str(error)) from None


def padded(frame: np.ndarray, padding: int, further: int = 0) -> np.ndarray:
    """A frame that has none, with so many bytes of padding; further: as the rank has made it that
    is so many further."""
    if not padding and not further:
        return frame
    _, _, number, _, digest, step, _, flags = HEADER.unpack(frame[:HEADROOM].tobytes())
    return kernels.cpu.seal_frame(
        np.append(frame, np.uint8(0)),
        size=len(frame) + padding,
        number=number,
        digest=digest + further & 0xFFFFFFFF,
        step=step,
        finite=not flags & 1,
    )


def by_tensor(data: np.ndarray, ranks: int, tensors: int) -> List[np.ndarray]:
    """Each tensor's frames of all ranks, as `unseal` takes them, of the frames of so many tensors
    that ranks have joined. WireError where they are not so many."""
    try:
        return kernels.cpu.frames_by_tensor(data, ranks=ranks, tensors=tensors)
    except ValueError as error:
        raise WireError(f"small tensors' payloads, which travel together: {error}") from None
