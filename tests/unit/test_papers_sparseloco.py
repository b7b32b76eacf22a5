"""SparseLoCo (Sarfi et al., arXiv 2508.15706), the largest of each chunk in 2 bits, against its
published code; and values=sign and power."""

import math

import numpy as np
import pytest
from paper_checks import alone, decoded, normal, payload_of, seeded  # noqa: F401
from ranks import end_step

from horovod_compress import get_compressor
from horovod_compress.compressors.base import Step

torch = pytest.importorskip("torch")


def published(error, chunk, k):
    """What is sent of an error buffer: torch.topk by chunk, then the statistical quantizer with 4
    bins over 6 standard deviations."""
    chosen = [
        (part.abs().topk(min(k, len(part))).indices + chunk * i)
        for i, part in enumerate(error.split(chunk))
    ]
    at = torch.cat(chosen)
    shift = error[at].double().mean()
    centered = error[at].double() - shift
    scale = 6 * centered.norm() / math.sqrt(len(at) - 1) / 4
    codes = (centered / scale + 2).round().clamp(0, 3).long()
    lookup = torch.zeros(4, dtype=torch.float64).scatter_add_(0, codes, centered) / codes.bincount(
        minlength=4
    ).clamp(min=1)
    sent = torch.zeros_like(error)
    sent[at] = (lookup[codes] + shift).float()
    return sent


@pytest.mark.parametrize("decay", [1, 0.95])
@pytest.mark.parametrize(
    "size, chunk, k",
    [(20_480, 4096, 64), (20_000, 4096, 64), (1000, 4096, 64), (5000, 64, 4), (999, 10, 10)],
)
def test_chunks_in_two_bits_follow_the_published_code(size, chunk, k, decay):
    """e ← β·e + Δ, and e loses what is sent of it."""
    gradients = [normal(size) * np.exp(normal(size)) for _ in range(6)]
    spec = f"topk:min_numel=0,chunk={chunk},k={k},values=2bit,decay={decay}"
    means, state = alone(spec, *gradients)
    error = torch.zeros(size)
    for gradient, mean in zip(gradients, means):
        error = decay * error + torch.from_numpy(gradient)
        sent = published(error, chunk, k)
        error -= sent
        np.testing.assert_allclose(mean, sent.numpy(), rtol=1e-5, atol=1e-7)
        assert len(np.unique(mean[mean != 0])) <= 4
    # What is left decays at a step's end.
    left = decay * error.numpy()
    np.testing.assert_allclose(state["residual"], left, rtol=1e-4, atol=1e-4)


def test_what_is_kept_decays_in_steps_that_succeed():
    """An undone one leaves it as it was, and a dense one brings it."""
    _, topk, state = payload_of("topk:min_numel=0,ratio=0.01,decay=0.5", normal(1000))
    kept, g = np.float32(0.5) * state.arrays["residual"], normal(1000)
    end_step(topk, state, True)
    assert kept.any()
    np.testing.assert_array_equal(state.arrays["residual"], kept)
    topk.encode(np.zeros(1000, np.float32), state, Step(1, 0, 2))
    end_step(topk, state, False)
    np.testing.assert_array_equal(state.arrays["residual"], kept)
    payload = topk.encode_dense(g.copy(), state, Step(2, 0, 2))
    np.testing.assert_array_equal(payload.array, kept + g)


def test_two_bits_take_fewer_bytes_than_published():
    """2 bits and at most 12 for the index, five numbers beside them: here four, and the frame's
    head."""
    payload, *_ = payload_of("topk:min_numel=0,chunk=4096,k=64,values=2bit", normal(4096 * 25))
    assert payload.elements == 64 * 25
    assert len(payload.body) < 64 * 25 * (2 + 8) / 8 + 30 < 64 * 25 * (2 + 12) / 8


def test_values_alike_are_sent_as_they_are():
    sent, state = alone("topk:min_numel=0,chunk=10,k=2,values=2bit", np.full(30, -0.7, np.float32))
    np.testing.assert_array_equal(sent[0], np.where(np.arange(30) % 10 < 2, np.float32(-0.7), 0))
    assert state["residual"][sent[0] != 0].tolist() == [0] * 6


def test_signs_carry_the_mean_of_what_is_chosen():
    g = normal(5000)
    (sent,), state = alone("topk:min_numel=0,ratio=0.01,values=sign", g)
    chosen = sent != 0
    assert chosen.sum() == 50
    np.testing.assert_allclose(
        sent[chosen], np.sign(g[chosen]) * np.abs(g[chosen]).mean(), rtol=1e-6
    )
    np.testing.assert_array_equal(state["residual"], g - sent)


def test_powers_are_the_nearest_and_what_has_none_waits():
    g = np.float32([1.4, -1.6, 3.9, 0.03, 0.01, -0.76, 0, 0])
    (sent,), state = alone("topk:min_numel=0,ratio=0.75,values=power", g)
    np.testing.assert_array_equal(sent, np.float32([1, -2, 2, 2**-5, 0, -1, 0, 0]))
    np.testing.assert_array_equal(state["residual"], g - sent)


@pytest.mark.parametrize("values", ["sign", "power", "2bit"])
def test_dgc_keeps_the_error_in_v_and_masks_u_only_where_it_has_sent(values):
    g = normal(2000) * np.exp(3 * normal(2000))
    payload, compressor, state = payload_of(f"dgc:min_numel=0,ratio=0.1,values={values}", g)
    sent = decoded(compressor, payload.body, g.size)
    where = np.zeros(g.size, bool)
    where[payload.undo[0]] = True
    assert 0 < where.sum() == payload.elements <= 200
    np.testing.assert_array_equal(state.arrays["v"], g - sent)
    np.testing.assert_array_equal(state.arrays["u"], np.where(where, 0, g))
    compressor.rollback(state)
    np.testing.assert_array_equal(state.arrays["v"], g)
    np.testing.assert_array_equal(state.arrays["u"], g)


def test_k_or_ratio_of_a_chunk_or_a_tensor():
    g = normal(1000)
    for options, entries in {
        "k=5": 5,
        "chunk=100,k=5": 50,
        "chunk=300,ratio=0.01": 4 * 3,
        "chunk=400,k=500": 1000,
        "k=2000": 1000,
    }.items():
        payload, *_ = payload_of(f"topk:min_numel=0,{options}", g)
        assert payload.elements == entries
    with pytest.raises(ValueError, match="dgc: k is the same in all steps"):
        get_compressor("dgc:chunk=64,k=4,warmup_steps=8")
    for spec in (
        "topk:chunk=4096,k=64,values=2bit",
        "topk:k=128,values=2bit",
        "topk:ratio=0.001,min_k=128,values=2bit",
    ):
        assert get_compressor(spec).payload_bits(2 * 4096, Step(0, 0, 2)) == pytest.approx(
            (2 + 6 + 1.44) / 64
        )
    assert get_compressor("dgc:chunk=1000,ratio=0.01,warmup_steps=4").density(1) == pytest.approx(
        0.01**0.4
    )


@pytest.mark.parametrize("id", ["topk", "dgc"])
def test_small_tensors_send_more_than_the_ratio(id):
    """min_k entries at least, but no more than a share of 1/32 for it."""
    for numel, entries in {20: 1, 64: 2, 1000: 31, 1024: 32, 20_000: 32, 40_000: 40}.items():
        payload, *_ = payload_of(f"{id}:ratio=0.001,min_numel=0", normal(numel))
        assert payload.elements == entries
        payload, *_ = payload_of(f"{id}:ratio=0.001,min_numel=0,min_k=1", normal(numel))
        assert payload.elements == -(-numel // 1000)
