"""For every id of available(): what ranks send adds up to the gradients: exactly with what waits in
residuals, on average, or in the dense limit."""

import math

import numpy as np
import pytest
from battery_facts import (
    FACTS,
    assert_conserved,
    over,
    quiet,
    residual_of,
    shaped,
    spec_of,
    steps_of,
)
from hypothesis import given
from ranks import any_gradients
from tiers import examples

import horovod_compress as hc
from horovod_compress.engine.lockstep import mean_of

pytestmark = quiet


# -- nothing is lost


@over(lambda facts: facts.conserves)
@examples(25)
@given(grads=any_gradients())
def test_nothing_is_lost(id, options, grads):
    run = hc.simulate(spec_of(id, options), grads)
    for name in grads[0][0]:
        residuals = [
            residual_of(id, options, run.state[rank][name]) for rank in range(len(grads[0]))
        ]
        assert_conserved(
            id,
            options,
            [mean[name].reshape(-1) for mean in run.mean],
            residuals,
            [[named[name].reshape(-1) for named in ranks] for ranks in grads],
        )


def test_what_has_a_residual_conserves():
    """No id with error feedback is left out of the test above."""
    for id, facts in FACTS.items():
        compressors = [hc.get_compressor(spec_of(id, options)) for options in facts.variants]
        residuals = [
            compressor.residual(compressor.init("t", (4, 4))) for compressor in compressors
        ]
        assert any(residual is not None for residual in residuals) == bool(facts.conserves), id


# -- unbiased

# Among them what lies at the boundaries of scales: 3/63 of the largest and its neighbours, 15/255,
# 1/7.
VALUES = np.float32(
    [
        0,
        1,
        -1,
        0.3,
        -0.77,
        0.5,
        2e-3,
        -3e-3,
        3 / 63,
        -3 / 63,
        3.001 / 63,
        2.999 / 63,
        3.5 / 63,
        4 / 63,
        15 / 255,
        15.5 / 255,
        1 / 7,
        1.01 / 7,
        1 / 31,
        2**-7,
        -(2**-7) * 1.5,
        1 / 15,
        2 / 15,
    ]
)


@over(lambda facts: facts.unbiased)
@pytest.mark.parametrize("scale", [1, 1e-20])
def test_unbiased_within_the_standard_error(id, options, scale):
    gradient = np.tile(VALUES * np.float32(scale), 2000)
    run = hc.simulate(spec_of(id, options), [[{"t": gradient}]] * 6)
    draws = np.array([mean["t"] for mean in run.mean], np.float64).reshape(-1, VALUES.size) / scale
    values = gradient[: VALUES.size].astype(np.float64) / scale
    error = draws.std(axis=0) / math.sqrt(len(draws))
    assert (np.abs(draws.mean(axis=0) - values) <= 5 * error + 1e-6 * np.abs(values)).all()
    assert (draws.var(axis=0) <= 1.05 * FACTS[id].unbiased[options](values) + 1e-12).all()


@over(lambda facts: facts.unbiased if facts.drawn == "own" else ())
def test_noise_of_ranks_averages_out(id, options):
    """The ranks' own rounding is independent: with the same gradient on 6 ranks it has a sixth of
    the variance. (On 8 some would go dense.)"""
    if "unbiased" in options:
        # Noise of rounding only, not of the coordinates that ranks share.
        options += ",ratio=1"
        options = ",".join(part for part in options.split(",") if part != "ratio=0.3")
    gradient = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    alone, together = (
        np.var(
            hc.simulate(spec_of(id, options), [[{"t": gradient}] * size] * 3).mean[2]["t"]
            - gradient
        )
        for size in (1, 6)
    )
    assert together / alone == pytest.approx(1 / 6, rel=0.15)


# -- the dense limit, and tensors that go dense


@over(lambda facts: facts.dense)
@examples(25)
@given(grads=any_gradients())
def test_dense_limit(id, options, grads):
    facts = FACTS[id]
    # Has no range for 12 orders of magnitude.
    if id == "fp16":
        grads = [
            [{n: np.clip(g, -1000, 1000) for n, g in named.items()} for named in ranks]
            for ranks in grads
        ]
    # Finds all directions from its random start; later from those of the last step.
    if id == "powersgd":
        grads = grads[:1]
    run = hc.simulate(spec_of(id, options), grads)
    for name in grads[0][0]:
        size = 0
        for mean, ranks in zip(run.mean, grads):
            values = np.array([named[name] for named in ranks], np.float64)
            size = size + (
                np.linalg.norm(values) if id in ("powersgd", "demo") else np.abs(values).max(axis=0)
            )
            assert (
                np.abs(mean[name] - values.mean(axis=0)) <= facts.dense_error * size + 2.0**-24
            ).all()


@pytest.mark.parametrize(
    "id", [id for id, about in hc.available().items() if "dense" in about["options"]]
)
@pytest.mark.parametrize("dense, width", [("fp32", 4), ("fp16", 2)])
def test_small_one_dimensional_and_excluded_tensors_go_dense(id, dense, width):
    shapes = {"small": (10, 10), "bias": (5000,), "embedding.weight": (50, 50), "scalar": ()}
    grads = shaped(steps_of(0, 3, 2, shapes, spread=False), shapes)
    options = f"min_numel=1024,exclude=embed*+nothing,dense={dense}" + (
        ",momentum=0" if id == "dgc" else ""
    )
    run = hc.simulate(f"{id}:{options}", grads)
    for step, ranks in enumerate(grads):
        for name in shapes:
            expected = mean_of([named[name].astype(f"f{width}") for named in ranks])
            np.testing.assert_array_equal(run.mean[step][name], expected.astype(np.float32))
    assert run.bytes_sent == [[width * (100 + 5000 + 2500 + 1)] * 2] * 3
    assert run.state == [{name: {} for name in shapes}] * 2
    covered = hc.simulate(f"{id}:min_numel=1024", [[{"w": np.ones((64, 64), np.float32)}] * 2])
    assert covered.bytes_sent[0][0] < 64 * 64 * 4
