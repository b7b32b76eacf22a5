"""Quantizers with a scale against their papers' own statements: maxnorm, multiscale, terngrad,
qsgd."""

import math

import numpy as np
import pytest
from one_tensor import cpu
from paper_checks import RNG, alone, normal, seeded  # noqa: F401

import horovod_compress as hc

# -- single-scale and multi-scale quantizers (arXiv 2109.12497)


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_whatever_the_norm_is_scales_are_chosen_by_the_largest(norm):
    values = np.concatenate([np.full(64, 3.0), np.full(36, -5.0)]).astype(np.float32)
    peaks = np.zeros(2, np.uint32)
    hc.get_compressor(f"multiscale:norm={norm}").norms_of([values], [peaks])
    assert peaks.view(np.float32).tolist() == [3, 5]


@pytest.mark.parametrize("size", [2, 3, 8, 64, 1000])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_sums_of_codes_are_exact_for_any_number_of_ranks(size, bits):
    """decode(Σ encode(g)) = Σ decode(encode(g)), also where every rank sends the largest code: no
    field overflows."""
    steps = [2.0**bits - 1]
    # A step of 1/8: floats add up exactly too.
    w = steps[0] / 8
    width = (2 * size * int(steps[0])).bit_length()
    shared = dict(w=np.float32([w]), steps=steps, width=width, size=size)
    words, total = None, np.zeros(77)
    for rank in range(size):
        x = np.where(
            np.arange(77) % 3 == 0, -w, np.where(np.arange(77) % 3 == 1, w, RNG.uniform(-w, w, 77))
        ).astype(np.float32)
        its = cpu.quantize(x, None, **shared, clip=w, key=rank)
        own = np.empty(77, np.float32)
        assert cpu.dequantize(its, None, own, **shared, scale=1.0)
        total += own.astype(np.float64)
        with np.errstate(over="ignore"):
            words = its if words is None else words + its
    out = np.empty(77, np.float32)
    assert cpu.dequantize(words, None, out, **shared, scale=1.0)
    np.testing.assert_array_equal(out, total.astype(np.float32))
    np.testing.assert_array_equal(out[:2], [-size * w, size * w])


@pytest.mark.parametrize("size", [2, 3, 8, 64, 1000])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_maxnorm_of_whole_numbers_of_steps_is_exact(size, bits):
    """Gradients that are codes themselves: the mean is their mean, on 1000 ranks too."""
    s = 2**bits - 1
    codes = RNG.integers(-s, s + 1, (size, 12)).astype(np.float32)
    codes[:, 0], codes[:, 1], codes[0, 2] = s, -s, s
    run = hc.simulate(f"maxnorm:min_numel=0,bits={bits}", [[{"t": row} for row in codes]])
    np.testing.assert_allclose(
        run.mean[0]["t"], codes.mean(axis=0, dtype=np.float64), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize("bits", ["2+6", "4+8", "1+3+5+7"])
def test_multiscale_takes_the_finest_scale_that_fits_all_ranks(size, bits):
    """Where every rank's element is a whole number of fine steps and fits, the mean is exact; where
    one rank's does not fit, all ranks round to the coarser scale."""
    steps = [2 ** int(b) - 1 for b in bits.split("+")]
    w, levels = 0.8, len(steps)
    codes = RNG.integers(-steps[0], steps[0] + 1, (size, 300))
    level = RNG.integers(0, levels, 300)
    level[0] = 0
    # One rank's is the largest that fits there.
    codes[0, :] = np.where(np.arange(300) % 2, steps[0], -steps[0])
    x = (codes * (w / np.array(steps))[level]).astype(np.float32)
    x[0, 0] = w
    run = hc.simulate(f"multiscale:min_numel=0,bits={bits}", [[{"t": row} for row in x]])
    # A code that is whole but for float32 rounding may go to its neighbour once in 10^5: none of
    # the draws here does.
    np.testing.assert_allclose(
        run.mean[0]["t"], x.mean(axis=0, dtype=np.float64), rtol=1e-5, atol=1e-6
    )
    finest = w / steps[-1]
    one_large = np.tile(np.float32([finest / 2, w]), (size, 1))
    one_large[0, 0] = w * 0.9
    mean = hc.simulate(
        f"multiscale:min_numel=0,bits={bits}", [[{"t": row} for row in one_large]]
    ).mean[0]["t"][0]
    coarse = w / steps[0] / size
    assert abs(mean / coarse - round(mean / coarse)) < 1e-3


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_multiscales_boundaries_are_unbiased(scale):
    """A level decided from the random draw biases what is just above 3/63 of the largest by -7 %;
    here it does not."""
    values = np.float32(
        [1, *(np.array([2.5, 2.9, 2.99, 3, 3.01, 3.1, 3.5, 4, 20.9, 21, 21.1]) / 63)]
    ) * np.float32(scale)
    run = hc.simulate("multiscale:min_numel=0,bits=2+6", [[{"t": np.tile(values, 20_000)}]] * 2)
    draws = np.array([mean["t"] for mean in run.mean], np.float64).reshape(-1, len(values)) / scale
    off = draws.mean(axis=0) - values.astype(np.float64) / scale
    assert (np.abs(off) <= 4.5 * draws.std(axis=0) / math.sqrt(len(draws)) + 1e-7).all()
    fine, coarse = 1 / 63, 1 / 3
    # What lies on the boundary does too, but for rounding.
    fits = values / np.float32(scale) < 3 / 63
    assert (draws.var(axis=0) <= 1.05 * np.where(fits, fine, coarse) ** 2 / 4).all()
    assert draws.var(axis=0)[5] > 10 * fine**2  # 3.01/63 does not


def test_ranks_of_very_different_norms_are_summed_in_one_scale():
    """Codes that were made with different norms must not be added."""
    for spec in (
        "maxnorm:bits=8",
        "multiscale:bits=4+12",
        "terngrad:clip=0",
        "maxnorm:bits=8,norm=l2",
    ):
        small, large = 1e-3 * normal(30_000), 1e3 * normal(30_000)
        mean = (
            hc.simulate(spec + ",min_numel=0", [[{"t": small}, {"t": large}]])
            .mean[0]["t"]
            .astype(np.float64)
        )
        expected = (small.astype(np.float64) + large) / 2
        assert mean @ expected / (expected @ expected) == pytest.approx(1, abs=0.03)


def test_zero_norms_on_some_or_all_ranks():
    zero, some = np.zeros(100, np.float32), np.linspace(-1, 1, 100, dtype=np.float32)
    for spec in (
        "maxnorm",
        "maxnorm:norm=l2",
        "multiscale",
        "terngrad",
        "qsgd",
        "maxnorm:ratio=0.1",
    ):
        spec += ("," if ":" in spec else ":") + "min_numel=0"
        assert not hc.simulate(spec, [[{"t": zero}, {"t": zero}]]).mean[0]["t"].any()
        assert np.isfinite(hc.simulate(spec, [[{"t": zero}, {"t": some}]]).mean[0]["t"]).all()


def test_quantized_payloads_are_bit_fields():
    """4 bits on 2 ranks: sums of -30 … 30 in 6 bits, 5 to an int32 or 10 to an int64; not an int32
    an element."""
    run = hc.simulate("maxnorm:bits=4", [[{"t": normal(200, 100)}] * 2])
    # The carrier, the norm, what compares the ranks' steps.
    others = 4 + 4 + 3 * 8
    assert run.bytes_sent[0][0] == others + 4 * -(-20_000 // 5)
    run = hc.simulate("multiscale:bits=2+6", [[{"t": normal(200, 100)}] * 2])
    words = 4 * -(-20_000 // 8) + 4 * -(
        -20_000 // 15
        # Fields of 4 bits for codes; of 2 for how many ranks fit, below the sign.
    )
    assert run.bytes_sent[0][0] <= others + words
    wide = hc.simulate("maxnorm:bits=4", [[{"t": normal(200, 100)}] * 64]).bytes_sent[0][0]
    # 11 bits: 5 fields of an int64 hold more than 2 of an int32.
    assert wide == others + 8 * -(-20_000 // 5)


# -- terngrad and qsgd


def test_terngrad_is_ternary_and_clips():
    g = normal(20_000)
    (mean,), _ = alone("terngrad:min_numel=0", g)
    limit = 2.5 * g.std(dtype=np.float64)
    assert np.unique(np.round(np.abs(mean) / limit, 5)).tolist() == [0, 1]
    clipped = np.clip(g, -limit, limit)
    assert (mean * clipped).sum() / (clipped**2).sum() == pytest.approx(1, abs=0.05)
    (mean,), _ = alone("terngrad:min_numel=0,clip=0", g)
    assert np.unique(np.abs(mean)).tolist() == [0, np.abs(g).max()]
    # One scale for all.
    two = hc.simulate("terngrad:min_numel=0,clip=0", [[{"t": g}, {"t": 2 * g}]])
    assert np.unique(np.round(np.abs(two.mean[0]["t"]) / np.abs(2 * g).max(), 5)).tolist() == [
        0,
        0.5,
        1,
    ]


def test_terngrad_clips_at_each_ranks_own_deviation():
    """A rank's outlier counts as clip·σ of that rank, also where another rank's gradient makes the
    shared scale far larger."""
    small, large = np.float32(0.1) * normal(2000), normal(2000)
    small[:20], large[:20] = 5, 0
    limit = 2.5 * small.std(dtype=np.float64)
    run = hc.simulate("terngrad:min_numel=0", [[{"t": small}, {"t": large}]] * 300)
    draws = np.array([mean["t"][:20] for mean in run.mean], np.float64)
    assert draws.mean() == pytest.approx(limit / 2, abs=5 * draws.std() / math.sqrt(draws.size))
    # What a limit of the shared scale would let through is far from it.
    assert 3 * limit / 2 < 5 / 2
    # With a residual, what is clipped waits in it.
    waits = hc.simulate("terngrad:min_numel=0,ratio=1", [[{"t": small}]])
    np.testing.assert_allclose(
        waits.mean[0]["t"] + waits.state[0]["t"]["residual"], small, rtol=1e-6, atol=1e-6
    )


def test_terngrad_does_not_clip_what_does_not_vary():
    for size in (1, 2, 100, 5000):
        for value in (0.3, 7.7, 2.17e-4):
            (mean,), _ = alone("terngrad:min_numel=0", np.full(size, value, np.float32))
            np.testing.assert_allclose(mean, value, rtol=1e-6)


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("s, bucket", [(1, 16), (3, 512), (15, 64), (127, 512)])
def test_qsgds_variance_bound(norm, s, bucket):
    """E‖Q(v) − v‖² ≤ min(d/s², √d/s)·‖v‖² for each bucket of d (Lemma 3.1), with the largest as
    norm all the more."""
    buckets = np.array([normal(bucket) * np.exp(2 * normal(bucket)) for _ in range(20)]).astype(
        np.float32
    )
    run = hc.simulate(
        f"qsgd:min_numel=0,levels={s},bucket_size={bucket},norm={norm}",
        [[{"t": buckets.reshape(-1)}]] * 60,
    )
    errors = np.array([mean["t"].reshape(buckets.shape) - buckets for mean in run.mean], np.float64)
    measured = (errors**2).sum(axis=2).mean(axis=0)
    bound = min(bucket / s**2, math.sqrt(bucket) / s) * (buckets.astype(np.float64) ** 2).sum(
        axis=1
    )
    assert (measured <= 1.1 * bound).all()


def test_qsgds_levels_are_whole_parts_of_a_buckets_norm():
    g = normal(1000)
    g[512:] = 0
    (mean,), _ = alone("qsgd:min_numel=0,levels=5,bucket_size=512", g)
    levels = mean[:512] / (np.linalg.norm(g[:512].astype(np.float64)) / 5)
    np.testing.assert_allclose(levels, np.rint(levels), atol=1e-5)
    assert not mean[512:].any()


def test_qsgds_codings_say_the_same():
    """Fixed width and Elias code decode to the same; sparse levels make Elias smaller, and then it
    is taken."""
    g = normal(64, 512)
    results, sizes = {}, {}
    for coding in ("fixed", "elias", "auto"):
        run = hc.simulate(f"qsgd:levels=1,coding={coding}", [[{"t": g}]])
        results[coding], sizes[coding] = run.mean[0]["t"].tobytes(), run.bytes_sent[0][0]
    assert len(set(results.values())) == 1
    assert sizes["elias"] < sizes["fixed"] and sizes["auto"] <= sizes["fixed"]
