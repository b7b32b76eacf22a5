"""Payloads as self-checking frames of bytes; docs/wire-format.md describes every field. A frame
carries its length, because an allgather joins the frames of all ranks, and a checksum. Whatever is
cut off, changed or meant for another tensor is a WireError, never a wrong result."""

import struct
from typing import Any, Callable, List, Tuple

import numpy as np

from .. import kernels
from ..kernels import HEADROOM, Encoded

VERSION = 2
_MAGIC = b"hC"
# Magic version id, checksum digest step length flags.
_HEADER = struct.Struct("<2sBBIIIII")
# NumPy does not type its arrays as buffers before Python 3.12.
_pack_header: Callable[..., None] = _HEADER.pack_into
_unpack_header: Callable[..., Tuple[Any, ...]] = _HEADER.unpack_from
_pack_into: Callable[..., None] = struct.pack_into
# The checksum covers the frame from this byte on; the fields before are compared as they are.
_CHECKED = 8
# Of the flags, whose other bits are the bytes of padding.
_NOT_FINITE = 1
# Frames after which their length is chosen anew.
_WINDOW = 8
assert _HEADER.size == HEADROOM


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
    payload: Encoded, number: int, digest: int, step: int, frame_length: FrameLength = exact
) -> np.ndarray:
    """The frame of an Encoded payload, made in the payload's buffer where that is long enough.
    number: the compressor's id on the wire; digest: uint32 of configuration and tensor; step: the
    number of the step, of which the low 32 bits travel."""
    buffer = payload.buffer
    needed = len(buffer) - 1
    total = frame_length(needed)
    if total <= len(buffer):
        frame = buffer[:total]
    else:
        frame = np.zeros(total, np.uint8)
        frame[:needed] = buffer[:needed]
    flags = (0 if payload.finite else _NOT_FINITE) | (total - needed) << 1
    _pack_header(
        frame, 0, _MAGIC, VERSION, number, 0, digest, step & 0xFFFFFFFF, needed - HEADROOM, flags
    )
    _pack_into("<I", frame, 4, kernels.cpu.checksum(frame[_CHECKED:]))
    return frame


def unseal(
    data: np.ndarray, frames: int, number: int, digest: int, step: int
) -> Tuple[List[np.ndarray], bool]:
    """(bodies, finite): the bodies of exactly `frames` joined frames in `data`, uint8, one for each
    rank, and whether every rank's gradient was finite. Raises WireError, naming the rank, for
    anything else."""
    bodies: List[np.ndarray] = []
    at = not_finite = 0
    try:
        while len(bodies) < frames and at < len(data):
            body, at, flags = _unseal_one(data, at, number, digest, step & 0xFFFFFFFF)
            bodies.append(body)
            not_finite |= flags & _NOT_FINITE
    except WireError as error:
        raise WireError(f"payload of rank {len(bodies)}: {error}") from None
    if len(bodies) < frames:
        raise WireError(
            f"payloads of {len(bodies)} ranks came, {frames} were expected: were ranks lost, or is "
            f"another number of them running now?"
        )
    if at != len(data):
        raise WireError(f"{len(data) - at} bytes follow the payload of the last of {frames} ranks")
    return bodies, not not_finite


def _unseal_one(
    data: np.ndarray, at: int, number: int, digest: int, step: int
) -> Tuple[np.ndarray, int, int]:
    if len(data) - at < HEADROOM:
        raise WireError("cut off in its header")
    magic, version, id, checksum, found_digest, found_step, length, flags = _unpack_header(data, at)
    if magic != _MAGIC:
        raise WireError("not a horovod_compress payload")
    if version != VERSION:
        raise WireError(
            f"wire version {version}, this rank has {VERSION}; install the same horovod-compress "
            f"everywhere"
        )
    body = at + HEADROOM
    end = body + length + (flags >> 1)
    if end > len(data):
        raise WireError("cut off in its body")
    if kernels.cpu.checksum(data[at + _CHECKED : end]) != checksum:
        raise WireError("its checksum does not fit: it was changed on the way")
    if id != number or found_digest != digest:
        raise WireError("made for another compressor, configuration or tensor")
    if found_step != step:
        raise WireError(
            f"of step {found_step}, this rank is at step {step}; was a state loaded on some ranks "
            f"only?"
        )
    return data[body : body + length], end, flags
