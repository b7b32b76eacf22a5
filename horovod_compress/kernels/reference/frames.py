"""Frames of payloads: made, opened, and put in another order. Of their checksum each of the 16
words of a line feeds its own stream, and the streams are mixed in the end."""

import struct
from typing import Any, List, Tuple

import numpy as np

from ..encoded import HEADROOM

VERSION = 3
_MAGIC = b"hC"
# Magic version id, checksum digest step length flags.
HEADER = struct.Struct("<2sBBIIIII")
# The checksum covers the frame from this byte on; the fields before are compared as they are.
_CHECKED = 8
# Of the flags, whose other bits are the bytes of padding.
_NOT_FINITE = 1
assert HEADER.size == HEADROOM

_LANES = 16
_FIRST, _SECOND, _THIRD = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_MASK = 0xFFFFFFFF


def checksum(data: np.ndarray) -> int:
    """32 bits of a uint8 array. Its little-endian words, padded with zeros to whole lines of 16,
    feed 16 streams, h ← rotate(h + word·B, 13)·A; those and the length are mixed in the end. A
    changed word always changes its stream."""
    padded = np.zeros((len(data) // (4 * _LANES) + 1) * 4 * _LANES, np.uint8)
    padded[: len(data)] = data
    lanes = np.arange(1, _LANES + 1, dtype=np.uint32) * np.uint32(_THIRD)
    for line in padded.view(np.uint32).reshape(-1, _LANES):
        moved = lanes + line * np.uint32(_SECOND)
        lanes = (moved << 13 | moved >> 19) * np.uint32(_FIRST)
    total = len(data) * _THIRD & _MASK
    for lane in lanes.tolist():
        mixed = total ^ lane
        total = ((mixed << 17 | mixed >> 15) & _MASK) * _SECOND & _MASK
    total ^= total >> 15
    total = total * _THIRD & _MASK
    return total ^ total >> 16


def seal_frame(
    buffer: np.ndarray, *, size: int, number: int, digest: int, step: int, finite: bool
) -> np.ndarray:
    """The frame of so many bytes whose body is in an encoder's buffer, made there where that is
    long enough."""
    needed = len(buffer) - 1
    if not HEADROOM <= needed <= size:
        raise ValueError("a buffer is a header, a body and a byte, and fits its frame")
    if size <= len(buffer):
        frame = buffer[:size]
    else:
        frame = np.zeros(size, np.uint8)
        frame[:needed] = buffer[:needed]
    flags = (0 if finite else _NOT_FINITE) | (size - needed) << 1
    HEADER.pack_into(
        frame.data, 0, _MAGIC, VERSION, number, 0, digest, step, needed - HEADROOM, flags
    )
    struct.pack_into("<I", frame.data, 4, checksum(frame[_CHECKED:]))
    return frame


def open_frames(
    data: np.ndarray, *, frames: int, number: int, digest: int, step: int
) -> Tuple[List[np.ndarray], bool]:
    """(bodies, finite): the bodies of exactly so many joined frames, one for each rank, and whether
    every rank's gradient was finite. digest: rank 0's; each other's is one more than that of the
    rank before."""
    bodies: List[np.ndarray] = []
    at = not_finite = 0
    try:
        while len(bodies) < frames and at < len(data):
            end, (_, _, id, found, its_digest, its_step, length, flags) = _end_of(data, at)
            if checksum(data[at + _CHECKED : end]) != found:
                raise ValueError("its checksum does not fit: it was changed on the way")
            maker = its_digest - digest & _MASK
            if id != number or maker >= frames:
                raise ValueError("made for another compressor, configuration or tensor")
            if maker != len(bodies):
                raise ValueError(f"made by rank {maker}: it was put in another's place on the way")
            if its_step != step:
                raise ValueError(
                    f"of step {its_step}, this rank is at step {step}; was a state loaded on some "
                    "ranks only?"
                )
            bodies.append(data[at + HEADROOM : at + HEADROOM + length])
            at, not_finite = end, not_finite | flags & _NOT_FINITE
    except ValueError as error:
        raise ValueError(f"payload of rank {len(bodies)}: {error}") from None
    if len(bodies) < frames:
        raise ValueError(
            f"payloads of {len(bodies)} ranks came, {frames} were expected: were ranks lost, or is "
            f"another number of them running now?"
        )
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes follow the payload of the last of {frames} ranks")
    return bodies, not not_finite


def _end_of(data: np.ndarray, at: int) -> Tuple[int, Tuple[Any, ...]]:
    """The end of the frame that begins at a place, and its header."""
    if len(data) - at < HEADROOM:
        raise ValueError("cut off in its header")
    header = HEADER.unpack_from(data.data, at)
    if header[0] != _MAGIC:
        raise ValueError("not a horovod_compress payload")
    if header[1] != VERSION:
        raise ValueError(
            f"wire version {header[1]}, this rank has {VERSION}; install the same "
            "horovod-compress everywhere"
        )
    end = at + HEADROOM + header[6] + (header[7] >> 1)
    if end > len(data):
        raise ValueError("cut off in its body")
    return end, header


def frames_by_tensor(data: np.ndarray, *, ranks: int, tensors: int) -> List[np.ndarray]:
    """Each tensor's frames, joined in rank order, of those of all tensors, rank by rank."""
    ends = [0]
    for number in range(ranks * tensors):
        try:
            ends.append(_end_of(data, ends[-1])[0])
        except ValueError as error:
            raise ValueError(f"payload of rank {number // tensors}: {error}") from None
    if ends[-1] != len(data):
        raise ValueError("bytes follow the last frame")
    frames = [data[start:end] for start, end in zip(ends, ends[1:])]
    return [np.concatenate(frames[tensor::tensors]) for tensor in range(tensors)]
