"""AdaComp (Chen et al., AAAI 2018) against its paper's own statements."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_checks import alone, normal, payload_of, seeded  # noqa: F401
from tiers import examples


def adacomp(residue, g, bin_length, factor=2.0):
    """The paper's pack, as recalled: (sent, residue)."""
    G = residue + g
    H = residue + np.float32(factor) * g
    bins = [slice(i, i + bin_length) for i in range(0, len(G), bin_length)]
    gmax = np.array([np.abs(G[b]).max() for b in bins])
    scale = np.float32(gmax.astype(np.float64).mean())
    sent = np.zeros_like(G)
    for b, most in zip(bins, gmax):
        selected = (np.abs(H[b]) >= most) & (G[b] != 0)
        sent[b][selected] = np.sign(G[b][selected]) * scale
    return sent, G - sent


@pytest.mark.parametrize("bin_length", [1, 50, 63, 64, 500, 16384])
def test_adacomp_follows_the_paper(bin_length):
    residue = np.zeros(20_000, np.float32)
    gradients = [normal(20_000) * np.exp(normal(20_000)) for _ in range(4)]
    means, state = alone(f"adacomp:min_numel=0,bin_length={bin_length}", *gradients)
    for g, mean in zip(gradients, means):
        expected, residue = adacomp(residue, g, bin_length)
        np.testing.assert_array_equal(mean != 0, expected != 0)
        np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(state["residual"], residue, rtol=1e-5, atol=1e-5)


@examples(100)
@given(
    st.integers(0, 2**32),
    st.integers(1, 500),
    st.sampled_from([1, 2, 50, 63, 64, 500, 16384]),
    st.sampled_from([1.0, 2.0, 4.0]),
)
def test_adacomp_conserves_exactly(seed, size, bin_length, factor):
    """G = sent + residue, without any rounding where the scale has few bits: a power of two of bins
    of integers."""
    rng = np.random.default_rng(seed)
    bins = -(-size // bin_length)
    gradient = rng.integers(-100, 101, size).astype(np.float32)
    sent, state = alone(
        f"adacomp:min_numel=0,bin_length={bin_length},scale_factor={factor}", gradient
    )
    if bins & (bins - 1) == 0:
        np.testing.assert_array_equal(sent[0] + state["residual"], gradient)
    np.testing.assert_allclose(
        sent[0].astype(np.float64) + state["residual"], gradient, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("power", [-40, -1, 1, 40])
def test_adacomp_packs_a_scaled_gradient_to_a_scaled_payload(power):
    """pack(c·g, c·residue) = c·pack(g, residue) for a c that multiplies without rounding."""
    gradients = [normal(1000) for _ in range(3)]
    plain, state = alone("adacomp:min_numel=0", *gradients)
    scaled, its_state = alone(
        "adacomp:min_numel=0", *(g * np.float32(2.0**power) for g in gradients)
    )
    for a, b in zip(plain, scaled):
        np.testing.assert_array_equal(a * np.float32(2.0**power), b)
    np.testing.assert_array_equal(state["residual"] * np.float32(2.0**power), its_state["residual"])


def test_adacomp_sends_all_of_a_constant_bin():
    for signs in (np.ones(500), np.tile([1, -1], 250)):
        (sent,), state = alone(
            "adacomp:min_numel=0,bin_length=50", (0.3 * signs).astype(np.float32)
        )
        np.testing.assert_allclose(sent, 0.3 * signs, rtol=1e-6)
        assert np.abs(state["residual"]).max() < 1e-6


def test_adacomps_bins_choose_independently():
    """Which elements a bin sends does not change with what is in the others; only the scale, a mean
    over bins, does."""
    one, other = normal(500), normal(500)
    for start in range(0, 500, 50):
        mixed = other.copy()
        mixed[start : start + 50] = one[start : start + 50]
        (first,), (second,) = (
            alone("adacomp:min_numel=0,bin_length=50", one)[0],
            alone("adacomp:min_numel=0,bin_length=50", mixed)[0],
        )
        np.testing.assert_array_equal(
            (first != 0)[start : start + 50], (second != 0)[start : start + 50]
        )


def test_adacomp_selects_nothing_of_a_zero_bin_and_the_last_bin_may_be_short():
    gradient = np.zeros(130, np.float32)
    gradient[120:] = 0.5
    (sent,), _ = alone("adacomp:min_numel=0,bin_length=50", gradient)
    assert np.flatnonzero(sent).tolist() == list(range(120, 130))
    # The mean over three bins, two of them zero.
    np.testing.assert_allclose(sent[120:], 0.5 / 3, rtol=1e-6)


def test_adacomps_wire_beats_the_papers():
    """8 bits an entry of bins of 50, 16 bits of 500: with the frame and the scale, ours take
    less."""
    for bin_length, bits in ((50, 8), (500, 16)):
        payload, _, _ = payload_of(f"adacomp:min_numel=0,bin_length={bin_length}", normal(100_000))
        assert payload.elements > 100_000 / bin_length / 2
        assert 8 * len(payload.body) < bits * payload.elements
