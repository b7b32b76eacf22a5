"""The wire format: round trips, size against entropy, stored frames, and hostile payloads."""

import math
import pathlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_tensor import cpu, reference
from ranks import gradients, ranks_of
from tiers import examples

from horovod_compress import WireError, get_compressor
from horovod_compress.engine.lockstep import run_step
from horovod_compress.kernels import HEADROOM, Encoded, new_body
from horovod_compress.kernels.reference.columns import to_columns
from horovod_compress.kernels.reference.sparse import code_values
from horovod_compress.protocol import wire
from horovod_compress.transport.loopback import Loopback

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
KINDS = ("fp32", "fp16", "bf16", "sign", "power", "2bit")
BOTH = pytest.mark.parametrize("module", [cpu, reference], ids=["host", "reference"])


def frame_of(
    body=b"12345", number=1, digest=5, step=0, finite=True, frame_length=wire.exact, rank=0
):
    encoded = Encoded(new_body(body), 1, finite)
    return wire.seal([encoded], number, digest, step, rank, frame_length)


def group_frame(*bodies, finite=None, rank=0, padding=0):
    """The frame of tensors with these bodies."""
    finite = finite or [True] * len(bodies)
    payloads = [Encoded(new_body(body), 1, whether) for body, whether in zip(bodies, finite)]
    return wire.seal(payloads, 1, 5, 0, rank, lambda length: length + padding)


@examples(200)
@given(
    st.lists(
        st.tuples(st.binary(max_size=100), st.booleans(), st.integers(0, 70)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**34),
)
def test_frames_of_several_ranks_come_back(payloads, step):
    """With any padding."""
    frames = [
        frame_of(
            body,
            step=step,
            finite=finite,
            frame_length=lambda length, padding=padding: length + padding,
            rank=rank,
        )
        for rank, (body, finite, padding) in enumerate(payloads)
    ]
    assert [len(frame) for frame in frames] == [
        HEADROOM + len(body) + padding for body, _, padding in payloads
    ]
    bodies, finite = wire.unseal(np.concatenate(frames), len(frames), 1, 1, 5, step)
    assert [body.tobytes() for (body,) in bodies] == [body for body, _, _ in payloads]
    assert finite == [all(finite for _, finite, _ in payloads)]


@BOTH
@examples(100)
@given(st.data(), st.integers(2, 5), st.integers(1, 3))
def test_frames_of_groups_come_back(module, data, tensors, ranks):
    """Each tensor's body from each rank, in the frame's memory, and whether it is finite on all."""
    tensor = st.tuples(st.binary(max_size=100), st.booleans())
    group = st.lists(tensor, min_size=tensors, max_size=tensors)
    given = [data.draw(group) for _ in range(ranks)]
    padding = data.draw(st.integers(0, 70))
    frames = [
        group_frame(*bodies, finite=finite, rank=rank, padding=padding)
        for rank, (bodies, finite) in enumerate(zip(*each) for each in given)
    ]
    for frame, its in zip(frames, given):
        needed = HEADROOM + 4 * tensors + sum(len(body) for body, _ in its)
        assert len(frame) == needed + padding
    joined = np.concatenate(frames)
    bodies, finite = module.open_frames(
        joined, frames=ranks, tensors=tensors, number=1, digest=5, step=0
    )
    assert [[body.tobytes() for body in its] for its in bodies] == [
        [body for body, _ in its] for its in given
    ]
    assert finite == [all(its[i][1] for its in given) for i in range(tensors)]
    assert all(not len(body) or np.shares_memory(body, joined) for its in bodies for body in its)


def test_the_frame_of_one_tensor_is_made_in_its_buffer():
    for padding, in_buffer in ((0, True), (1, True), (2, False)):
        buffer = new_body(b"12345")
        frame = wire.seal([Encoded(buffer, 1)], 1, 5, 0, 0, lambda length: length + padding)
        assert np.shares_memory(frame, buffer) == in_buffer


@BOTH
@pytest.mark.parametrize(
    "entries, says",
    [
        ([2, 3, 1], "not of the length that the table"),
        ([1, 3, 0], "not of the length that the table"),
        ([2, 3, 2**31 - 1], "not of the length that the table"),
        ([2**31 - 1, 2**31 - 1, 2**31 - 1], "not of the length that the table"),
        ([1, 3, 1], None),
        ([5, 0, 0], None),
    ],
)
def test_a_table_that_does_not_add_up_names_its_rank(module, entries, says):
    frame = group_frame(b"1", b"234", b"5", rank=1)
    frame[HEADROOM : HEADROOM + 12].view("<u4")[:] = [2 * entry for entry in entries]
    frames = np.concatenate([group_frame(b"", b"", b""), checked(frame)])
    options = dict(frames=2, tensors=3, number=1, digest=5, step=0)
    if says:
        with pytest.raises(ValueError, match=f"payload of rank 1: {says}"):
            module.open_frames(frames, **options)
    else:
        (_, bodies), _ = module.open_frames(frames, **options)
        assert [len(body) for body in bodies] == entries


@BOTH
@pytest.mark.parametrize("tensors, says", [(2, "not of the length"), (4, "shorter than the table")])
def test_the_frame_of_another_number_of_tensors_is_refused(module, tensors, says):
    frame = group_frame(b"1", b"", b"")
    with pytest.raises(ValueError, match=f"payload of rank 0: {says}"):
        module.open_frames(frame, frames=1, tensors=tensors, number=1, digest=5, step=0)


@examples(200)
@given(st.lists(st.integers(HEADROOM, 10**6), min_size=1, max_size=100))
def test_steady_lengths_hold_every_frame(needed):
    frame_length = wire.Steady()
    assert all(frame_length(length) >= length for length in needed)


@examples(100)
@given(st.integers(1000, 10**6), st.floats(0, 0.5), st.integers(0, 2**32))
def test_steady_lengths_add_little(length, spread, seed):
    """Whatever varies how much: in the long run at most an eighth, and what a window sees only when
    it is over."""
    rng, frame_length = np.random.default_rng(seed), wire.Steady()
    needed = [int(length * (1 - spread * rng.random())) for _ in range(500)]
    assert sum(map(frame_length, needed)) <= 1.15 * sum(needed)


@pytest.mark.parametrize(
    "lengths",
    [
        lambda rng: 1445,
        lambda rng: 1440 + int(rng.integers(6)),
        # A topk whose threshold finds too few now and then.
        lambda rng: 13250 - int(rng.integers(60)) - (2000 if rng.random() < 0.1 else 0),
    ],
)
def test_lengths_that_vary_little_stay_the_same(lengths):
    rng, frame_length = np.random.default_rng(0), wire.Steady()
    totals = [frame_length(lengths(rng)) for _ in range(1000)]
    assert len(set(totals[16:])) == 1


def test_lengths_that_never_differ_are_not_padded():
    """Of bf16 and natural, whose payloads are as long as the tensor and should not be copied."""
    frame_length = wire.Steady()
    assert {frame_length(1_000_003) for _ in range(50)} == {1_000_003}


def test_lengths_follow_payloads_that_shrink():
    """adacomp's do in the first hundred steps."""
    frame_length = wire.Steady()
    totals = [frame_length(14000 + int(20000 * 0.95**step)) for step in range(300)]
    assert totals[-1] <= 1.02 * 14000


def values_for(rng, kind, count):
    """Values that `kind` can express, and the scales it needs for that."""
    values = rng.standard_normal(count).astype(np.float32)
    if kind == "power":
        scale = 2.0 ** int(rng.integers(-100, 100))
        return np.copysign(
            np.float32(scale) * np.float32(0.5) ** rng.integers(0, 8, count), values
        ).astype(np.float32), (scale,)
    return code_values(values, kind)


@examples(300)
@given(st.integers(0, 5000), st.sampled_from(KINDS), st.integers(0, 2**32), st.data())
def test_sparse_bodies_come_back(numel, kind, seed, data):
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(numel, data.draw(st.integers(0, numel)), replace=False)).astype(
        np.uint32
    )
    values, scales = values_for(rng, kind, len(indices))
    body = cpu.encode_sparse(indices, values, kind=kind, scales=scales).buffer[HEADROOM:-1]
    its_indices, its_values = cpu.decode_sparse(body, numel=numel)
    np.testing.assert_array_equal(its_indices, indices)
    np.testing.assert_array_equal(its_values, values)


@pytest.mark.parametrize("density", [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1])
@pytest.mark.parametrize(
    "kind, bits", [("fp32", 32), ("fp16", 16), ("bf16", 16), ("sign", 1), ("power", 4), ("2bit", 2)]
)
def test_index_coding_is_within_ten_percent_of_entropy(density, kind, bits):
    rng = np.random.default_rng(1)
    d = 2_000_000
    indices = np.flatnonzero(rng.random(d) < density).astype(np.uint32)
    k = len(indices)
    scales = (1.0,) * {"sign": 1, "power": 1, "2bit": 4}.get(kind, 0)
    buffer = cpu.encode_sparse(indices, np.ones(k, np.float32), kind=kind, scales=scales).buffer
    assert 8 * (len(buffer) - HEADROOM - 1) - bits * k <= 1.10 * k * (math.log2(d / k) + 1.44)


@pytest.mark.parametrize("k, places", [(8, 4096), (64, 4096), (64, 512), (32, 4096)])
@pytest.mark.parametrize("where", ["first", "last", "by turns", "even", "random"])
def test_an_index_in_a_chunk_takes_no_more_bits_than_its_place(k, places, where):
    """The largest of each chunk, wherever they are: from k = 8 on, never more than log2 of the
    chunk's length."""
    rng, chunks = np.random.default_rng(0), 50
    inside = {
        "first": np.arange(k),
        "last": np.arange(places - k, places),
        "even": np.arange(k) * (places // k),
    }
    chosen = [
        np.sort(rng.choice(places, k, replace=False))
        if where == "random"
        else inside.get(where, inside["last" if c % 2 else "first"])
        for c in range(chunks)
    ]
    indices = np.concatenate([places * c + at for c, at in enumerate(chosen)]).astype(np.uint32)
    scales = (1.0,) * 4
    body = cpu.encode_sparse(
        indices, np.ones(k * chunks, np.float32), kind="2bit", scales=scales
    ).buffer[HEADROOM:-1]
    assert len(body) - 6 - 16 - k * chunks // 4 <= k * chunks * math.log2(places) / 8


def test_extreme_indices():
    """The largest tensor that uint32 indices reach, and runs of neighbours."""
    numel = 2**32 - 1
    for indices in (
        [0],
        [numel - 1],
        [0, numel - 1],
        list(range(100)),
        [5, 6, 7, numel - 2, numel - 1],
    ):
        indices = np.array(indices, np.uint32)
        body = cpu.encode_sparse(indices, np.ones(len(indices), np.float32), kind="bf16").buffer[
            HEADROOM:-1
        ]
        assert len(body) < 6 + 2 * len(indices) + 40 + 8 * len(indices)
        np.testing.assert_array_equal(cpu.decode_sparse(body, numel=numel)[0], indices)


def test_old_frames_stay_readable():
    """Frames as version 4 wrote them: what they add to a gradient of 12 elements, and that they are
    framed so now."""
    for spec, (stored, expected) in STORED.items():
        compressor = get_compressor(spec)
        frame = np.frombuffer(bytes.fromhex(stored), np.uint8)
        ((body,),), (finite,) = wire.unseal(frame, 1, 1, compressor.traits.number, 0xDEADBEEF, 3)
        out = np.zeros(12, np.float32)
        assert finite and compressor.add(body, out, 1.0)
        np.testing.assert_array_equal(out, np.array(expected, np.float32))
        np.testing.assert_array_equal(
            wire.seal([Encoded(new_body(body), 1)], compressor.traits.number, 0xDEADBEEF, 3, 0),
            frame,
        )


STORED = {
    "topk:values=fp32": (
        "6843040610db0af3efbeadde0300000014000000000000000300000000010000c03f000000c00000803e0046",
        [0, 0, 1.5, -2, 0, 0, 0, 0, 0, 0, 0.25, 0],
    ),
    "topk:values=fp16": (
        "684304068e91b786efbeadde030000000e00000000000000030000000101003e00c000340046",
        [0, 0, 1.5, -2, 0, 0, 0, 0, 0, 0, 0.25, 0],
    ),
    "topk:values=bf16": (
        "684304065cff8f36efbeadde030000000e00000000000000030000000201c03f00c0803e0046",
        [0, 0, 1.5, -2, 0, 0, 0, 0, 0, 0, 0.25, 0],
    ),
    "topk:values=2bit": (
        "684304067cb5c2a6efbeadde0300000019000000000000000300000005010000c0bf000000000000803f00004040230046",
        [0, 0, 3, -1.5, 0, 0, 0, 0, 0, 0, 1, 0],
    ),
    "strom": (
        "684304039533cc2eefbeadde030000000d000000000000000300000003010000003f020046",
        [0, 0, 0.5, -0.5, 0, 0, 0, 0, 0, 0, 0.5, 0],
    ),
    "variance": (
        "68430405f2fe657eefbeadde030000000e000000000000000300000004010000004081030046",
        [0, 0, 1, -2, 0, 0, 0, 0, 0, 0, 0.25, 0],
    ),
    "randomk:ratio=0.25": (
        "68430407bd9c2411efbeadde030000001400000000000000977fc4a5f29992c00000c03f0000000000000000",
        [0, 0, 1.5, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    ),
    "bf16": (
        "68430410eca87176efbeadde03000000180000000000000000000000c03f00c0000000000000000000000000803e0000",
        [0, 0, 1.5, -2, 0, 0, 0, 0, 0, 0, 0.25, 0],
    ),
    "efsignsgd": (
        "6843040de38ecd03efbeadde030000000c000000000000000000e03f0000e0bfaa0a0000",
        [1.75, -1.75, 1.75, -1.75, 1.75, -1.75, 1.75, -1.75, 1.75, -1.75, 1.75, -1.75],
    ),
    "onebit": (
        "6843040eba3caba0efbeadde030000000c000000000000000000c03f000000c0aa0a0000",
        [1.5, -2, 1.5, -2, 1.5, -2, 1.5, -2, 1.5, -2, 1.5, -2],
    ),
    "natural": (
        "6843040fb853d289efbeadde030000002400000000000000000000020c000000000000f4010000000000000000000000000000000000000000000000",
        [0, 0, 2, -2, 0, 0, 0, 0, 0, 0, 0.25, 0],
    ),
    "qsgd:coding=fixed": (
        "68430412ebb51b63efbeadde030000001a00000000000000004acc204005efe1f1de7befc1f7de7befbdf7de7befbdf7de7b",
        [0, 0, 1.507481336593628, -2.0099751949310303, 0, 0, 0, 0, 0, 0, 0.1674979329109192, 0],
    ),
    "qsgd:bits=2,bucket_size=6,coding=elias": (
        "68430412f862290defbeadde0300000010000000000000000100004040000000400200000063b702",
        [0, 0, 0, -3, 0, 0, 0, 0, 0, 0, 2, 0],
    ),
}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda f: f[:10], "header"),
        (lambda f: f[:-1], "body"),
        (lambda f: np.concatenate([f, f[:1]]), "follow"),
        (lambda f: f[::-1].copy(), "not a horovod_compress payload"),
        (lambda f: with_byte(f, 2, 9), "wire version 9, this rank has 4"),
        (lambda f: with_byte(f, 26, f[26] ^ 1), "checksum"),
        (lambda f: with_byte(f, 20, 2, checksum=True), "body"),  # padding that is not there
        (lambda f: with_byte(f, 23, 255, checksum=True), "body"),
    ],
)
def test_errors_name_the_rank_and_the_trouble(change, words):
    frames = [frame_of(), change(frame_of(rank=1))]
    with pytest.raises(WireError, match=words) as error:
        wire.unseal(np.concatenate(frames), 2, 1, 1, 5, 0)
    assert "rank 1" in str(error.value) or "of 2 ranks" in str(error.value)


def test_frames_of_another_configuration_or_step():
    for number, digest, step, words in (
        (2, 5, 1, "another"),
        (1, 6, 1, "another"),
        (1, 5, 2, "step 1.*at step 2"),
        (1, 5, 0, "step 1.*at step 0"),
    ):
        with pytest.raises(WireError, match=words):
            wire.unseal(frame_of(step=1), 1, 1, number, digest, step)


class Misplaced(Loopback):
    """What ranks send comes in another order."""

    def _all(self, name, parts):
        return super()._all(name, parts)[::-1]


@pytest.mark.parametrize("exchange", ["gather", "split"])
def test_frames_in_each_others_places_are_noticed(exchange):
    ranks = ranks_of(f"topk:ratio=0.1,min_numel=0,exchange={exchange}", 2, {"w": (40,)}, Misplaced)
    with pytest.raises(WireError, match="payload of rank 0: made by rank 1"):
        run_step(ranks, gradients(0, 2, {"w": (40,)}))


@BOTH
@pytest.mark.parametrize("digest", [5, 2**32 - 2])
@pytest.mark.parametrize("order, where", [((1, 0, 2), 0), ((0, 0, 2), 1), ((0, 1, 1), 2)])
def test_frames_name_their_rank(module, digest, order, where):
    """One in another's place, and one that comes twice."""
    frames = np.concatenate([frame_of(digest=digest, rank=rank) for rank in order])
    with pytest.raises(ValueError, match=f"of rank {where}: made by rank {order[where]}: it was"):
        module.open_frames(frames, frames=3, tensors=1, number=1, digest=digest, step=0)


@pytest.mark.parametrize("bodies", [[bytes(range(200))], [bytes(range(100)), b"", b"12345"]])
def test_every_changed_bit_is_noticed(bodies):
    frame = group_frame(*bodies)
    for bit in range(8 * len(frame)):
        changed = frame.copy()
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            wire.unseal(changed, 1, len(bodies), 1, 5, 0)


class Corrupted(Loopback):
    """Rank 1's body is damaged before its frame gets a valid checksum."""

    def allgather(self, name, payload):
        if self.rank == 1:
            payload = with_byte(payload, HEADROOM + 4, 77, checksum=True)
        return super().allgather(name, payload)


def test_a_body_that_cannot_be_decoded_names_its_rank_too():
    exchanges = ranks_of("topk:ratio=0.1", transport=Corrupted)
    for exchange, named in zip(exchanges, gradients(0)):
        exchange.submit("w", named["w"])
        exchange.flush()
    for exchange in exchanges:
        with pytest.raises(WireError, match="payload of rank 1: unknown kind of values"):
            exchange.finish("w", np.ones(1, np.float32))


@BOTH
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 15, 100, 127, 32767])
@pytest.mark.parametrize("at", [0, 511, 512, 1023, 1099])
def test_levels_of_fixed_width_are_at_most_the_steps(module, steps, at):
    """Of whatever bucket and block; and where one is not, nothing is added."""
    width, bucket, rng = (2 * steps).bit_length(), 1024, np.random.default_rng(steps)
    for level in {-steps, steps, 1 - 2 ** (width - 1), 2 ** (width - 1)}:
        levels = rng.integers(-steps, steps + 1, 1100)
        levels[at] = level
        parts = [
            to_columns(each, width, 2 ** (width - 1) - 1)
            for each in (levels[:bucket], levels[bucket:])
        ]
        body = new_body(bytes([0]), np.ones(2, np.float32), bytes([width] * 2), *parts)[HEADROOM:-1]
        out = np.zeros(1100, np.float32)
        if abs(level) > steps:
            with pytest.raises(ValueError, match="level out of range"):
                module.decode_add_buckets(out, body, steps=steps, bucket=bucket, scale=1.0)
            assert not out.any()
        else:
            assert module.decode_add_buckets(out, body, steps=steps, bucket=bucket, scale=1.0)
            np.testing.assert_allclose(out, levels / steps, rtol=1e-6)


@BOTH
@pytest.mark.parametrize("steps", [1, 2, 100])
def test_levels_in_eliass_code_are_at_most_the_steps(module, steps):
    """Where one is not, nothing is added."""
    grad, out = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
    grad[[3, 500]] = 1, -1
    options = {"bucket": 1000, "l2": False, "limit": 1.0, "key": 1}
    body = module.encode_buckets(grad, steps=steps + 1, **options).body
    assert body[0] == 1, "not in Elias' code"
    with pytest.raises(ValueError, match="level out of range"):
        module.decode_add_buckets(out, body, steps=steps, bucket=1000, scale=1.0)
    assert not out.any()
    assert module.decode_add_buckets(out, body, steps=steps + 1, bucket=1000, scale=1.0)
    assert out[[3, 500]].tolist() == [1, -1]


@BOTH
@pytest.mark.parametrize("kind, scales", [("sign", 1), ("power", 1), ("2bit", 4)])
def test_bits_behind_the_last_value_are_zero(module, kind, scales):
    indices, values = np.array([3, 8, 9], np.uint32), np.ones(3, np.float32)
    body = cpu.encode_sparse(indices, values, kind=kind, scales=[1.0] * scales).buffer[HEADROOM:-1]
    last = 6 + 4 * scales + (kind == "power")
    module.decode_sparse(body, numel=10)
    with pytest.raises(ValueError, match="longer than its values"):
        module.decode_sparse(with_byte(body, last, body[last] | 0x80), numel=10)


def with_byte(frame, at, value, checksum=False):
    """The frame with one byte changed, under a checksum that knows of it or does not."""
    frame = frame.copy()
    frame[at] = value
    return checked(frame) if checksum else frame


def checked(frame):
    """The frame, which was changed, under a checksum that knows of it."""
    struct.pack_into("<I", frame, 4, reference.frames.checksum(frame[8:]))
    return frame


@pytest.mark.parametrize("payloads", [11_000, pytest.param(100_000, marks=pytest.mark.release)])
def test_hostile_payloads(payloads):
    command = [sys.executable, HERE / "fuzz_wire.py", str(payloads)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
