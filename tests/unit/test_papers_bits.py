"""Compressors that give every element the same few bits, against their papers' own statements:
signs, powers of two, 16-bit floats."""

import numpy as np
import pytest
from paper_checks import RNG, alone, normal, seeded  # noqa: F401

import horovod_compress as hc


def test_signsgds_majority():
    """The sign of the sum of signs, ties and zeros give 0; the magnitude is 1, whatever the
    gradients' is."""
    votes = (
        np.array(np.meshgrid([-1, 0, 1], [-1, 0, 1], [-1, 0, 1], [-1, 0, 1]))
        .reshape(4, -1)
        .astype(np.float32)
    )
    for size in (1, 2, 3, 4):
        for magnitude in (1e-40, 1, 1e38):
            rows = votes[:size] * np.float32(magnitude)
            mean = hc.simulate("signsgd:min_numel=0", [[{"t": row} for row in rows]]).mean[0]["t"]
            np.testing.assert_array_equal(mean, np.sign(votes[:size].sum(axis=0)))


@pytest.mark.parametrize("size", [7, 100, 1000])
def test_signsgds_sums_do_not_overflow(size):
    rows = np.sign(normal(size, 50)).astype(np.float32)
    rows[:, 0], rows[:, 1] = 1, -1
    mean = hc.simulate("signsgd:min_numel=0", [[{"t": row} for row in rows]]).mean[0]["t"]
    np.testing.assert_array_equal(mean, np.sign(rows.sum(axis=0)))


def test_efsignsgd_sends_the_mean_magnitude_with_signs():
    p, residual = normal(1000), np.zeros(1000, np.float32)
    gradients = [p, normal(1000)]
    means, state = alone("efsignsgd:min_numel=0", *gradients)
    for g, mean in zip(gradients, means):
        total = residual + g
        expected = np.abs(total).mean(dtype=np.float64) * np.where(total < 0, -1, 1)
        np.testing.assert_allclose(mean, expected, rtol=1e-6)
        residual = total - expected.astype(np.float32)
    np.testing.assert_allclose(state["residual"], residual, atol=1e-6)
    # A gradient's worth of bits: 1 an element, and a frame.
    assert (
        hc.simulate("efsignsgd", [[{"t": normal(128, 100)}]]).bytes_sent[0][0]
        <= 4 + 24 + 8 + 128 * 100 // 8 + 1
    )


def test_onebit_sends_the_means_of_the_halves():
    g = normal(1000) + np.float32(0.3)
    (mean,), state = alone("onebit:min_numel=0", g)
    expected = np.where(g < 0, g[g < 0].mean(dtype=np.float64), g[g >= 0].mean(dtype=np.float64))
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(state["residual"], g - expected, atol=1e-6)
    # One half is empty.
    assert alone("onebit:min_numel=0", np.ones(5, np.float32))[0][0].tolist() == [1] * 5


def test_natural_rounds_to_the_two_powers_of_two_around():
    g = (np.sign(normal(5000)) * 2.0 ** RNG.uniform(-126, 126, 5000)).astype(np.float32)
    (mean,), _ = alone("natural:min_numel=0", g)
    assert (np.frexp(np.abs(mean))[0] == 0.5).all() and (np.sign(mean) == np.sign(g)).all()
    low = np.ldexp(np.float32(0.5), np.frexp(np.abs(g))[1])
    assert np.isin(np.abs(mean) / low, [1, 2]).all()
    powers_of_two = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
    np.testing.assert_array_equal(alone("natural:min_numel=0", powers_of_two)[0][0], powers_of_two)
    assert (
        hc.simulate("natural", [[{"t": normal(70, 100)}]]).bytes_sent[0][0] <= 4 + 24 + 8 * 1000 + 1
    )  # 7 of 9 bits in 64


def test_float16_tells_what_became_infinite():
    with pytest.warns(RuntimeWarning, match="t has elements beyond 65504"):
        run = hc.simulate("fp16", [[{"t": np.float32([1, 1e5])}] * 2] * 3)
    assert [stats["overflows"] for stats in run.stats] == [3, 3] and run.stats[0][
        "steps_undone"
    ] == 3
    assert np.isinf(run.mean[0]["t"][1])
    quiet = hc.simulate("fp16", [[{"t": np.float32([1, np.inf])}] * 2])  # it was infinite before
    assert quiet.stats[0]["overflows"] == 0 and quiet.stats[0]["steps_undone"] == 1
    rounded = hc.simulate("fp16", [[{"t": np.float32([1, 65519])}]])  # to 65504, the largest
    assert rounded.mean[0]["t"][1] == 65504 and rounded.stats[0]["overflows"] == 0


def test_bf16_keeps_the_range_of_float32():
    g = np.float32([3.4028235e38, -3.4e38, 1e-40, 1 + 2**-9, 1 + 3 * 2**-9])
    (mean,), _ = alone("bf16", g)
    assert np.isfinite(mean).all()
    np.testing.assert_array_equal(mean[3:], np.float32([1, 1 + 2**-7]))  # ties to even
