"""Compressors that send some coordinates as they are, against their papers' own statements: global
random-k, topk, randomk."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_checks import alone, normal, seeded  # noqa: F401
from ranks import ranks_of
from tiers import examples

import horovod_compress as hc
from horovod_compress import kernels
from horovod_compress.engine.lockstep import run_step

# -- global random-k


@pytest.mark.parametrize(
    "d, k", [(60, 10), (60, 7), (61, 60), (1000, 1), (5, 5), (5, 100), (64, 1)]
)
def test_globalrandk_visits_every_coordinate_in_a_sweep(d, k):
    count = min(d, k)
    steps = -(-d // count)
    run = hc.simulate(
        f"globalrandk:min_numel=0,k={k},unbiased=true",
        [[{"t": np.ones(d, np.float32)}] * 2] * (3 * steps),
    )
    visits = [mean["t"] != 0 for mean in run.mean]
    assert all(visit.sum() == count for visit in visits)
    for sweep in range(3):
        total = np.sum(visits[sweep * steps : (sweep + 1) * steps], axis=0)
        assert (total >= 1).all() and total.sum() == steps * count
        assert d % count or (total == 1).all()
    if 1 < count < d / 2:
        assert any((a != b).any() for a, b in zip(visits[:steps], visits[steps : 2 * steps])), (
            "sweeps differ"
        )


@examples(60)
@given(st.integers(0, 3000), st.integers(0, 2**64 - 1), st.data())
def test_coordinates_are_a_permutation(numel, key, data):
    whole = kernels.cpu.draw_coordinates(key=key, numel=numel, first=0, count=numel)
    assert np.array_equal(np.sort(whole), np.arange(numel))
    first = data.draw(st.integers(0, numel))
    count = data.draw(st.integers(0, numel - first))
    np.testing.assert_array_equal(
        kernels.cpu.draw_coordinates(key=key, numel=numel, first=first, count=count),
        whole[first:][:count],
    )


def test_coordinates_are_spread_evenly():
    """Over many keys each coordinate comes equally often, and neighbours come together no more than
    chance has it."""
    d, keys = 50, 4000
    draws = np.array(
        [
            kernels.cpu.draw_coordinates(key=int(key), numel=d, first=0, count=10)
            for key in np.random.default_rng(0).integers(0, 2**63, keys)
        ]
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
    np.testing.assert_allclose(
        results[0]["t"][sent], np.mean(kept, axis=0)[sent], rtol=1e-5, atol=1e-7
    )
    for exchange, named, gradient in zip(exchanges, results, kept):
        # No local gradient stays behind at the other coordinates.
        assert not named["t"][~sent].any()
        np.testing.assert_array_equal(
            exchange.arrays()["t"]["residual"], np.where(sent, 0, gradient)
        )


@pytest.mark.parametrize("option", ["k=50", "ratio=0.05"])
@pytest.mark.parametrize("id", ["globalrandk", "maxnorm", "multiscale"])
def test_k_may_count_the_whole_models_coordinates(id, option):
    """As in the authors' code: K of all tensors together in each step, each once a sweep; what goes
    dense does not count."""
    shapes = {"a": (20, 30), "b": (12, 25), "tiny": (4, 5), "c": (8, 10)}
    ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    spec = f"{id}:min_numel=15,{option},of=model,unbiased=true"
    run = hc.simulate(spec, [[{**ones, "bias": np.ones(1000, np.float32)}] * 2] * 40)
    visits = np.array(
        [np.concatenate([mean[name].reshape(-1) for name in shapes]) for mean in run.mean]
    )
    assert ((visits != 0).sum(axis=1) == 50).all()
    np.testing.assert_allclose(visits[visits != 0], 1000 / 50, rtol=1e-5)  # d/K, of the model
    for sweep in range(2):
        assert ((visits[20 * sweep : 20 * (sweep + 1)] != 0).sum(axis=0) == 1).all()
    assert (visits[:20] != visits[20:]).any()
    per_tensor = [
        (visits[:, a : a + n] != 0).sum(axis=1) for a, n in ((0, 600), (600, 300), (900, 20))
    ]
    # So many as fall into it, in a small tensor often none.
    assert per_tensor[0].std() > 0 and (per_tensor[2] == 0).any()


def test_a_gradient_that_is_not_finite_shows_where_nothing_of_it_is_drawn():
    grads = [
        [
            {"a": np.ones((50, 50), np.float32), "b": np.full((4, 4), np.nan, np.float32)},
            {"a": np.ones((50, 50)), "b": np.ones((4, 4))},
        ]
    ]
    for id in ("globalrandk", "maxnorm", "multiscale"):
        run = hc.simulate(f"{id}:min_numel=0,k=1,of=model", grads * 2)
        assert [stats["steps_undone"] for stats in run.stats] == [2, 2]


def test_tensors_and_steps_have_different_coordinates():
    run = hc.simulate(
        "globalrandk:ratio=0.1,min_numel=0,unbiased=true",
        [[{"a": np.ones(500), "b": np.ones(500)}]] * 2,
    )
    a, b = (run.mean[0][name] != 0 for name in "ab")
    assert (a != b).any() and not (a & (run.mean[1]["a"] != 0)).any()


# -- topk and randomk


@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.01", "topk:ratio=0.01,values=bf16", "dgc:ratio=0.01,momentum=0"]
)
def test_topk_sends_the_largest(spec):
    g = normal(200, 100)
    (mean,), state = alone(spec, g)
    name = "residual" if spec.startswith("topk") else "v"
    sent = mean.reshape(-1) != 0
    assert 160 <= sent.sum() <= 200
    assert np.abs(g.reshape(-1)[sent]).min() >= np.sort(np.abs(g.reshape(-1)))[-200]
    np.testing.assert_array_equal(state[name] + mean.reshape(-1), g.reshape(-1))


def test_randomk_draws_other_places_on_each_rank_and_step():
    run = hc.simulate(
        "randomk:ratio=0.1,min_numel=0", [[{"t": np.ones(1000, np.float32)} for _ in range(2)]] * 2
    )
    first, second = (mean["t"] for mean in run.mean)
    # 100 of each of two ranks, some the same.
    assert 150 < (first != 0).sum() < 200
    assert ((first != 0) != (second != 0)).any()
    assert run.bytes_sent[0][0] <= 4 + 24 + 8 + 4 * 100 + 1  # places cost nothing


@pytest.mark.parametrize("spec", ["maxnorm:k=100", "globalrandk:k=100", "multiscale:k=100"])
def test_a_tensor_that_goes_dense_takes_no_coordinates(spec):
    rng, shapes = np.random.default_rng(0), {"w": (40, 50), "bias": (8000,)}
    steps = [
        [{name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}]
        for _ in range(3)
    ]
    runs = [
        hc.simulate(f"{spec},of=model,dense={dense}", steps) for dense in ("fp32", "fp16", "int8")
    ]
    for run in runs:
        assert run.stats[0]["elements_sent"] == 3 * (100 + 8000)
        for found, expected in zip(run.mean, runs[0].mean):
            np.testing.assert_array_equal(found["w"], expected["w"])
