"""The wire format: round trips, size against entropy, stored frames, and hostile payloads."""
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod_compress import WireError, kernels, wire
from horovod_compress.compressors.base import Sparse

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_round_trip_of_several_ranks(data):
    numel = data.draw(st.integers(0, 5000))
    step = data.draw(st.integers(0, 2**34))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    payloads, frames = [], []
    for _ in range(data.draw(st.integers(1, 5))):
        finite = data.draw(st.booleans())
        count = data.draw(st.integers(0, numel if finite else 0))
        indices = np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)
        kind = data.draw(st.sampled_from(["fp32", "fp16", "bf16"]))
        values = kernels.take(indices, rng.standard_normal(numel).astype(np.float32), None, kind, False)[0]
        payloads.append(Sparse(indices, values, kind, finite))
        frames.append(wire.encode(payloads[-1], 1, 5, step))
    decoded = wire.decode(np.concatenate(frames), len(frames), 1, 5, step, numel)
    for sent, got in zip(payloads, decoded):
        np.testing.assert_array_equal(sent.indices, got.indices)
        np.testing.assert_array_equal(sent.values, got.values)
        assert (sent.kind, sent.finite) == (got.kind, got.finite)


@pytest.mark.parametrize("density", [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1])
def test_index_coding_is_within_ten_percent_of_entropy(density):
    rng = np.random.default_rng(1)
    d = 2_000_000
    indices = np.flatnonzero(rng.random(d) < density).astype(np.uint32)
    k = len(indices)
    body = kernels.encode_sparse(indices, np.zeros(k, np.float32), "fp16")
    bits = 8 * (len(body) - 2 * k)
    assert bits <= 1.10 * k * (math.log2(d / k) + 1.44)


def test_extreme_indices():
    """The largest tensor that uint32 indices reach, and runs of neighbours."""
    numel = 2**32 - 1
    for indices in ([0], [numel - 1], [0, numel - 1], list(range(100)), [5, 6, 7, numel - 2, numel - 1]):
        indices = np.array(indices, np.uint32)
        body = kernels.encode_sparse(indices, np.ones(len(indices), np.float32), "bf16")
        assert len(body) < 1 + 2 * len(indices) + 40 + 8 * len(indices)
        got, _ = kernels.decode_sparse(body, len(indices), numel, "bf16")
        np.testing.assert_array_equal(got, indices)


def test_old_frames_stay_readable():
    """Frames as version 1 wrote them: three entries at each width."""
    indices = np.array([2, 3, 1000], np.uint32)
    for stored in STORED.values():
        frame = np.frombuffer(bytes.fromhex(stored), np.uint8)
        (payload,) = wire.decode(frame, 1, 1, 0xDEADBEEF, 3, 4096)
        np.testing.assert_array_equal(payload.indices, indices)
        np.testing.assert_array_equal(payload.values, np.array([1.5, -2.0, 0.25], np.float32))
        np.testing.assert_array_equal(wire.encode(payload, 1, 0xDEADBEEF, 3), frame)


STORED = {
    "fp32": "6843010100000000efbeadde0300000003000000110000001338f9fd080000c03f000000c00000803e04001c39",
    "fp16": "6843010101000000efbeadde03000000030000000b0000000d6702e708003e00c0003404001c39",
    "bf16": "6843010102000000efbeadde03000000030000000b000000e548eecf08c03f00c0803e04001c39",
}


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda f: f[:10], "header"),
        (lambda f: f[:-1], "body"),
        (lambda f: np.concatenate([f, f[:1]]), "follow"),
        (lambda f: f[::-1].copy(), "not a horovod_compress payload"),
        (lambda f: with_byte(f, 2, 9), "wire version 9"),
        (lambda f: with_byte(f, 30, f[30] ^ 1), "checksum"),
    ],
)
def test_errors_name_the_rank_and_the_trouble(change, words):
    payload = Sparse(np.array([1, 5], np.uint32), np.ones(2, np.float32), "fp32")
    good = wire.encode(payload, 1, 5, 0)
    with pytest.raises(WireError, match=words) as error:
        wire.decode(np.concatenate([good, change(good)]), 2, 1, 5, 0, 10)
    assert "rank 1" in str(error.value) or "of 2 ranks" in str(error.value)


def test_frames_of_another_configuration_or_step():
    frame = wire.encode(Sparse(np.array([1], np.uint32), np.ones(1, np.float32), "fp32"), 1, 5, 0)
    for number, digest, step, words in ((2, 5, 0, "another"), (1, 6, 0, "another"), (1, 5, 2, "step 0.*at step 2")):
        with pytest.raises(WireError, match=words):
            wire.decode(frame, 1, number, digest, step, 10)


def test_consecutive_frames_differ_in_length():
    payload = Sparse(np.array([1], np.uint32), np.ones(1, np.float32), "fp32")
    lengths = [len(wire.encode(payload, 1, 5, step)) for step in range(4)]
    assert all(a != b for a, b in zip(lengths, lengths[1:]))


def with_byte(frame, at, value):
    frame = frame.copy()
    frame[at] = value
    return frame


def test_a_hundred_thousand_hostile_payloads():
    done = subprocess.run([sys.executable, HERE / "fuzz_wire.py", "100000"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
