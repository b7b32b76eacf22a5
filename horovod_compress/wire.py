"""Payloads as self-checking frames of bytes; docs/wire-format.md describes every field. A frame carries its length, because an allgather joins the
frames of all ranks, and a checksum. Whatever is cut off, changed or meant for another tensor is a WireError, never a wrong result."""
import struct
from typing import Any, Callable, List, Tuple

import numpy as np

from . import kernels
from .kernels import HEADROOM, Encoded

VERSION = 1
_MAGIC = b"hC"
_HEADER = struct.Struct("<2sBBIIIII")  # magic version id, checksum digest step length flags
_pack_header: Callable[..., None] = _HEADER.pack_into  # NumPy does not type its arrays as buffers before Python 3.12
_unpack_header: Callable[..., Tuple[Any, ...]] = _HEADER.unpack_from
_pack_into: Callable[..., None] = struct.pack_into
_CHECKED = 8  # the checksum covers the frame from this byte on; the fields before are compared as they are
_NOT_FINITE = 1
assert _HEADER.size == HEADROOM


class WireError(ValueError):
    """A payload that is not what this rank expects: truncated, changed, or of another tensor, step or configuration."""


def seal(payload: Encoded, number: int, digest: int, step: int) -> np.ndarray:
    """The frame of an Encoded payload, made in the payload's buffer. number: the compressor's id on the wire; digest: uint32 of configuration and
    tensor; step: the number of the step, of which the low 32 bits travel."""
    buffer = payload.buffer
    length = len(buffer) - HEADROOM - 1
    frame = buffer[: _padded(HEADROOM + length, step)]
    _pack_header(buffer, 0, _MAGIC, VERSION, number, 0, digest, step & 0xFFFFFFFF, length, 0 if payload.finite else _NOT_FINITE)
    _pack_into("<I", buffer, 4, kernels.host.checksum(frame[_CHECKED:]))
    return frame


def unseal(data: np.ndarray, frames: int, number: int, digest: int, step: int) -> Tuple[List[np.ndarray], bool]:
    """(bodies, finite): the bodies of exactly `frames` joined frames in `data`, uint8, one for each rank, and whether every rank's gradient was
    finite. Raises WireError, naming the rank, for anything else."""
    bodies: List[np.ndarray] = []
    at = not_finite = 0
    try:
        while len(bodies) < frames and at < len(data):
            body, at, flags = _unseal_one(data, at, number, digest, step & 0xFFFFFFFF)
            bodies.append(body)
            not_finite |= flags
    except WireError as error:
        raise WireError(f"payload of rank {len(bodies)}: {error}") from None
    if len(bodies) < frames:
        raise WireError(f"payloads of {len(bodies)} ranks came, {frames} were expected: were ranks lost, or is another number of them running now?")
    if at != len(data):
        raise WireError(f"{len(data) - at} bytes follow the payload of the last of {frames} ranks")
    return bodies, not not_finite


def _unseal_one(data: np.ndarray, at: int, number: int, digest: int, step: int) -> Tuple[np.ndarray, int, int]:
    if len(data) - at < HEADROOM:
        raise WireError("cut off in its header")
    magic, version, id, checksum, found_digest, found_step, length, flags = _unpack_header(data, at)
    if magic != _MAGIC:
        raise WireError("not a horovod_compress payload")
    if version != VERSION:
        raise WireError(f"wire version {version}, this rank has {VERSION}; install the same horovod-compress everywhere")
    body = at + HEADROOM
    end = at + _padded(HEADROOM + length, found_step)
    if end > len(data):
        raise WireError("cut off in its body")
    if kernels.host.checksum(data[at + _CHECKED : end]) != checksum:
        raise WireError("its checksum does not fit: it was changed on the way")
    if id != number or found_digest != digest:
        raise WireError("made for another compressor, configuration or tensor")
    if found_step != step:
        raise WireError(f"of step {found_step}, this rank is at step {step}; was a state loaded on some ranks only?")
    if flags > _NOT_FINITE or (end > body + length and data[end - 1]):
        raise WireError("unknown flags")
    return data[body : body + length], end, flags


def _padded(length: int, step: int) -> int:
    """The length of a frame with its padding: at most one zero byte, so that lengths are odd in odd steps and even in even ones. Frames of a tensor
    in successive steps then never have the same length. Otherwise Horovod would answer an allgather of the same shapes from its response cache, which
    crashes a rank that has called hvd.join(); now that rank gets a proper error."""
    return length + ((length + step) & 1)
