"""Hostile payloads, by the hundred thousand, to every compressor that gathers: each must be refused
with a ValueError, or decode to what the reference kernels decode it to.

    python tests/unit/fuzz_wire.py COUNT
"""

import contextlib
import random
import struct
import sys

import native_under_test  # noqa: F401
import numpy as np

import horovod_compress as hc
from horovod_compress import kernels
from horovod_compress.compressors.base import Step
from horovod_compress.engine.dense_policy import compressor_for
from horovod_compress.engine.split import SelectAgain, split_of
from horovod_compress.kernels import HEADROOM, Encoded, new_body, reference
from horovod_compress.protocol import wire

DIGEST, STEP = 0x12345678, 7
VARIANTS = [
    "topk:values=fp16",
    "topk:values=bf16",
    "topk:values=2bit,chunk=64",
    "dgc:values=power",
    "topk:values=sign",
    "variance:tau=0.5",
    "qsgd:bits=2",
    "qsgd:coding=fixed,bucket_size=10",
    "qsgd:coding=fixed,levels=5,norm=max",
]
SPECS = [
    id for id, about in hc.available().items() if about["collective"] == "allgather"
] + VARIANTS
TOPK, RANKS = hc.get_compressor("topk"), 3  # of split entries
INTERESTING = [0, 1, 2, 0x7F, 0x80, 0xFF]


def frames_of(compressor, numel, rng):
    """Frames of a few gradients, as this compressor makes them."""
    for _ in range(4):
        state = compressor.init("t", (numel,))
        grad = (rng.standard_normal(numel) * (rng.random(numel) < 0.3)).astype(np.float32)
        payload = compressor.encode(grad, state, Step(STEP, rank=0, size=2))
        if isinstance(payload, Encoded):  # not a step that goes dense
            yield bytes(wire.seal([payload], compressor.traits.number, DIGEST, STEP, 0))


def mutate(rng, frame, other):
    """A hostile relative of a frame. Half of them have a valid checksum: then the decoder is on its
    own."""
    frame = bytearray(frame)
    how = rng.randrange(12)
    if how == 0:
        frame = frame[: rng.randrange(len(frame))]
    elif how == 1:
        frame += rng.randbytes(rng.randrange(1, 50))
    elif how == 2:
        return rng.randbytes(rng.randrange(200))
    elif how == 3:
        frame = bytearray(other)
    elif how == 4:
        frame[rng.randrange(HEADROOM)] = rng.randrange(256)
    elif how == 5:
        flip(rng, frame, 0)
    elif how == 6:
        body = rng.randbytes(rng.randrange(60))
        frame[HEADROOM:] = body + bytes((HEADROOM + len(body) + STEP) % 2)
        struct.pack_into("<I", frame, 16, len(body))
    elif how == 7:
        # Cut or lengthened, and the header knows.
        body = frame[HEADROOM : HEADROOM + struct.unpack_from("<I", frame, 16)[0]]
        body = (
            body[: rng.randrange(len(body) + 1)]
            if rng.random() < 0.5
            else body + rng.randbytes(rng.randrange(9))
        )
        frame[HEADROOM:] = body + bytes((HEADROOM + len(body) + STEP) % 2)
        struct.pack_into("<I", frame, 16, len(body))
    elif how == 8 and len(frame) > HEADROOM:  # the body's head
        frame[HEADROOM + rng.randrange(min(16, len(frame) - HEADROOM))] = rng.choice(INTERESTING)
    elif len(frame) > HEADROOM:
        flip(rng, frame, HEADROOM)
    if how > 5:
        checked = np.frombuffer(frame, np.uint8)[8:]
        struct.pack_into("<I", frame, 4, reference.frames.checksum(checked))
    return bytes(frame)


def flip(rng, frame, low):
    for _ in range(rng.randrange(1, 6)):
        frame[rng.randrange(low, len(frame))] ^= 1 << rng.randrange(8)


@contextlib.contextmanager
def reference_kernels():
    """Compressors use the reference meanwhile."""
    kept, kernels.cpu = kernels.cpu, reference
    yield
    kernels.cpu = kept


def added(compressor, body, numel):
    """(whether it is finite, the result) of adding a body to a gradient; (None, what it was) where
    it is refused."""
    out = np.linspace(-1, 1, numel, dtype=np.float32)
    try:
        return compressor.add(body, out, 0.5), out
    except ValueError:
        return None, out


def within_norms(out, body, bucket):
    """Whether no element that `added` has made has moved by more than its bucket's norm says."""
    buckets = -(-len(out) // bucket)
    norms = np.repeat(body[1 : 1 + 4 * buckets].copy().view(np.float32), bucket)[: len(out)]
    moved = np.abs(out - np.linspace(-1, 1, len(out), dtype=np.float32))
    return (moved <= 0.5 * norms + 1e-6 * (1 + norms)).all()


def entries_of(spec, sizes, rank, rng):
    """What a rank brings to a step of split entries, of tensors {name: elements}."""
    compressor, step, entries = hc.get_compressor(spec), Step(STEP, rank, RANKS), []
    for name, numel in sizes.items():
        grad = rng.standard_normal(numel).astype(np.float32)
        payload = compressor.encode(grad, compressor.init(name, (numel,)), step)
        entries.append(
            SelectAgain(
                payload,
                split_of(compressor, numel, step),
                grad,
                np.zeros(numel, np.float32),
                compressor.traits.number,
                DIGEST,
            )
        )
    return entries


def outcome(entries, arrived, sums):
    """What rank 0 makes of what comes to it as an owner, and of all ranks' sums, its own put in; or
    that it refuses those."""
    for entry in entries:
        entry.grad.fill(0)
    hop = SelectAgain.exchange(entries, Step(STEP, 0, RANKS, gain=1 / RANKS))
    next(hop)
    own = hop.send(arrived).array
    try:
        hop.send(np.concatenate([own, *sums]))
    except wire.WireError:
        return None
    except StopIteration as stop:
        parts = [part for arrived in stop.value for part in arrived.result.bodies or ()]
        return own.tobytes(), [added(TOPK, body, last - first) for first, last, body in parts]


def fuzz_split(count):
    rng, read = random.Random(1), 0
    for i in range(count):
        if i % 100 == 0:
            sizes = {name: int(10 ** rng.uniform(0.5, 2.5)) for name in "ab"}
            values = rng.choice(["fp32", "fp16", "power", "2bit", "sign"])
            spec = f"topk:min_numel=0,ratio=0.2,exchange=split,values={values}"
            ranks = [
                entries_of(spec, sizes, rank, np.random.default_rng([i, rank]))
                for rank in range(RANKS)
            ]
            hops = [
                SelectAgain.exchange(entries, Step(STEP, rank, RANKS, gain=1 / RANKS))
                for rank, entries in enumerate(ranks)
            ]
            sent = [
                np.split(first.array, np.cumsum(first.splits))[:RANKS] for first in map(next, hops)
            ]
            sums = [
                hop.send([parts[owner] for parts in sent]).array for owner, hop in enumerate(hops)
            ]
        arrived, others = [parts[0] for parts in sent], sums[1:]  # new lists
        hostile, foreign = (others, sums[0]) if i % 2 else (arrived, sent[0][1])
        hostile[1] = np.frombuffer(mutate(rng, hostile[1].tobytes(), foreign.tobytes()), np.uint8)
        found = outcome(ranks[0], arrived, others)
        with reference_kernels():
            expected = outcome(ranks[0], arrived, others)
        assert repr(found) == repr(expected), (spec, sizes, hostile[1].tobytes().hex())
        read += found is not None
    assert 0 < read < count, read


def opened(module, data, tensors):
    """What a frame of so many tensors holds, or that it is refused."""
    try:
        bodies, finite = module.open_frames(
            data, frames=1, tensors=tensors, number=1, digest=DIGEST, step=STEP
        )
    except ValueError as error:
        return str(error)
    return [[body.tobytes() for body in its] for its in bodies], finite


def fuzz_groups(count):
    """Frames of several tensors."""
    rng, read = random.Random(2), 0
    for _ in range(count):
        groups = [
            [new_body(rng.randbytes(rng.randrange(20))) for _ in range(tensors)]
            for tensors in (3, rng.randrange(1, 6))
        ]
        frame, other = (
            wire.seal([Encoded(buffer, 1) for buffer in group], 1, DIGEST, STEP, 0).tobytes()
            for group in groups
        )
        data = np.frombuffer(mutate(rng, frame, other), np.uint8)
        found = opened(kernels.cpu, data, 3)
        assert found == opened(reference, data, 3), data.tobytes().hex()
        read += isinstance(found, tuple)
    assert 0 < read < count, read


def main(count):
    rng = random.Random(0)
    frames, forged, decoded = {}, 0, dict.fromkeys(SPECS, 0)
    for i in range(count):
        if i % 500 == 0:
            numel = int(10 ** rng.uniform(0, 3))
            name = SPECS[i // 500 % len(SPECS)]
            known = hc.available()[name.partition(":")[0]]["options"]
            options = ",".join(
                o for o in ("min_numel=0", "ratio=0.2") if o.partition("=")[0] in known
            )
            configured = hc.get_compressor(name + ("," if ":" in name else ":") + options)
            compressor, other = (
                compressor_for(configured, "t", (size,)) for size in (numel, numel + 1)
            )
            frames = list(frames_of(compressor, numel, np.random.default_rng(i)))
            others = list(frames_of(other, numel + 1, np.random.default_rng(i)))
        frame = mutate(rng, frames[i % 4], others[i % 4])
        data = np.frombuffer(frame, np.uint8)
        try:
            ((body,),), _ = wire.unseal(data, 1, 1, compressor.traits.number, DIGEST, STEP)
        except wire.WireError:
            continue
        forged += 1
        finite, out = added(compressor, body, numel)
        with reference_kernels():
            expected_finite, expected = added(compressor, body, numel)
        assert finite == expected_finite, (
            name,
            numel,
            finite,
            expected_finite,
            body.tobytes().hex(),
        )
        assert np.array_equal(out, expected, equal_nan=True), (name, numel, body.tobytes().hex())
        assert (
            not finite or name[:4] != "qsgd" or within_norms(out, body, compressor.bucket_size)
        ), (name, body.tobytes().hex())
        decoded[name] += finite is not None
    print(
        f"{kernels.backend}: {count} hostile payloads, {forged} reached a decoder, "
        f"{sum(decoded.values())} decoded as the reference does"
    )
    assert forged > count // 4 and min(decoded.values()) > 0, decoded


fuzz_split(int(sys.argv[1]) // 20)
fuzz_groups(int(sys.argv[1]) // 5)
main(int(sys.argv[1]))
