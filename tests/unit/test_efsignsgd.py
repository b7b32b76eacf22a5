"""EF-SignSGD's residual and the learning rate (Karimireddy et al., ICML 2019, Algorithm 1)."""

import numpy as np
import pytest
from ranks import ranks_of

import horovod_compress as hc

SPEC = "efsignsgd:min_numel=0"


def steps_of(steps, ranks, seed=0):
    rng = np.random.default_rng(seed)
    return [
        [{"t": rng.standard_normal(500).astype(np.float32)} for _ in range(ranks)]
        for _ in range(steps)
    ]


def published(gradients, lr):
    """x after each step, from 0, on one worker: p = γ·g + e; Δ = ‖p‖₁/d·sign(p); x ← x − Δ; e ← p −
    Δ. Also e/γ at the end. More workers average their Δ."""
    x, errors, path = 0.0, np.zeros((len(gradients[0]), 500)), []
    for ranks, rate in zip(gradients, lr):
        p = rate * np.array([named["t"] for named in ranks], np.float64) + errors
        delta = np.abs(p).mean(axis=1, keepdims=True) * np.where(p < 0, -1, 1)
        x, errors = x - delta.mean(axis=0), p - delta
        path.append(x)
    return path, errors


RATES = {
    "constant": [0.1] * 8,
    "steps": [0.1] * 3 + [0.01] * 3 + [0.001] * 2,
    "warm-up": [0.0, 0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.1],
    "cosine": list(0.05 * (1 + np.cos(np.linspace(0, 3, 8)))),
    "cyclic": [0.1, 0.5, 0.1, 0.5, 0.01, 1, 0.01, 1],
}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("lr", RATES.values(), ids=RATES)
def test_the_updates_are_the_published_ones(lr, ranks):
    gradients = steps_of(8, ranks)
    first = next(i for i, rate in enumerate(lr) if rate)  # before, e is 0 and nothing moves
    expected, errors = published(gradients[first:], lr[first:])
    run = hc.simulate(SPEC, gradients, lr=lr)
    x = 0.0
    for mean, rate, its in zip(run.mean[first:], lr[first:], expected):
        x = x - rate * mean["t"].astype(np.float64)
        np.testing.assert_allclose(x, its, rtol=1e-4, atol=1e-6)
    for state, error in zip(run.state, errors):
        np.testing.assert_allclose(lr[-1] * state["t"]["residual"], error, atol=1e-6)


def test_without_a_rate_or_by_wish_the_residual_is_one_of_gradients():
    gradients, lr = steps_of(4, 2), [0.1, 0.01, 0.5, 0.1]
    plain = hc.simulate(SPEC, gradients)
    for run in (
        hc.simulate(f"{SPEC},follow_lr=false", gradients, lr=lr),
        hc.simulate(SPEC, gradients, lr=[0.3] * 4),
    ):
        for mine, its in zip(run.mean, plain.mean):
            np.testing.assert_array_equal(mine["t"], its["t"])
    assert set(plain.state[0]["t"]) == {"residual"}
    changed = hc.simulate(SPEC, gradients, lr=lr)
    assert (changed.mean[1]["t"] != plain.mean[1]["t"]).any()
    seide = (
        hc.simulate("onebit:min_numel=0", gradients, lr=lr),
        hc.simulate("onebit:min_numel=0", gradients),
    )
    for mine, its in zip(*(run.mean for run in seide)):
        np.testing.assert_array_equal(mine["t"], its["t"])


def test_the_update_that_waits_at_a_rate_of_zero_comes_behind():
    gradients, lr = steps_of(5, 1), [0.1, 0.2, 0.0, 0.1, 0.1]
    found, expected = (
        hc.simulate(SPEC, gradients[:2] + gradients[i:], lr=lr[:2] + lr[i:]).mean for i in (2, 3)
    )
    for mine, its in zip(found[3:], expected[2:]):
        np.testing.assert_array_equal(mine["t"], its["t"])
    assert all(
        np.isfinite(mean["t"]).all() for mean in hc.simulate(SPEC, gradients, lr=[0] * 5).mean
    )


def test_a_step_that_is_rolled_back_loses_nothing():
    """What was put off before it is still put off after it, in the units of the rate that is then
    in force."""
    first, second = (ranks[0]["t"] for ranks in steps_of(2, 1))
    poisoned = second.copy()
    poisoned[7] = np.nan
    run = hc.simulate(
        SPEC, [[{"t": g}] for g in (first, poisoned, 0 * first)], lr=[0.1, 0.05, 0.01]
    )
    assert not np.isfinite(run.mean[1]["t"]).all() and run.stats[0]["steps_undone"] == 1
    good = np.arange(500) != 7
    total = 0.1 * first.astype(np.float64) + 0.05 * second
    arrived = (
        0.1 * run.mean[0]["t"].astype(np.float64)
        + 0.01 * run.mean[2]["t"]
        + 0.01 * run.state[0]["t"]["residual"]
    )
    np.testing.assert_allclose(arrived[good], total[good], atol=1e-6)


def test_what_cannot_be_is_refused():
    gradients = steps_of(2, 1)
    with pytest.raises(ValueError, match="efsignsgd: follow_lr needs the optimizer"):
        hc.simulate(f"{SPEC},follow_lr=true", gradients)
    with pytest.raises(ValueError, match="3 learning rates for 2 steps"):
        hc.simulate(SPEC, gradients, lr=[1, 2, 3])
    with pytest.raises(ValueError, match="follow_lr must be"):
        hc.get_compressor("onebit:follow_lr=none")


def test_a_step_that_is_not_finite_keeps_the_update_that_waits():
    """Where the learning rate changes in it too: what waits is γ·residual, before and after."""
    good, bad = steps_of(1, 2)[0], steps_of(1, 2, seed=1)[0]
    bad[1]["t"][:] = np.nan
    before = hc.simulate(SPEC, [good], lr=[0.1])
    after = hc.simulate(SPEC, [good, bad], lr=[0.1, 0.01])
    expected, found = (
        lr * run.state[1]["t"]["residual"].astype(np.float64)
        for lr, run in ((0.1, before), (0.01, after))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_parameter_whose_rate_nobody_knows_keeps_a_gradient():
    """As one that hvd.DistributedOptimizer reduces and that is in none of the optimizer's
    groups."""
    (exchange,) = ranks_of("efsignsgd:follow_lr=true,min_numel=0", 1, {"t": (4,)})
    exchange.finish("t", exchange.submit("t", np.array([1, 2, 3, 10], np.float32)))
    np.testing.assert_array_equal(exchange.arrays()["t"]["residual"], [-3, -2, -1, 6])


@pytest.mark.parametrize("ranks", [2, 70])
def test_rates_without_effect_poison_nothing(ranks):
    """On 70 ranks it goes dense."""
    gradients = steps_of(4, ranks)
    run = hc.simulate(SPEC, gradients, lr=[0.1, 1e-40, 1e-25, 0.1])
    assert all(np.isfinite(mean["t"]).all() for mean in run.mean)
    assert np.isfinite(run.state[0]["t"]["residual"]).all()
