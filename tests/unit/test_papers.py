"""Each algorithm against its paper's own statements, and the traps that other implementations fell into."""
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import ranks_of, run_step

import horovod_compress as hc
from horovod_compress import kernels
from horovod_compress.compressors.base import Gathered, Step

RNG = np.random.default_rng()


@pytest.fixture(autouse=True)
def seeded():
    """Every test draws the same, alone or among others."""
    RNG.bit_generator.state = np.random.default_rng(2024).bit_generator.state


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def alone(spec, *gradients):
    """What one rank's steps with these gradients send, and its state after them."""
    run = hc.simulate(spec, [[{"t": g}] for g in gradients])
    return [mean["t"] for mean in run.mean], run.state[0]["t"]


def payload_of(spec, gradient, state=None, step=0, size=1, squares=None):
    """(payload, compressor, state) of one tensor's encoding."""
    compressor = hc.get_compressor(spec).for_tensor("t", gradient.shape)
    state = state or compressor.init("t", gradient.shape)
    payload = compressor.encode(gradient.reshape(-1).copy(), state, Step(step, 0, size, squares=squares))
    return payload, compressor, state


def decoded(compressor, body, numel):
    out = np.zeros(numel, np.float32)
    compressor.add(body, out, 1.0)
    return out


# -- AdaComp (Chen et al., AAAI 2018) ----------------------------------------------------------------------------------


def adacomp(residue, g, bin_length, factor=2.0):
    """The paper's pack, as it is written: (sent, residue)."""
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


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 500),
    st.sampled_from([1, 2, 50, 63, 64, 500, 16384]),
    st.sampled_from([1.0, 2.0, 4.0]),
)
def test_adacomp_conserves_exactly(seed, size, bin_length, factor):
    """G = sent + residue, without any rounding where the scale has few bits: a power of two of bins of integers."""
    rng = np.random.default_rng(seed)
    bins = -(-size // bin_length)
    gradient = rng.integers(-100, 101, size).astype(np.float32)
    sent, state = alone(f"adacomp:min_numel=0,bin_length={bin_length},scale_factor={factor}", gradient)
    if bins & (bins - 1) == 0:
        np.testing.assert_array_equal(sent[0] + state["residual"], gradient)
    np.testing.assert_allclose(sent[0].astype(np.float64) + state["residual"], gradient, rtol=0, atol=1e-5)


@pytest.mark.parametrize("power", [-40, -1, 1, 40])
def test_adacomp_packs_a_scaled_gradient_to_a_scaled_payload(power):
    """pack(c·g, c·residue) = c·pack(g, residue) for a c that multiplies without rounding."""
    gradients = [normal(1000) for _ in range(3)]
    plain, state = alone("adacomp:min_numel=0", *gradients)
    scaled, its_state = alone("adacomp:min_numel=0", *(g * np.float32(2.0**power) for g in gradients))
    for a, b in zip(plain, scaled):
        np.testing.assert_array_equal(a * np.float32(2.0**power), b)
    np.testing.assert_array_equal(state["residual"] * np.float32(2.0**power), its_state["residual"])


def test_adacomp_sends_all_of_a_constant_bin():
    for signs in (np.ones(500), np.tile([1, -1], 250)):
        (sent,), state = alone("adacomp:min_numel=0,bin_length=50", (0.3 * signs).astype(np.float32))
        np.testing.assert_allclose(sent, 0.3 * signs, rtol=1e-6)
        assert np.abs(state["residual"]).max() < 1e-6


def test_adacomps_bins_choose_independently():
    """Which elements a bin sends does not change with what is in the others; only the scale, a mean over bins, does."""
    one, other = normal(500), normal(500)
    for start in range(0, 500, 50):
        mixed = other.copy()
        mixed[start : start + 50] = one[start : start + 50]
        (first,), (second,) = (
            alone("adacomp:min_numel=0,bin_length=50", one)[0],
            alone("adacomp:min_numel=0,bin_length=50", mixed)[0],
        )
        np.testing.assert_array_equal((first != 0)[start : start + 50], (second != 0)[start : start + 50])


def test_adacomp_selects_nothing_of_a_zero_bin_and_the_last_bin_may_be_short():
    gradient = np.zeros(130, np.float32)
    gradient[120:] = 0.5
    (sent,), _ = alone("adacomp:min_numel=0,bin_length=50", gradient)
    assert np.flatnonzero(sent).tolist() == list(range(120, 130))
    np.testing.assert_allclose(sent[120:], 0.5 / 3, rtol=1e-6)  # the mean over three bins, two of them zero


def test_adacomps_wire_beats_the_papers():
    """8 bits an entry of bins of 50, 16 bits of 500: with the frame and the scale, ours take less."""
    for bin_length, bits in ((50, 8), (500, 16)):
        payload, _, _ = payload_of(f"adacomp:min_numel=0,bin_length={bin_length}", normal(100_000))
        assert payload.elements > 100_000 / bin_length / 2
        assert 8 * len(payload.body) < bits * payload.elements


# -- variance-based compression (Tsuzuku et al., sections 4.1 to 4.4) --------------------------------------------------


def first_step_sent(alpha, zeta, steps=12):
    """The step, from 1, at which a constant gradient is first sent."""
    means, _ = alone(f"variance:min_numel=0,alpha={alpha},zeta={zeta}", *[np.full(5, 0.7, np.float32)] * steps)
    return next(step for step, mean in enumerate(means, 1) if mean.any())


def test_when_a_constant_gradient_is_sent():
    """After n steps r² = n²g² and v = n·g², a little less for zeta < 1: r² > alpha·v from n > alpha on."""
    assert first_step_sent(1, 0.999) == first_step_sent(1.5, 0.999) == first_step_sent(1.5, 1) == 2
    assert first_step_sent(2, 0.999) == 2
    assert first_step_sent(2, 1) == 3
    assert first_step_sent(4, 0.999) == 4


@pytest.mark.parametrize("alpha, rate", [(1, 0.317), (1.5, 0.221), (2, 0.157)])
def test_how_much_of_pure_noise_is_sent(alpha, rate):
    """Zero-mean Gaussian samples, one step: (Σg)²/Σg² is chi-squared of one degree of freedom for many samples."""
    d, samples = 40_000, 200
    per_sample = normal(samples, d) / samples
    _, _, state = payload_of(
        f"variance:min_numel=0,alpha={alpha}",
        per_sample.sum(axis=0),
        squares=(per_sample.astype(np.float64) ** 2).sum(axis=0).astype(np.float32),
    )
    fired = (state.arrays["r"] == 0).mean()
    # What is more than 2^7 below the largest fires too, but cannot be coded; of noise that is next to nothing.
    assert fired == pytest.approx(rate, abs=4 * math.sqrt(rate / d) + 0.003)


def powers(r):
    """Section 4.2: the sent values of firing elements, by its words: 0 where d > 7 and nothing is sent."""
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
    payload, compressor, state = payload_of("variance:min_numel=0", gradient, squares=np.zeros(2000, np.float32))
    sent, expected = decoded(compressor, payload.body, 2000), powers(gradient)
    np.testing.assert_array_equal(sent, expected)
    kept = expected == 0
    assert 100 < kept.sum() < 1900
    np.testing.assert_array_equal(state.arrays["r"], np.where(kept, gradient, 0))  # what is not sent waits
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
    """|r| > tau and r² > alpha·v: sends sign(r)·tau; v ← max(v − 2|r|tau + tau², 0), r ← r − sign(r)·tau."""
    gradient, squares = normal(1000), np.abs(normal(1000)) / 2
    payload, compressor, state = payload_of("variance:min_numel=0,alpha=1,tau=0.5", gradient, squares=squares)
    fires = (np.abs(gradient) > 0.5) & (gradient**2 > squares)
    assert 0.1 < fires.mean() < 0.6
    sent = decoded(compressor, payload.body, 1000)
    np.testing.assert_array_equal(sent, np.where(fires, np.copysign(0.5, gradient), 0))
    np.testing.assert_array_equal(state.arrays["r"], gradient - sent)
    after = np.maximum(squares - 2 * np.abs(gradient) * np.float32(0.5) + np.float32(0.25), 0)
    np.testing.assert_array_equal(state.arrays["v"], np.where(fires, after, np.float32(0.999) * squares))


def test_variance_sums_samples_as_a_loop_over_them_would():
    """Squares summed over samples and one pass, or as many passes of one sample, accumulate the same r and v."""
    samples = normal(4, 200) / 100
    _, _, together = payload_of(
        "variance:min_numel=0,alpha=100,zeta=1", samples.sum(axis=0), squares=(samples**2).sum(axis=0)
    )
    state = None
    for sample in samples:
        _, _, state = payload_of("variance:min_numel=0,alpha=100,zeta=1", sample, state)
    for name in ("r", "v"):
        np.testing.assert_allclose(together.arrays[name], state.arrays[name], rtol=1e-5, atol=1e-9)


# -- single-scale and multi-scale quantizers (arXiv 2109.12497) --------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 8, 64, 1000])
@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_sums_of_codes_are_exact_for_any_number_of_ranks(size, bits):
    """decode(Σ encode(g)) = Σ decode(encode(g)), also where every rank sends the largest code: no field overflows."""
    steps = [2.0**bits - 1]
    w = steps[0] / 8  # a step of 1/8: floats add up exactly too
    width = (2 * size * int(steps[0])).bit_length()
    words, total = None, np.zeros(77)
    for rank in range(size):
        x = np.where(np.arange(77) % 3 == 0, -w, np.where(np.arange(77) % 3 == 1, w, RNG.uniform(-w, w, 77))).astype(
            np.float32
        )
        its = kernels.host.quantize(x, None, w=w, clip=w, steps=steps, width=width, size=size, key=rank)
        own = np.empty(77, np.float32)
        kernels.host.dequantize(its, None, own, w=w, steps=steps, width=width, size=size, scale=1.0)
        total += own.astype(np.float64)
        with np.errstate(over="ignore"):
            words = its if words is None else words + its
    out = np.empty(77, np.float32)
    kernels.host.dequantize(words, None, out, w=w, steps=steps, width=width, size=size, scale=1.0)
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
    np.testing.assert_allclose(run.mean[0]["t"], codes.mean(axis=0, dtype=np.float64), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [2, 3, 8, 64])
@pytest.mark.parametrize("bits", ["2+6", "4+8", "1+3+5+7"])
def test_multiscale_takes_the_finest_scale_that_fits_all_ranks(size, bits):
    """Where every rank's element is a whole number of fine steps and fits, the mean is exact; where one rank's does not
    fit, all ranks round to the coarser scale."""
    steps = [2 ** int(b) - 1 for b in bits.split("+")]
    w, levels = 0.8, len(steps)
    codes = RNG.integers(-steps[0], steps[0] + 1, (size, 300))
    level = RNG.integers(0, levels, 300)
    level[0] = 0
    codes[0, :] = np.where(np.arange(300) % 2, steps[0], -steps[0])  # one rank's is the largest that fits there
    x = (codes * (w / np.array(steps))[level]).astype(np.float32)
    x[0, 0] = w
    run = hc.simulate(f"multiscale:min_numel=0,bits={bits}", [[{"t": row} for row in x]])
    # A code that is whole but for float32 rounding may go to its neighbour once in 10^5: none of the draws here does.
    np.testing.assert_allclose(run.mean[0]["t"], x.mean(axis=0, dtype=np.float64), rtol=1e-5, atol=1e-6)
    finest = w / steps[-1]
    one_large = np.tile(np.float32([finest / 2, w]), (size, 1))
    one_large[0, 0] = w * 0.9
    mean = hc.simulate(f"multiscale:min_numel=0,bits={bits}", [[{"t": row} for row in one_large]]).mean[0]["t"][0]
    coarse = w / steps[0] / size
    assert abs(mean / coarse - round(mean / coarse)) < 1e-3


@pytest.mark.parametrize("scale", [1, 1e-30, 1e30])
def test_multiscales_boundaries_are_unbiased(scale):
    """A level decided from the random draw biases what is just above 3/63 of the largest by -7 %; here it does not."""
    values = np.float32([1, *(np.array([2.5, 2.9, 2.99, 3, 3.01, 3.1, 3.5, 4, 20.9, 21, 21.1]) / 63)]) * np.float32(
        scale
    )
    run = hc.simulate("multiscale:min_numel=0,bits=2+6", [[{"t": np.tile(values, 20_000)}]] * 2)
    draws = np.array([mean["t"] for mean in run.mean], np.float64).reshape(-1, len(values)) / scale
    off = draws.mean(axis=0) - values.astype(np.float64) / scale
    assert (np.abs(off) <= 4.5 * draws.std(axis=0) / math.sqrt(len(draws)) + 1e-7).all()
    fine, coarse = 1 / 63, 1 / 3
    fits = values / np.float32(scale) < 3 / 63  # what lies on the boundary does too, but for rounding
    assert (draws.var(axis=0) <= 1.05 * np.where(fits, fine, coarse) ** 2 / 4).all()
    assert draws.var(axis=0)[5] > 10 * fine**2  # 3.01/63 does not


def test_ranks_of_very_different_norms_are_summed_in_one_scale():
    """Codes that were made with different norms must not be added."""
    for spec in ("maxnorm:bits=8", "multiscale:bits=4+12", "terngrad:clip=0", "maxnorm:bits=8,norm=l2"):
        small, large = 1e-3 * normal(30_000), 1e3 * normal(30_000)
        mean = hc.simulate(spec + ",min_numel=0", [[{"t": small}, {"t": large}]]).mean[0]["t"].astype(np.float64)
        expected = (small.astype(np.float64) + large) / 2
        assert mean @ expected / (expected @ expected) == pytest.approx(1, abs=0.03)


def test_zero_norms_on_some_or_all_ranks():
    zero, some = np.zeros(100, np.float32), np.linspace(-1, 1, 100, dtype=np.float32)
    for spec in ("maxnorm", "maxnorm:norm=l2", "multiscale", "terngrad", "qsgd", "maxnorm:ratio=0.1"):
        spec += ("," if ":" in spec else ":") + "min_numel=0"
        assert not hc.simulate(spec, [[{"t": zero}, {"t": zero}]]).mean[0]["t"].any()
        assert np.isfinite(hc.simulate(spec, [[{"t": zero}, {"t": some}]]).mean[0]["t"]).all()


def test_quantized_payloads_are_bit_fields():
    """4 bits on 2 ranks: sums of -30 … 30 in 6 bits, 5 to an int32 or 10 to an int64; not an int32 an element."""
    run = hc.simulate("maxnorm:bits=4", [[{"t": normal(200, 100)}] * 2])
    others = 4 + 4 + 3 * 8  # the carrier, the norm, what compares the ranks' steps
    assert run.bytes_sent[0][0] == others + 4 * -(-20_000 // 5)
    run = hc.simulate("multiscale:bits=2+6", [[{"t": normal(200, 100)}] * 2])
    words = 4 * -(-20_000 // 8) + 4 * -(
        -20_000 // 15
    )  # fields of 4 bits for codes; of 2 for how many ranks fit, below the sign
    assert run.bytes_sent[0][0] <= others + words
    wide = hc.simulate("maxnorm:bits=4", [[{"t": normal(200, 100)}] * 64]).bytes_sent[0][0]
    assert wide == others + 8 * -(-20_000 // 5)  # 11 bits: 5 fields of an int64 hold more than 2 of an int32


# -- global random-k ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d, k", [(60, 10), (60, 7), (61, 60), (1000, 1), (5, 5), (5, 100), (64, 1)])
def test_globalrandk_visits_every_coordinate_in_a_sweep(d, k):
    count = min(d, k)
    steps = -(-d // count)
    run = hc.simulate(
        f"globalrandk:min_numel=0,k={k},unbiased=true", [[{"t": np.ones(d, np.float32)}] * 2] * (3 * steps)
    )
    visits = [mean["t"] != 0 for mean in run.mean]
    assert all(visit.sum() == count for visit in visits)
    for sweep in range(3):
        total = np.sum(visits[sweep * steps : (sweep + 1) * steps], axis=0)
        assert (total >= 1).all() and total.sum() == steps * count
        assert d % count or (total == 1).all()
    if 1 < count < d / 2:
        assert any((a != b).any() for a, b in zip(visits[:steps], visits[steps : 2 * steps])), "sweeps differ"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 2**64 - 1), st.data())
def test_coordinates_are_a_permutation(numel, key, data):
    whole = kernels.host.draw_coordinates(key=key, numel=numel, first=0, count=numel)
    assert np.array_equal(np.sort(whole), np.arange(numel))
    first = data.draw(st.integers(0, numel))
    count = data.draw(st.integers(0, numel - first))
    np.testing.assert_array_equal(
        kernels.host.draw_coordinates(key=key, numel=numel, first=first, count=count), whole[first:][:count]
    )


def test_coordinates_are_spread_evenly():
    """Over many keys each coordinate comes equally often, and neighbours come together no more than chance has it."""
    d, keys = 50, 4000
    draws = np.array(
        [kernels.host.draw_coordinates(key=int(key), numel=d, first=0, count=10) for key in np.random.default_rng(0).integers(0, 2**63, keys)]
    )
    counts = np.bincount(draws.ravel(), minlength=d)
    assert ((counts - 800) ** 2 / 800).sum() < 49 + 5 * math.sqrt(98)
    neighbours = (np.abs(np.diff(np.sort(draws, axis=1), axis=1)) == 1).sum() / keys
    assert neighbours == pytest.approx(9 * 10 / 50, rel=0.1)


def test_globalrandk_has_the_same_coordinates_on_every_rank_and_zeros_elsewhere():
    shapes = {"t": (40, 25)}
    exchanges = ranks_of("globalrandk:ratio=0.1,min_numel=0", 4, shapes)
    results = [{"t": normal(1000)} for _ in exchanges]
    kept = [named["t"].copy() for named in results]
    run_step(exchanges, results)
    sent = results[0]["t"] != 0
    assert sent.sum() == 100
    np.testing.assert_allclose(results[0]["t"][sent], np.mean(kept, axis=0)[sent], rtol=1e-5, atol=1e-7)
    for exchange, named, gradient in zip(exchanges, results, kept):
        assert not named["t"][~sent].any()  # no local gradient stays behind at the other coordinates
        np.testing.assert_array_equal(exchange.arrays()["t"]["residual"], np.where(sent, 0, gradient))


@pytest.mark.parametrize("option", ["k=50", "ratio=0.05"])
@pytest.mark.parametrize("id", ["globalrandk", "maxnorm", "multiscale"])
def test_k_may_count_the_whole_models_coordinates(id, option):
    """As in the authors' code: K of all tensors together in each step, each once a sweep; what goes dense does not count."""
    shapes = {"a": (20, 30), "b": (12, 25), "tiny": (4, 5), "c": (8, 10)}
    ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    spec = f"{id}:min_numel=15,{option},of=model,unbiased=true"
    run = hc.simulate(spec, [[{**ones, "bias": np.ones(1000, np.float32)}] * 2] * 40)
    visits = np.array([np.concatenate([mean[name].reshape(-1) for name in shapes]) for mean in run.mean])
    assert ((visits != 0).sum(axis=1) == 50).all()
    np.testing.assert_allclose(visits[visits != 0], 1000 / 50, rtol=1e-5)  # d/K, of the model
    for sweep in range(2):
        assert ((visits[20 * sweep : 20 * (sweep + 1)] != 0).sum(axis=0) == 1).all()
    assert (visits[:20] != visits[20:]).any()
    per_tensor = [(visits[:, a : a + n] != 0).sum(axis=1) for a, n in ((0, 600), (600, 300), (900, 20))]
    assert per_tensor[0].std() > 0 and (per_tensor[2] == 0).any()  # so many as fall into it, in a small tensor often none


def test_a_gradient_that_is_not_finite_shows_where_nothing_of_it_is_drawn():
    grads = [[{"a": np.ones((50, 50), np.float32), "b": np.full((4, 4), np.nan, np.float32)}, {"a": np.ones((50, 50)), "b": np.ones((4, 4))}]]
    for id in ("globalrandk", "maxnorm", "multiscale"):
        run = hc.simulate(f"{id}:min_numel=0,k=1,of=model", grads * 2)
        assert [stats["steps_undone"] for stats in run.stats] == [2, 2]


def test_tensors_and_steps_have_different_coordinates():
    run = hc.simulate("globalrandk:ratio=0.1,min_numel=0,unbiased=true", [[{"a": np.ones(500), "b": np.ones(500)}]] * 2)
    a, b = (run.mean[0][name] != 0 for name in "ab")
    assert (a != b).any() and not (a & (run.mean[1]["a"] != 0)).any()


# -- what readers of these papers compare with -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, rank, true_rank",
    [((30, 50), 4, 4), ((50, 30), 4, 2), ((40, 40), 1, 1), ((12, 3, 5, 5), 3, 3), ((64, 2), 2, 2)],
)
def test_powersgd_is_exact_for_matrices_of_its_rank(shape, rank, true_rank):
    n, m = min(((math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))), key=sum)
    left = normal(n, true_rank)
    grads = [(left @ normal(true_rank, m)).reshape(shape) for _ in range(3)]  # on all ranks the same columns
    run = hc.simulate(f"powersgd:rank={rank},min_rate=0,min_numel=0", [[{"t": g} for g in grads]])
    expected = np.mean(grads, axis=0)
    np.testing.assert_allclose(run.mean[0]["t"], expected, atol=3e-5 * np.abs(expected).max())


def test_powersgd_follows_the_paper():
    """P = orthonormal of mean(MQ); Q = mean(MᵀP); result PQᵀ; e = M − PQᵀ; Q of the last step starts the next."""
    shape, rank, ranks = (20, 30), 3, 2
    grads = [[normal(*shape) for _ in range(ranks)] for _ in range(4)]
    run = hc.simulate(f"powersgd:rank={rank},min_rate=0,min_numel=0", [[{"t": g} for g in step] for step in grads])
    compressor = hc.get_compressor(f"powersgd:rank={rank},min_rate=0,min_numel=0")
    q = compressor.init("t", shape).arrays["q"].reshape(rank, 30).T.astype(np.float64)
    errors = np.zeros((ranks, *shape))
    for step, mean in zip(grads, run.mean):
        matrices = np.array(step) + errors
        p = np.linalg.qr(np.mean(matrices @ q, axis=0))[0]
        q = np.mean(matrices.transpose(0, 2, 1) @ p, axis=0)
        np.testing.assert_allclose(mean["t"], p @ q.T, atol=1e-4)
        errors = matrices - p @ q.T
    for rank_, state in enumerate(run.state):
        np.testing.assert_allclose(state["t"]["residual"].reshape(shape), errors[rank_], atol=1e-4)


def test_powersgd_starts_when_told_and_leaves_what_it_would_not_shrink():
    grads = [[{"w": normal(64, 64), "b": normal(64), "thin": normal(64, 4)}] * 2] * 3
    run = hc.simulate("powersgd:rank=4,start_step=2,min_numel=0", grads)
    for step in (0, 1):
        for name, g in grads[0][0].items():
            np.testing.assert_allclose(run.mean[step][name], g, rtol=1e-6)
    assert np.linalg.matrix_rank(run.mean[2]["w"].astype(np.float64), tol=1e-4) == 4
    for name in ("b", "thin"):  # 256 floats and 272 of factors
        np.testing.assert_array_equal(run.mean[2][name], grads[2][0][name])
    assert run.bytes_sent[2][0] == 4 * (64 + 256) + 4 + 4 * 4 * (64 + 64) + 3 * 8


def test_powersgd_finds_new_directions():
    """Exact for rank ≤ r in every step, also where a gradient has nothing in common with the one before."""
    first, second = np.zeros((20, 20), np.float32), np.zeros((20, 20), np.float32)
    first[3, 4], second[5, 6] = 1, 2
    run = hc.simulate(
        "powersgd:rank=2,min_rate=0,min_numel=0", [[{"t": g}] for g in (first, second, 0 * first, 0 * first)]
    )
    np.testing.assert_allclose(np.sum([mean["t"] for mean in run.mean], axis=0), first + second, atol=1e-5)


def test_powersgd_recovers_from_huge_gradients():
    """P of finite elements can overflow: the step after is projected on shorter vectors."""
    huge, nothing = ({"t": np.full((8, 40_000), g, np.float32)} for g in (1e34, 0))
    run = hc.simulate("powersgd:rank=1,min_rate=0", [[huge]] * 3 + [[nothing]] * 4)
    assert [bool(np.isfinite(mean["t"]).all()) for mean in run.mean][-2:] == [True, True]
    assert not all(np.isfinite(mean["t"]).all() for mean in run.mean)
    assert np.abs(run.state[0]["t"]["residual"]).max() < 1e30


def test_signsgds_majority():
    """The sign of the sum of signs, ties and zeros give 0; the magnitude is 1, whatever the gradients' is."""
    votes = np.array(np.meshgrid([-1, 0, 1], [-1, 0, 1], [-1, 0, 1], [-1, 0, 1])).reshape(4, -1).astype(np.float32)
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
    assert hc.simulate("efsignsgd", [[{"t": normal(128, 100)}]]).bytes_sent[0][0] <= 4 + 24 + 8 + 128 * 100 // 8 + 1


def test_onebit_sends_the_means_of_the_halves():
    g = normal(1000) + np.float32(0.3)
    (mean,), state = alone("onebit:min_numel=0", g)
    expected = np.where(g < 0, g[g < 0].mean(dtype=np.float64), g[g >= 0].mean(dtype=np.float64))
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(state["residual"], g - expected, atol=1e-6)
    assert alone("onebit:min_numel=0", np.ones(5, np.float32))[0][0].tolist() == [1] * 5  # one half is empty


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


def test_terngrad_is_ternary_and_clips():
    g = normal(20_000)
    (mean,), _ = alone("terngrad:min_numel=0", g)
    limit = 2.5 * g.std(dtype=np.float64)
    assert np.unique(np.round(np.abs(mean) / limit, 5)).tolist() == [0, 1]
    clipped = np.clip(g, -limit, limit)
    assert (mean * clipped).sum() / (clipped**2).sum() == pytest.approx(1, abs=0.05)
    (mean,), _ = alone("terngrad:min_numel=0,clip=0", g)
    assert np.unique(np.abs(mean)).tolist() == [0, np.abs(g).max()]
    two = hc.simulate("terngrad:min_numel=0,clip=0", [[{"t": g}, {"t": 2 * g}]])  # one scale for all
    assert np.unique(np.round(np.abs(two.mean[0]["t"]) / np.abs(2 * g).max(), 5)).tolist() == [0, 0.5, 1]


def test_terngrad_clips_at_each_ranks_own_deviation():
    """A rank's outlier counts as clip·σ of that rank, also where another rank's gradient makes the shared scale far larger."""
    small, large = np.float32(0.1) * normal(2000), normal(2000)
    small[:20], large[:20] = 5, 0
    limit = 2.5 * small.std(dtype=np.float64)
    run = hc.simulate("terngrad:min_numel=0", [[{"t": small}, {"t": large}]] * 300)
    draws = np.array([mean["t"][:20] for mean in run.mean], np.float64)
    assert draws.mean() == pytest.approx(limit / 2, abs=5 * draws.std() / math.sqrt(draws.size))
    assert 3 * limit / 2 < 5 / 2  # what a limit of the shared scale would let through is far from it
    waits = hc.simulate("terngrad:min_numel=0,ratio=1", [[{"t": small}]])  # with a residual, what is clipped waits in it
    np.testing.assert_allclose(waits.mean[0]["t"] + waits.state[0]["t"]["residual"], small, rtol=1e-6, atol=1e-6)


def test_terngrad_does_not_clip_what_does_not_vary():
    for size in (1, 2, 100, 5000):
        for value in (0.3, 7.7, 2.17e-4):
            (mean,), _ = alone("terngrad:min_numel=0", np.full(size, value, np.float32))
            np.testing.assert_allclose(mean, value, rtol=1e-6)


def test_strom_sends_the_threshold_and_keeps_the_rest():
    g = normal(1000)
    means, state = alone("strom:min_numel=0,tau=0.5", g, 0 * g, 0 * g)
    assert set(np.unique(means[0])) <= {-0.5, 0, 0.5}
    np.testing.assert_array_equal(means[0], np.where(np.abs(g) > 0.5, np.copysign(0.5, g), 0))
    np.testing.assert_array_equal(
        means[1], np.where(np.abs(g) > 1, np.copysign(0.5, g), 0)
    )  # tau a step, not all at once
    np.testing.assert_allclose(sum(means) + state["residual"], g, atol=1e-6)


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("s, bucket", [(1, 16), (3, 512), (15, 64), (127, 512)])
def test_qsgds_variance_bound(norm, s, bucket):
    """E‖Q(v) − v‖² ≤ min(d/s², √d/s)·‖v‖² for each bucket of d (Lemma 3.1), with the largest as norm all the more."""
    buckets = np.array([normal(bucket) * np.exp(2 * normal(bucket)) for _ in range(20)]).astype(np.float32)
    run = hc.simulate(
        f"qsgd:min_numel=0,levels={s},bucket_size={bucket},norm={norm}", [[{"t": buckets.reshape(-1)}]] * 60
    )
    errors = np.array([mean["t"].reshape(buckets.shape) - buckets for mean in run.mean], np.float64)
    measured = (errors**2).sum(axis=2).mean(axis=0)
    bound = min(bucket / s**2, math.sqrt(bucket) / s) * (buckets.astype(np.float64) ** 2).sum(axis=1)
    assert (measured <= 1.1 * bound).all()


def test_qsgds_levels_are_whole_parts_of_a_buckets_norm():
    g = normal(1000)
    g[512:] = 0
    (mean,), _ = alone("qsgd:min_numel=0,levels=5,bucket_size=512", g)
    levels = mean[:512] / (np.linalg.norm(g[:512].astype(np.float64)) / 5)
    np.testing.assert_allclose(levels, np.rint(levels), atol=1e-5)
    assert not mean[512:].any()


def test_qsgds_codings_say_the_same():
    """Fixed width and Elias code decode to the same; sparse levels make Elias smaller, and then it is taken."""
    g = normal(64, 512)
    results, sizes = {}, {}
    for coding in ("fixed", "elias", "auto"):
        run = hc.simulate(f"qsgd:levels=1,coding={coding}", [[{"t": g}]])
        results[coding], sizes[coding] = run.mean[0]["t"].tobytes(), run.bytes_sent[0][0]
    assert len(set(results.values())) == 1
    assert sizes["elias"] < sizes["fixed"] and sizes["auto"] <= sizes["fixed"]


@pytest.mark.parametrize("spec", ["topk:ratio=0.01", "topk:ratio=0.01,values=bf16", "dgc:ratio=0.01,momentum=0"])
def test_topk_sends_the_largest(spec):
    g = normal(200, 100)
    (mean,), state = alone(spec, g)
    name = "residual" if spec.startswith("topk") else "v"
    sent = mean.reshape(-1) != 0
    assert 160 <= sent.sum() <= 200
    assert np.abs(g.reshape(-1)[sent]).min() >= np.sort(np.abs(g.reshape(-1)))[-200]
    np.testing.assert_array_equal(state[name] + mean.reshape(-1), g.reshape(-1))


def test_randomk_draws_other_places_on_each_rank_and_step():
    run = hc.simulate("randomk:ratio=0.1,min_numel=0", [[{"t": np.ones(1000, np.float32)} for _ in range(2)]] * 2)
    first, second = (mean["t"] for mean in run.mean)
    assert 150 < (first != 0).sum() < 200  # 100 of each of two ranks, some the same
    assert ((first != 0) != (second != 0)).any()
    assert run.bytes_sent[0][0] <= 4 + 24 + 8 + 4 * 100 + 1  # places cost nothing


def test_float16_tells_what_became_infinite():
    with pytest.warns(RuntimeWarning, match="t has elements beyond 65504"):
        run = hc.simulate("fp16", [[{"t": np.float32([1, 1e5])}] * 2] * 3)
    assert [stats["overflows"] for stats in run.stats] == [3, 3] and run.stats[0]["steps_undone"] == 3
    assert np.isinf(run.mean[0]["t"][1])
    quiet = hc.simulate("fp16", [[{"t": np.float32([1, np.inf])}] * 2])  # it was infinite before
    assert quiet.stats[0]["overflows"] == 0 and quiet.stats[0]["steps_undone"] == 1


def test_bf16_keeps_the_range_of_float32():
    g = np.float32([3.4028235e38, -3.4e38, 1e-40, 1 + 2**-9, 1 + 3 * 2**-9])
    (mean,), _ = alone("bf16", g)
    assert np.isfinite(mean).all()
    np.testing.assert_array_equal(mean[3:], np.float32([1, 1 + 2**-7]))  # ties to even


# -- traps -------------------------------------------------------------------------------------------------------------


def test_momentum_is_taken_once():
    """The stream of dgc has all of the momentum, once: three equal gradients give 1, 1.9, 2.71 times them."""
    g = normal(40, 40)
    run = hc.simulate("dgc:ratio=1,masking=false,momentum=0.9", [[{"t": g}] * 2] * 3)
    for mean, times in zip(run.mean, (1, 1.9, 2.71)):
        np.testing.assert_allclose(mean["t"], times * g, rtol=1e-5)
    assert hc.get_compressor("dgc").bound(0.8, True).m == 0.8
    assert not hc.get_compressor("dgc").bound(0.0, False).init("t", (40, 40)).arrays.keys() & {"u"}


@pytest.mark.parametrize("values", ["fp16", "bf16"])
def test_indices_are_not_narrowed_with_the_values(values):
    """Indices beyond 2048 and 65504, which a cast to float16 would round or make infinite."""
    g = np.zeros((500, 1000), np.float32)
    places = [1, 2049, 65_505, 65_537, 123_457, 499_999]
    g.reshape(-1)[places] = np.arange(1, 7)
    (mean,), _ = alone(f"topk:ratio=0.00002,values={values}", g)
    assert set(np.flatnonzero(mean)) <= set(places) and len(np.flatnonzero(mean)) >= 5


def test_each_rank_has_residuals_of_its_own():
    """A state of rank 0 would lose what the others still hold: state_dict is per rank, and says so."""
    exchanges = ranks_of("topk:ratio=0.01,min_numel=0", 2, {"t": (50, 50)})
    run_step(exchanges, [{"t": normal(2500)}, {"t": normal(2500)}])
    states = [exchange.state_dict() for exchange in exchanges]
    assert [state["rank"] for state in states] == [0, 1]
    assert (states[0]["tensors"]["t"]["residual"] != states[1]["tensors"]["t"]["residual"]).any()
    with pytest.raises(ValueError, match="belongs to one rank"):
        exchanges[1].load_state_dict(states[0])


@pytest.mark.parametrize("spec", ["efsignsgd", "onebit", "signsgd", "strom:tau=0.1", "terngrad", "variance"])
def test_zeros_beside_other_elements_stay_zero_on_average(spec):
    """One bit has no zero: with error feedback what it says instead comes back; the others say 0."""
    g = np.zeros(100, np.float32)
    g[:50] = np.where(np.arange(50) % 2, 1, -1)
    means, _ = alone(f"{spec}{',' if ':' in spec else ':'}min_numel=0", *[g] * 60)
    of_zeros = np.mean(means, axis=0)[50:]
    assert np.abs(of_zeros).max() < (0.05 if spec in ("efsignsgd", "onebit") else 1e-9)


@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.1", "dgc:ratio=0.1,momentum=0", "strom:tau=0.9", "variance", "adacomp:bin_length=50"]
)
def test_what_is_sent_does_not_depend_on_where_it_lies(spec):
    """Reversed gradients are sent reversed, ties aside: no preference for low indices."""
    g = normal(100, 100)
    spec += ("," if ":" in spec else ":") + "min_numel=0"
    (forward, again), (backward, its_again) = alone(spec, g, g)[0], alone(spec, g[::-1, ::-1], g[::-1, ::-1])[0]
    same = (forward != 0) == (backward[::-1, ::-1] != 0)
    assert same.mean() > 0.97 and ((again != 0) == (its_again[::-1, ::-1] != 0)).mean() > 0.97
    where = np.flatnonzero((forward != 0) | (again != 0))
    assert abs(np.mean(where) - 5000) < 1000


def test_the_ratio_counts_everything():
    """Headers, carriers, scales, indices and the tensors that go dense."""
    shapes = {"w": (100, 100), "bias": (100,)}
    run = hc.simulate("topk:ratio=0.001", [[{n: normal(*s) for n, s in shapes.items()} for _ in range(2)]] * 3)
    for stats, sent in zip(run.stats, np.sum(run.bytes_sent, axis=0)):
        assert stats["ratio"] == 3 * 4 * 10_100 / sent
    least = (
        4 * 100 + 4 + 24 + 6 + 4 * 8 + 8
    )  # dense bias, carrier, header, head of the body, values, some bits of indices
    assert min(map(min, run.bytes_sent)) >= least


def test_payloads_are_what_they_decode_to():
    """What encode takes out of residuals is what every rank decodes, bit for bit: nothing is rounded on the way."""
    for spec in (
        "topk:ratio=0.1,values=fp16",
        "topk:ratio=0.1,values=bf16",
        "strom:tau=0.3",
        "adacomp",
        "efsignsgd",
        "onebit",
        "randomk:ratio=0.1",
        "variance:error_feedback=true",
    ):
        g = normal(900)
        spec += ("," if ":" in spec else ":") + "min_numel=0"
        payload, compressor, state = payload_of(spec, g, squares=np.zeros(900, np.float32))
        assert isinstance(payload, Gathered)
        sent = decoded(compressor, payload.body, 900)
        compressor.commit(state)
        compressor.settle(state)
        np.testing.assert_array_equal(compressor.residual(state), g - sent)
        assert payload.elements == 900 if spec.startswith(("ef", "one")) else payload.elements == np.count_nonzero(sent)
