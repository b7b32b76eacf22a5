"""Variance-based compression (Tsuzuku et al., sections 4.1 to 4.4) and Strom's threshold against
statements of their papers, as far as these could be read."""

import math

import numpy as np
import pytest
from paper_checks import RNG, alone, decoded, normal, payload_of, seeded  # noqa: F401
from ranks import end_step

from horovod_compress.compressors.base import Step


def first_step_sent(alpha, zeta, steps=12):
    """The step, from 1, at which a constant gradient is first sent."""
    means, _ = alone(
        f"variance:min_numel=0,alpha={alpha},zeta={zeta}", *[np.full(5, 0.7, np.float32)] * steps
    )
    return next(step for step, mean in enumerate(means, 1) if mean.any())


def test_when_a_constant_gradient_is_sent():
    """After n steps r² = n²g² and v = n·g², a little less for zeta < 1: r² > alpha·v from n > alpha
    on."""
    assert first_step_sent(1, 0.999) == first_step_sent(1.5, 0.999) == first_step_sent(1.5, 1) == 2
    assert first_step_sent(2, 0.999) == 2
    assert first_step_sent(2, 1) == 3
    assert first_step_sent(4, 0.999) == 4


@pytest.mark.parametrize("alpha, rate", [(1, 0.317), (1.5, 0.221), (2, 0.157)])
def test_how_much_of_pure_noise_is_sent(alpha, rate):
    """Zero-mean Gaussian samples, one step: (Σg)²/Σg² is chi-squared of one degree of freedom for
    many samples."""
    d, samples = 40_000, 200
    per_sample = normal(samples, d) / samples
    _, _, state = payload_of(
        f"variance:min_numel=0,alpha={alpha}",
        per_sample.sum(axis=0),
        squares=(per_sample.astype(np.float64) ** 2).sum(axis=0).astype(np.float32),
    )
    fired = (state.arrays["r"] == 0).mean()
    # What is more than 2^7 below the largest fires too, but cannot be coded; of noise that is next
    # to nothing.
    assert fired == pytest.approx(rate, abs=4 * math.sqrt(rate / d) + 0.003)


def powers(r):
    """Section 4.2, as recalled: the sent values of firing elements, 0 where d > 7 and nothing is
    sent."""
    top = math.floor(math.log2(np.abs(r).max()))
    values = []
    for x in r.tolist():
        low = math.floor(math.log2(abs(x)))
        rounded = low + (abs(x) / 2.0**low >= 1.5)
        exponent = min(rounded, top)  # |r| is truncated to 2^E
        values.append(math.copysign(2.0**exponent, x) if top - exponent <= 7 else 0.0)
    return np.array(values, np.float32)


def test_variances_codes_are_powers_of_two_within_seven_of_the_largest():
    gradient = (np.sign(normal(2000)) * 2.0 ** RNG.uniform(-12, 3, 2000)).astype(np.float32)
    squares = gradient**2 / 2
    payload, compressor, state = payload_of("variance:min_numel=0", gradient, squares=squares)
    sent, expected = decoded(compressor, payload.body, 2000), powers(gradient)
    np.testing.assert_array_equal(sent, expected)
    kept = expected == 0
    assert 100 < kept.sum() < 1900
    # What is not sent waits, and its v does not decay.
    top = math.floor(math.log2(np.abs(gradient).max()))
    np.testing.assert_array_equal(kept, np.abs(gradient) < 0.75 * 2.0 ** (top - 7))
    np.testing.assert_array_equal(state.arrays["r"], np.where(kept, gradient, 0))
    np.testing.assert_array_equal(state.arrays["v"], np.where(kept, squares, 0))
    assert len(payload.body) < 2000 * 32 / 8 / 3  # the paper has 32 bits an entry


def test_variance_keeps_the_rounding_error_where_asked():
    gradient = normal(500)
    payload, compressor, state = payload_of(
        "variance:min_numel=0,error_feedback=true", gradient, squares=np.zeros(500, np.float32)
    )
    sent = decoded(compressor, payload.body, 500)
    np.testing.assert_array_equal(state.arrays["r"], gradient - sent)
    assert (state.arrays["v"][sent != 0] == 0).all()


def test_variances_v_decays_where_nothing_is_sent():
    gradient = np.tile(np.float32([1, -1]), 50)
    _, state = alone("variance:min_numel=0,zeta=0.5,alpha=2", gradient, -gradient)
    np.testing.assert_array_equal(state["r"], 0)
    np.testing.assert_array_equal(state["v"], 0.75)  # (1·0.5 + 1)·0.5


def test_variances_hybrid_with_strom():
    """|r| > tau and r² > alpha·v: sends sign(r)·tau; v ← max(v − 2|r|tau + tau², 0), r ← r −
    sign(r)·tau."""
    gradient, squares = normal(1000), np.abs(normal(1000)) / 2
    payload, compressor, state = payload_of(
        "variance:min_numel=0,alpha=1,tau=0.5", gradient, squares=squares
    )
    fires = (np.abs(gradient) > 0.5) & (gradient**2 > squares)
    assert 0.1 < fires.mean() < 0.6
    sent = decoded(compressor, payload.body, 1000)
    np.testing.assert_array_equal(sent, np.where(fires, np.copysign(0.5, gradient), 0))
    np.testing.assert_array_equal(state.arrays["r"], gradient - sent)
    after = np.maximum(squares - 2 * np.abs(gradient) * np.float32(0.5) + np.float32(0.25), 0)
    np.testing.assert_array_equal(
        state.arrays["v"], np.where(fires, after, np.float32(0.999) * squares)
    )


def test_variance_sums_samples_as_a_loop_over_them_would():
    """Squares summed over samples and one pass, or as many passes of one sample, accumulate the
    same r and v."""
    samples = normal(4, 200) / 100
    _, _, together = payload_of(
        "variance:min_numel=0,alpha=100,zeta=1",
        samples.sum(axis=0),
        squares=(samples**2).sum(axis=0),
    )
    state = None
    for sample in samples:
        _, _, state = payload_of("variance:min_numel=0,alpha=100,zeta=1", sample, state)
    for name in ("r", "v"):
        np.testing.assert_allclose(together.arrays[name], state.arrays[name], rtol=1e-5, atol=1e-9)


def test_strom_sends_the_threshold_and_keeps_the_rest():
    g = normal(1000)
    means, state = alone("strom:min_numel=0,tau=0.5", g, 0 * g, 0 * g)
    assert set(np.unique(means[0])) <= {-0.5, 0, 0.5}
    np.testing.assert_array_equal(means[0], np.where(np.abs(g) > 0.5, np.copysign(0.5, g), 0))
    np.testing.assert_array_equal(
        means[1], np.where(np.abs(g) > 1, np.copysign(0.5, g), 0)
    )  # tau a step, not all at once
    np.testing.assert_allclose(sum(means) + state["residual"], g, atol=1e-6)


def test_after_a_dense_step_both_sums_begin_anew():
    """All that r had was sent, so nothing is left for v to be the variance of."""
    _, variance, state = payload_of("variance:min_numel=0", normal(100))
    end_step(variance, state, True)
    variance.encode_dense(normal(100), state, Step(1, 0, 2))
    end_step(variance, state, True)
    assert not state.arrays["r"].any() and not state.arrays["v"].any()
