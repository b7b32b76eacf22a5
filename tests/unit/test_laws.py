"""Deep Gradient Compression's laws, over arbitrary shapes and values: what was sent is forgotten,
the dense limit is exact."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_tensor import cpu
from ranks import any_gradients, end_step
from tiers import examples

import horovod_compress as hc
from horovod_compress.compressors.base import Step

ratios = st.sampled_from([0.001, 0.01, 0.1, 0.4])


@examples(100)
@given(any_gradients(max_ranks=1), ratios, st.booleans(), st.sampled_from([0.5, 0.9]))
def test_what_was_sent_is_zero_afterwards(grads, ratio, nesterov, momentum):
    spec = {"id": "dgc", "ratio": ratio, "momentum": momentum, "nesterov": nesterov, "min_numel": 0}
    for steps in range(1, len(grads) + 1):
        run = hc.simulate(spec, grads[:steps])
        for name, mean in run.mean[-1].items():
            sent = mean.reshape(-1) != 0
            assert (run.state[0][name]["v"][sent] == 0).all()
            # All of one element is sent in every step: nothing is late.
            assert mean.size == 1 or (run.state[0][name]["u"][sent] == 0).all()


@examples(60)
@given(any_gradients(), st.booleans(), st.sampled_from([0.0, 0.9]), st.sampled_from([0, 64]))
def test_dense_limit(grads, nesterov, momentum, min_numel):
    """ratio=1 is the momentum of the mean gradient, through dense and gathered payloads alike."""
    spec = {"id": "dgc", "ratio": 1.0, "momentum": momentum, "min_numel": min_numel}
    if momentum:
        spec["nesterov"] = nesterov
    run = hc.simulate(spec, grads)
    for name, first in grads[0][0].items():
        buffer = scale = np.zeros(first.shape)
        for step, ranks in enumerate(grads):
            mean = np.mean([named[name].astype(np.float64) for named in ranks], axis=0)
            buffer = momentum * buffer + mean
            expected = mean + momentum * buffer if momentum and nesterov else buffer
            scale = (
                np.maximum(scale, np.max([np.abs(named[name]) for named in ranks], axis=0)) * 1.5
            )
            assert (np.abs(run.mean[step][name] - expected) <= 2e-6 * 10 * scale + 1e-30).all()


def test_against_the_papers_recurrence():
    """Every step of section 3 written out, masking on, several ranks, against the exchange."""
    rng = np.random.default_rng(3)
    ranks, d, k, m = 3, 1000, 10, 0.9
    grads = [
        [{"w": rng.standard_normal((20, 50)).astype(np.float32)} for _ in range(ranks)]
        for _ in range(30)
    ]
    for nesterov in (False, True):
        run = hc.simulate(
            f"dgc:ratio=0.01,momentum={m},nesterov={nesterov},min_numel=0,min_k=1", grads
        )
        u, v = np.zeros((ranks, d), np.float32), np.zeros((ranks, d), np.float32)
        for step, named in enumerate(grads):
            total = np.zeros(d)
            for rank in range(ranks):
                g = named[rank]["w"].reshape(-1)
                if nesterov:
                    u[rank] = np.float32(m) * (u[rank] + g)
                    v[rank] = v[rank] + (u[rank] + g)
                else:
                    u[rank] = np.float32(m) * u[rank] + g
                    v[rank] = v[rank] + u[rank]
                top = np.argsort(-np.abs(v[rank]))[:k]
                total[top] += v[rank, top]
                v[rank, top] = u[rank, top] = 0
            np.testing.assert_allclose(
                run.mean[step]["w"].reshape(-1), total / ranks, rtol=1e-5, atol=1e-6
            )
        for rank in range(ranks):
            np.testing.assert_array_equal(run.state[rank]["w"]["v"], v[rank])
            np.testing.assert_array_equal(run.state[rank]["w"]["u"], u[rank])


def published(grads, ratios, m, nesterov):
    """The means of the authors' code, DGCSGDMemory and DGCCompressor, at these ratios by step: at 1
    gradients are averaged first, and get momentum of which nothing is masked."""
    ranks, d = len(grads[0]), grads[0][0].size
    u, v = np.zeros((2, ranks, d))
    for ratio, step in zip(ratios, grads):
        g = np.array(step, np.float64).reshape(ranks, d)
        if ratio == 1:
            g[:] = g.mean(axis=0)
        u = m * (u + g) if nesterov else m * u + g
        late = u + g if nesterov else u
        if ratio == 1:
            yield late[0]
            continue
        v += late
        sent = np.zeros((ranks, d), bool)
        k = int(np.ceil(ratio * d))
        np.put_along_axis(sent, np.argsort(-np.abs(v), axis=1)[:, :k], True, axis=1)
        yield np.where(sent, v, 0).mean(axis=0)
        u[sent] = v[sent] = 0


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("values", ["fp32", "fp16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_warm_up_from_dense_is_the_authors(ranks, values, nesterov):
    """Gradients of the dense steps are alike on all ranks: each rank's u is then the mean's, as it
    always is there."""
    rng, ratios = np.random.default_rng(1), [1] * 5 + [0.1] * 8
    grads = [
        [rng.standard_normal((5, 8)).astype(np.float32)] * ranks
        if ratio == 1
        else list(rng.standard_normal((ranks, 5, 8)).astype(np.float32))
        for ratio in ratios
    ]
    spec = f"dgc:schedule=0/1+5/0.1,momentum=0.9,values={values},nesterov={nesterov},min_numel=0"
    run = hc.simulate(spec, [[{"w": g} for g in step] for step in grads])
    atol = 1e-5 if values == "fp32" else 0.02
    for mean, expected in zip(run.mean, published(grads, ratios, 0.9, nesterov)):
        np.testing.assert_allclose(mean["w"].ravel(), expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("k, whole", [(40, 0), (100, 0), (20, 32), (4, 40)])
def test_momentum_is_masked_where_something_waits(k, whole):
    """Not in chunks that are sent whole: of 32 and 8 elements, those from `whole` on."""
    grads = np.random.default_rng(0).standard_normal((6, 1, 5, 8)).astype(np.float32)
    run = hc.simulate(
        f"dgc:momentum=0.9,chunk=32,k={k},min_numel=0", [[{"w": g} for g in step] for step in grads]
    )
    plain = np.zeros(40)
    for step, mean in zip(grads, run.mean):
        plain = 0.9 * plain + step.ravel()
        moved = mean["w"].ravel()
        np.testing.assert_allclose(moved[whole:], plain[whole:], rtol=1e-5, atol=1e-6)
    assert whole == 0 or (run.state[0]["w"]["u"][:whole] == 0).sum() >= min(k, 32)


@examples(30)
@given(any_gradients(), st.floats(1e-3, 1e3))
def test_clipping_limits_the_norm_over_all_tensors(grads, clip_norm):
    """With op=Average g of all tensors together has at most clip_norm·√N; then everything is as for
    the clipped gradients."""
    ranks = len(grads[0])
    clipped = []
    for step in grads:
        row = []
        for named in step:
            norm = np.sqrt(sum((a.astype(np.float64) ** 2).sum() for a in named.values()))
            factor = min(1.0, clip_norm * np.sqrt(ranks) / norm) if norm else 1.0
            row.append({n: (a * np.float32(factor)) for n, a in named.items()})
        clipped.append(row)
    options = {"id": "dgc", "ratio": 0.1, "momentum": 0.0, "min_numel": 64}
    run = hc.simulate({**options, "clip_norm": clip_norm}, grads)
    expected = hc.simulate(options, clipped)
    for mine, its in zip(run.mean, expected.mean):
        for name in mine:
            np.testing.assert_allclose(mine[name], its[name], rtol=1e-5, atol=1e-30)


def test_warm_up_densities():
    dgc = hc.get_compressor("dgc:ratio=0.001,warmup_steps=400")
    stages = [dgc.density(step) for step in (0, 99, 100, 200, 300, 399, 400, 10_000)]
    assert stages == pytest.approx(
        [0.2512, 0.2512, 0.0631, 0.01585, 0.00398, 0.00398, 0.001, 0.001], rel=1e-3
    )
    for steps in range(4, 20):
        dgc = hc.get_compressor(f"dgc:ratio=0.001,warmup_steps={steps}")
        assert len({dgc.density(step) for step in range(steps)}) == 4, "a stage is passed over"
    dgc = hc.get_compressor("dgc:schedule=0/0.25+10/0.0625+20/0.001")
    assert [dgc.density(step) for step in (0, 9, 10, 19, 20, 99)] == [
        0.25,
        0.25,
        0.0625,
        0.0625,
        0.001,
        0.001,
    ]


def test_each_stage_of_the_warm_up_sends_its_share_and_clears_momentum_and_residual_there():
    """Of what is sent, and of nothing else."""
    size, rng = 100_000, np.random.default_rng(5)
    dgc = hc.get_compressor("dgc:ratio=0.001,warmup_steps=4,momentum=0.9,min_numel=0")
    state = dgc.init("w", (size,))
    for index, share in enumerate([0.2512, 0.0631, 0.01585, 0.00398, 0.001, 0.001]):
        grad = rng.standard_normal(size, np.float32)
        encoded = dgc.encode(grad, state, Step(index, 0, 2))
        sent, _ = cpu.decode_sparse(encoded.body, numel=size)
        assert abs(len(sent) - share * size) <= 0.001 * share * size + 1, index
        end_step(dgc, state, True)
        dgc.apply_pending(state)
        for array in (state.arrays["u"], state.arrays["v"]):
            # Elsewhere sums may come to 0 by themselves.
            assert not array[sent].any() and np.count_nonzero(array) >= size - len(sent) - 5


def test_a_step_that_would_move_more_than_dense_goes_dense():
    rng = np.random.default_rng(0)
    grads = [[{"w": rng.standard_normal((64, 64))} for _ in range(4)] for _ in range(3)]
    run = hc.simulate("dgc:schedule=0/0.5+1/0.01,momentum=0.9", grads)
    dense = 64 * 64 * 4
    assert run.bytes_sent[0] == [dense] * 4
    assert max(run.bytes_sent[1]) < dense / 20
    # Nothing is left behind by a dense step, and momentum goes on from it.
    one = hc.simulate("dgc:schedule=0/0.5+1/0.01,momentum=0.9", grads[:1])
    assert not one.state[0]["w"]["v"].any() and one.state[0]["w"]["u"].any()
    np.testing.assert_allclose(
        one.mean[0]["w"], np.mean([g["w"] for g in grads[0]], axis=0), rtol=1e-5, atol=1e-6
    )


def test_small_and_one_dimensional_and_excluded_tensors_go_dense():
    rng = np.random.default_rng(0)
    shapes = {"big": (40, 40), "small": (10, 10), "bias": (5000,), "embedding.weight": (50, 50)}
    grads = [
        [
            {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
            for _ in range(2)
        ]
        for _ in range(4)
    ]
    run = hc.simulate("dgc:momentum=0.9,exclude=embed*", grads)
    assert [name for name in shapes if "v" in run.state[0][name]] == ["big"]
    buffer = 0
    for step, ranks in enumerate(grads):
        buffer = 0.9 * buffer + (ranks[0]["bias"] + ranks[1]["bias"]) / 2
        np.testing.assert_allclose(run.mean[step]["bias"], buffer, rtol=1e-4, atol=1e-5)
    run = hc.simulate("dgc:min_numel=0", grads)
    assert all("v" in run.state[0][name] for name in shapes)
