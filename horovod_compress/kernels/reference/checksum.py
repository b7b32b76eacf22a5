"""The checksum of frames: each of the 16 words of a line feeds its own stream, and the streams are
mixed in the end."""

import numpy as np

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
    with np.errstate(over="ignore"):
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
