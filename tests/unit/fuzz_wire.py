"""Hostile payloads, by the hundred thousand: each must raise WireError or decode to what the reference decodes it to.

    python tests/unit/fuzz_wire.py COUNT
"""
import struct
import sys

import native_under_test  # noqa: F401
import numpy as np

from horovod_compress import kernels, wire
from horovod_compress.compressors.base import Sparse
from horovod_compress.kernels import reference

NUMBER, DIGEST, STEP = 1, 0x12345678, 7


def frame_of(rng, numel):
    count = int(rng.integers(0, min(numel, 40) + 1))
    indices = np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)
    kind = str(rng.choice(["fp32", "fp16", "bf16"]))
    values = reference._round(rng.standard_normal(count).astype(np.float32), kind)
    return wire.encode(Sparse(indices, values, kind), NUMBER, DIGEST, STEP)


def mutate(rng, frame, other):
    frame = frame.copy()
    how = rng.integers(0, 9)
    if how == 0:  # flip bits
        for at in rng.integers(0, 8 * len(frame), rng.integers(1, 8)):
            frame[at // 8] ^= 1 << (at % 8)
    elif how == 1:  # truncate
        frame = frame[: rng.integers(0, len(frame))]
    elif how == 2:  # extend
        frame = np.concatenate([frame, rng.integers(0, 256, rng.integers(1, 50)).astype(np.uint8)])
    elif how == 3:  # noise
        frame = rng.integers(0, 256, rng.integers(0, 200)).astype(np.uint8)
    elif how == 4:  # another tensor's frame
        frame = other.copy()
    elif how == 5:  # a header that lies
        at = rng.integers(0, wire.HEADER_SIZE)
        frame[at] = rng.integers(0, 256)
    else:  # a changed header or body under a valid checksum: the decoder itself is on its own
        low = 12 if how == 6 else wire.HEADER_SIZE
        for at in rng.integers(low, max(len(frame), low + 1), rng.integers(1, 6)):
            if at < len(frame):
                frame[at] = rng.integers(0, 256)
        if how == 8:
            struct.pack_into("<I", frame, 16, int(rng.integers(0, 60)))
        if len(frame) >= wire.HEADER_SIZE:
            struct.pack_into("<I", frame, wire._CRC_AT, wire._checksum(frame))
    return frame


def main(count):
    rng = np.random.default_rng(0)
    refused = decoded = 0
    numel = 1
    for i in range(count):
        if i % 50 == 0:
            numel = int(10 ** rng.uniform(0, 4))
            originals = [frame_of(rng, numel) for _ in range(4)]
        original = originals[i % 4]
        frame = mutate(rng, original, frame_of(rng, numel + 1) if i % 7 == 0 else originals[(i + 1) % 4])
        try:
            (payload,) = wire.decode(frame, 1, NUMBER, DIGEST, STEP, numel)
        except wire.WireError:
            refused += 1
            continue
        decoded += 1
        body_length = struct.unpack_from("<I", frame, 20)[0]
        body = frame[wire.HEADER_SIZE : wire.HEADER_SIZE + body_length]
        indices, values = reference.decode_sparse(body, len(payload.indices), numel, payload.kind)
        assert np.array_equal(indices, payload.indices) and values.tobytes() == payload.values.tobytes()
        assert (np.diff(indices.astype(np.int64)) > 0).all() and (len(indices) == 0 or indices[-1] < numel)
    print(f"{kernels.backend}: {count} hostile payloads, {refused} refused, {decoded} decoded as the reference does")
    assert refused > count // 2 and decoded > 0


main(int(sys.argv[1]))
