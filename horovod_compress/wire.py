"""Payloads as self-checking frames of bytes; docs/wire-format.md describes every field.

A frame carries its own length, because an allgather joins the frames of all ranks, and a checksum over all of itself:
whatever is cut off, changed or meant for another tensor is a WireError, never a wrong result.
"""
import struct
import zlib

import numpy as np

from . import kernels
from .compressors.base import Sparse

VERSION = 1
_MAGIC = b"hC"
_HEADER = struct.Struct("<2sBBBBxxIIIII")  # magic version id kind flags, digest step count body-length crc
HEADER_SIZE = _HEADER.size
_CRC_AT = HEADER_SIZE - 4
_KINDS = ("fp32", "fp16", "bf16")
_NOT_FINITE = 1


class WireError(ValueError):
    """A payload that is not what this rank expects: truncated, changed, or of another tensor, step or configuration."""


def encode(payload, number, digest, step):
    """The frame of a Sparse payload as a uint8 array. number: the compressor's id on the wire; digest: uint32 of
    configuration and tensor; step: its number, the low 32 bits travel."""
    body = kernels.encode_sparse(payload.indices, payload.values, payload.kind)
    frame = np.zeros(_padded(HEADER_SIZE + len(body), step), np.uint8)
    flags = 0 if payload.finite else _NOT_FINITE
    _HEADER.pack_into(
        frame, 0, _MAGIC, VERSION, number, _KINDS.index(payload.kind), flags,
        digest, step & 0xFFFFFFFF, len(payload.indices), len(body), 0,
    )
    frame[HEADER_SIZE : HEADER_SIZE + len(body)] = body
    struct.pack_into("<I", frame, _CRC_AT, _checksum(frame))
    return frame


def decode(data, frames, number, digest, step, numel):
    """The Sparse payloads in `data`, a uint8 array that joins exactly `frames` frames, one a rank.

    Raises WireError, naming the rank, for anything else.
    """
    payloads, at = [], 0
    for rank in range(frames):
        try:
            payload, at = _decode_one(data, at, number, digest, step, numel)
        except ValueError as error:
            raise WireError(f"payload of rank {rank}: {error}") from None
        payloads.append(payload)
    if at != len(data):
        raise WireError(f"{len(data) - at} bytes follow the payload of the last of {frames} ranks")
    return payloads


def _decode_one(data, at, number, digest, step, numel):
    if len(data) - at < HEADER_SIZE:
        raise WireError("cut off in its header")
    magic, version, id, kind, flags, its_digest, its_step, count, length, crc = _HEADER.unpack_from(data, at)
    if magic != _MAGIC:
        raise WireError("not a horovod_compress payload")
    if version != VERSION:
        raise WireError(f"wire version {version}, this rank has {VERSION}; install the same horovod-compress everywhere")
    end = at + _padded(HEADER_SIZE + length, its_step)
    if end > len(data):
        raise WireError("cut off in its body")
    frame = data[at:end]
    if _checksum(frame) != crc:
        raise WireError("its checksum does not fit: it was changed on the way")
    if id != number or its_digest != digest:
        raise WireError("made for another compressor, configuration or tensor")
    if its_step != step & 0xFFFFFFFF:
        raise WireError(f"of step {its_step}, this rank is at step {step}; was a state loaded on some ranks only?")
    body = frame[HEADER_SIZE : HEADER_SIZE + length]
    if kind >= len(_KINDS) or flags > _NOT_FINITE or frame[6] or frame[7] or frame[HEADER_SIZE + length :].any() or (flags and count):
        raise WireError("unknown flags")
    indices, values = kernels.decode_sparse(body, count, numel, _KINDS[kind])
    return Sparse(indices, values, _KINDS[kind], finite=not flags & _NOT_FINITE), end


def _padded(length, step):
    """One zero byte more where that makes the length odd in odd steps and even in even ones.

    Two frames of a tensor in a row then never have one length. Horovod would answer an allgather of the same shapes from
    its response cache, and a rank that has called hvd.join() dies of that; otherwise it gets a proper error.
    """
    return length + ((length + step) & 1)


def _checksum(frame):
    return zlib.crc32(frame[HEADER_SIZE:], zlib.crc32(frame[:_CRC_AT]))
