"""PowerSGD against its paper's own statements."""

import math

import numpy as np
import pytest
from paper_checks import normal, seeded  # noqa: F401

import horovod_compress as hc


@pytest.mark.parametrize(
    "shape, rank, true_rank",
    [((30, 50), 4, 4), ((50, 30), 4, 2), ((40, 40), 1, 1), ((12, 3, 5, 5), 3, 3), ((64, 2), 2, 2)],
)
def test_powersgd_is_exact_for_matrices_of_its_rank(shape, rank, true_rank):
    n, m = min(
        ((math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))), key=sum
    )
    left = normal(n, true_rank)
    # On all ranks the same columns.
    grads = [(left @ normal(true_rank, m)).reshape(shape) for _ in range(3)]
    run = hc.simulate(f"powersgd:rank={rank},min_rate=0,min_numel=0", [[{"t": g} for g in grads]])
    expected = np.mean(grads, axis=0)
    np.testing.assert_allclose(run.mean[0]["t"], expected, atol=3e-5 * np.abs(expected).max())


def test_powersgd_follows_the_paper():
    """P = orthonormal of mean(MQ); Q = mean(MᵀP); result PQᵀ; e = M − PQᵀ; Q of the last step
    starts the next."""
    shape, rank, ranks = (20, 30), 3, 2
    grads = [[normal(*shape) for _ in range(ranks)] for _ in range(4)]
    run = hc.simulate(
        f"powersgd:rank={rank},min_rate=0,min_numel=0", [[{"t": g} for g in step] for step in grads]
    )
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
    """Exact for rank ≤ r in every step, also where a gradient has nothing in common with the one
    before."""
    first, second = np.zeros((20, 20), np.float32), np.zeros((20, 20), np.float32)
    first[3, 4], second[5, 6] = 1, 2
    run = hc.simulate(
        "powersgd:rank=2,min_rate=0,min_numel=0",
        [[{"t": g}] for g in (first, second, 0 * first, 0 * first)],
    )
    np.testing.assert_allclose(
        np.sum([mean["t"] for mean in run.mean], axis=0), first + second, atol=1e-5
    )


def test_powersgd_recovers_from_huge_gradients():
    """P of finite elements can overflow: the step after is projected on shorter vectors."""
    huge, nothing = ({"t": np.full((8, 40_000), g, np.float32)} for g in (1e34, 0))
    run = hc.simulate("powersgd:rank=1,min_rate=0", [[huge]] * 3 + [[nothing]] * 4)
    assert [bool(np.isfinite(mean["t"]).all()) for mean in run.mean][-2:] == [True, True]
    assert not all(np.isfinite(mean["t"]).all() for mean in run.mean)
    assert np.abs(run.state[0]["t"]["residual"]).max() < 1e30
