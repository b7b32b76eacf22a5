"""For every id of available(): any shape, type and size of gradients."""

import numpy as np
import pytest
from battery_facts import FACTS, SHAPES, bytes_of, over, quiet, shaped, spec_of, steps_of, variants

import horovod_compress as hc

pytestmark = quiet


@over(variants)
@pytest.mark.parametrize(
    "shape", [(), (0,), (0, 5), (1,), (1, 1), (2,), (3, 1, 7), (1, 50), (50, 1)]
)
def test_every_shape(id, options, shape):
    rng = np.random.default_rng(0)
    grads = [
        [{"t": rng.standard_normal(shape).astype(np.float32), "u": np.ones(3)} for _ in range(3)]
        for _ in range(3)
    ]
    run = hc.simulate(spec_of(id, options), grads)
    for mean in run.mean:
        assert (
            mean["t"].shape == shape
            and mean["t"].dtype == np.float32
            and np.isfinite(mean["t"]).all()
        )


@over(variants)
def test_types_and_layouts_of_memory_do_not_matter(id, options):
    rng = np.random.default_rng(0)
    wide = [[rng.standard_normal((60, 48)).astype(np.float16) for _ in range(2)] for _ in range(3)]
    kept = [[array.copy() for array in ranks] for ranks in wide]
    expected = hc.simulate(
        spec_of(id, options),
        [[{"t": np.ascontiguousarray(a[::2, ::2].T, np.float32)} for a in r] for r in wide],
    )
    for dtype in (np.float16, np.float64):
        run = hc.simulate(
            spec_of(id, options),
            [[{"t": a.astype(dtype)[::2, ::2].T} for a in ranks] for ranks in wide],
        )
        assert bytes_of(run.mean) == bytes_of(expected.mean)
    assert all(np.array_equal(a, b) for mine, its in zip(wide, kept) for a, b in zip(mine, its))
    with pytest.raises(ValueError, match="complex"):
        hc.simulate(spec_of(id, options), [[{"t": np.ones((4, 4), complex)}]])


@over(variants)
def test_zeros_stay_zeros(id, options):
    run = hc.simulate(spec_of(id, options), [[{n: np.zeros(s) for n, s in SHAPES.items()}] * 3] * 3)
    for mean in run.mean:
        assert not any(array.any() for array in mean.values())
    assert run.stats[0]["steps_undone"] == 0 and run.stats[0]["residual_norm"] == 0


@over(variants)
@pytest.mark.parametrize("up", [True, False])
def test_scaling_a_gradient_by_a_power_of_two_scales_the_result(id, options, up):
    power = FACTS[id].scales
    if not power or "tau" in options or "clip_norm" in options:
        pytest.skip("has a scale of its own")
    factor = np.float32(2.0 ** (power if up else -power))
    grads = shaped(steps_of(0, 4, 2, spread=False))
    scaled = [[{n: g * factor for n, g in named.items()} for named in ranks] for ranks in grads]
    run, its = hc.simulate(spec_of(id, options), grads), hc.simulate(spec_of(id, options), scaled)
    # 16-bit values have a range of their own.
    exact = id != "powersgd" and "values" not in options
    for mean, its_mean in zip(run.mean, its.mean):
        for name in SHAPES:
            if exact:
                np.testing.assert_array_equal(mean[name] * factor, its_mean[name])
            elif id == "powersgd":
                np.testing.assert_allclose(
                    mean[name], its_mean[name] / factor, rtol=1e-3, atol=1e-4
                )


@over(variants)
@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-40, 1e-45])
def test_huge_and_denormal_gradients(id, options, size):
    """The result is finite and in proportion, or not finite on all ranks, and then counted."""
    rng = np.random.default_rng(0)
    grads = [
        [{"t": (size * rng.choice([-1, 0, 1], (20, 30))).astype(np.float32)} for _ in range(2)]
        for _ in range(3)
    ]
    run = hc.simulate(spec_of(id, options), grads)
    undone = sum(not np.isfinite(mean["t"]).all() for mean in run.mean)
    assert run.stats[0]["steps_undone"] == undone
    assert undone == 0 or (size == 1e30 and id in ("fp16", "variance")), (
        "these two say that they cannot"
    )
    if id != "signsgd" and not undone:
        d = np.sqrt(600)
        least = 2.0**-126 if id in ("natural",) else 0
        assert all(np.abs(mean["t"]).max() <= 20 * d * max(size, least) for mean in run.mean)
