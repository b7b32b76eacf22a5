"""Frames of the payloads of a group of tensors: made and opened. Of their checksum each of the 16
words of a line feeds its own stream, and the streams are mixed in the end."""

import itertools
import struct
from typing import Any, List, Sequence, Tuple

import numpy as np

from ..encoded import HEADROOM

VERSION = 4
_MAGIC = b"hC"
# Magic version id, checksum digest step length flags.
HEADER = struct.Struct("<2sBBIIIII")
# The checksum covers the frame from this byte on; the fields before are compared as they are.
_CHECKED = 8
# Of the flags, whose other bits are the bytes of padding, and of an entry of the table of several
# tensors, whose other bits are the bytes of a body.
_NOT_FINITE = 1
ENTRY = np.dtype("<u4")
assert HEADER.size == HEADROOM

_LANES = 16
_FIRST, _SECOND, _THIRD = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_MASK = 0xFFFFFFFF


def checksum(data: np.ndarray) -> int:
    """32 bits of a uint8 array. Its little-endian words, padded with zeros to whole lines of 16,
    feed 16 streams, h ← rotate(h + word·B, 13)·A; those and the length are mixed in the end. One
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


def table_size(tensors: int) -> int:
    """Bytes of the table before the bodies of so many tensors."""
    return tensors * ENTRY.itemsize if tensors > 1 else 0


def seal_frame(
    buffers: List[np.ndarray],
    *,
    size: int,
    number: int,
    digest: int,
    step: int,
    finite: Sequence[bool],
) -> np.ndarray:
    """The frame of so many bytes for tensors whose bodies are in encoders' buffers. That of one
    tensor is made in its buffer where that is long enough. finite: of each, whether its gradient
    was."""
    if not buffers or len(finite) != len(buffers):
        raise ValueError("a frame has one tensor at least, and a flag for each")
    if any(len(buffer) <= HEADROOM for buffer in buffers):
        raise ValueError("a buffer is a header, a body and a byte")
    bodies = [buffer[HEADROOM:-1] for buffer in buffers]
    table = [len(body) << 1 | (not its) for body, its in zip(bodies, finite)]
    content = [np.array(table if len(table) > 1 else [], ENTRY).view(np.uint8), *bodies]
    length = sum(map(len, content))
    padding = size - HEADROOM - length
    if padding < 0:
        raise ValueError("bodies must fit their frame")
    if len(buffers) == 1 and padding <= 1:
        frame = buffers[0][:size]
    else:
        frame = np.concatenate(
            [np.zeros(HEADROOM, np.uint8), *content, np.zeros(padding, np.uint8)]
        )
    flags = (0 if all(finite) else _NOT_FINITE) | padding << 1
    HEADER.pack_into(frame.data, 0, _MAGIC, VERSION, number, 0, digest, step, length, flags)
    struct.pack_into("<I", frame.data, 4, checksum(frame[_CHECKED:]))
    return frame


def open_frames(
    data: np.ndarray, *, frames: int, tensors: int, number: int, digest: int, step: int
) -> Tuple[List[List[np.ndarray]], List[bool]]:
    """(bodies, finite): for each rank the bodies of its tensors, of exactly so many joined frames,
    and for each tensor whether its gradient was finite on all ranks. digest: rank 0's; each other's
    is one more than that of the rank before."""
    if not tensors:
        raise ValueError("a frame has one tensor at least")
    bodies: List[List[np.ndarray]] = []
    at, finite = 0, [True] * tensors
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
            content = data[at + HEADROOM : at + HEADROOM + length]
            its, its_flags = _parts_of(content, tensors, flags)
            bodies.append(its)
            finite = [before and not flag & _NOT_FINITE for before, flag in zip(finite, its_flags)]
            at = end
    except ValueError as error:
        raise ValueError(f"payload of rank {len(bodies)}: {error}") from None
    if len(bodies) < frames:
        raise ValueError(
            f"payloads of {len(bodies)} ranks came, {frames} were expected: were ranks lost, or is "
            f"another number of them running now?"
        )
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes follow the payload of the last of {frames} ranks")
    return bodies, finite


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


def _parts_of(
    content: np.ndarray, tensors: int, flags: int
) -> Tuple[List[np.ndarray], Sequence[int]]:
    """The bodies in a frame's content, and the flags of each tensor. flags: the header's."""
    if tensors == 1:
        return [content], [flags]
    table = table_size(tensors)
    if len(content) < table:
        raise ValueError("shorter than the table of its tensors")
    entries = np.frombuffer(content[:table].tobytes(), ENTRY).tolist()
    ends = list(itertools.accumulate((entry >> 1 for entry in entries), initial=table))
    if ends[-1] != len(content):
        raise ValueError("not of the length that the table of its tensors says")
    return [content[start:end] for start, end in zip(ends, ends[1:])], entries
