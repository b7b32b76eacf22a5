"""`dense=int8`: tensors that are not compressed travel as codes of maxnorm with 127 steps, and
DGC's get the same momentum as others."""

import numpy as np
import pytest

import horovod_compress as hc
from horovod_compress.compressors.dense import dense_compressor
from horovod_compress.engine.dense_policy import compressor_for

SHAPES = {"matrix": (40, 50), "bias": (300,)}
STEPS = 12


def gradients(ranks, seed=0):
    rng = np.random.default_rng(seed)
    return [
        [
            {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
            for _ in range(ranks)
        ]
        for _ in range(STEPS)
    ]


def coded(grads, seed):
    """What maxnorm alone makes of the bias, step by step."""
    alone = [[{"bias": named["bias"]} for named in step] for step in grads]
    return [
        named["bias"]
        for named in hc.simulate(f"maxnorm:bits=7,min_numel=0,seed={seed}", alone).mean
    ]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("spec", ["topk:ratio=0.1", "adacomp", "variance", "powersgd", "qsgd"])
def test_they_are_maxnorms(spec, ranks):
    grads = gradients(ranks)
    run = hc.simulate(f"{spec}{',' if ':' in spec else ':'}dense=int8,seed=3", grads)
    for named, expected in zip(run.mean, coded(grads, seed=3)):
        np.testing.assert_array_equal(named["bias"], expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_dgcs_get_its_momentum(nesterov):
    grads = gradients(3)
    run = hc.simulate(
        f"dgc:ratio=0.1,momentum=0.9,nesterov={str(nesterov).lower()},dense=int8", grads
    )
    u = np.zeros(300, np.float64)
    for named, mean in zip(run.mean, coded(grads, seed=0)):
        u = 0.9 * u + mean
        np.testing.assert_allclose(named["bias"], mean + 0.9 * u if nesterov else u, atol=1e-5)


@pytest.mark.parametrize("name, element", [("bias", 7), ("matrix", (7, 7))])
def test_a_step_that_is_not_finite_leaves_the_momentum(name, element):
    """Whichever tensor is not finite."""
    spec, grads = "dgc:ratio=0.1,momentum=0.9,dense=int8", gradients(2)
    kept = hc.simulate(spec, grads[:4]).state
    grads[4][1][name][element] = np.nan
    run = hc.simulate(spec, grads[:5])
    assert np.isnan(run.mean[4][name]).all()
    for rank in range(2):
        np.testing.assert_array_equal(run.state[rank]["bias"]["u"], kept[rank]["bias"]["u"])


def test_the_mean_over_draws_is_the_gradient():
    gradient = np.random.default_rng(1).standard_normal(300).astype(np.float32)
    draws = hc.simulate("topk:dense=int8", [[{"bias": gradient}] * 2] * 400).mean
    error = np.mean([named["bias"] for named in draws], axis=0) - gradient
    step = np.abs(gradient).max() / 127
    # A code's standard deviation is at most half a step.
    assert np.abs(error).max() < 5 * step / np.sqrt(4 * 400 * 2)


def test_fewer_bytes_and_a_bounded_error():
    grads = gradients(2)
    runs = {
        dense: hc.simulate(f"topk:ratio=0.01,dense={dense}", grads)
        for dense in ("fp32", "fp16", "int8")
    }
    sent = [run.bytes_sent[3][0] for run in runs.values()]
    # Which a maximum and the step's number are part of.
    assert sent[0] - sent[1] == 600 and sent[1] - sent[2] > 200
    for exact, rounded in zip(runs["fp32"].mean, runs["int8"].mean):
        assert np.abs(exact["bias"] - rounded["bias"]).max() <= 5 / 127


def test_the_seed_is_the_compressors():
    assert compressor_for(
        hc.get_compressor("topk:dense=int8,seed=7"), "bias", (300,)
    ) == dense_compressor("int8", 7)
    assert compressor_for(
        hc.get_compressor("dgc:dense=int8,seed=7"), "bias", (300,)
    ).dense == dense_compressor("int8", 7)
    with pytest.raises(ValueError, match="dense must be one of fp32, fp16, int8"):
        hc.get_compressor("topk:dense=int4")
