"""Tensors whose learning rate is 0: what is kept of their gradients stays as it is."""

import numpy as np
import pytest
from battery_facts import over, quiet, spec_of
from ranks import ranks_of

import horovod_compress as hc
from horovod_compress.compressors import get_compressor
from horovod_compress.compressors.state import LOCAL
from horovod_compress.engine.lockstep import run_step

pytestmark = quiet
NAME, SHAPE = "w", (30, 40)


def steps_of(steps, ranks=2, seed=0):
    rng = np.random.default_rng(seed)
    return [
        [{NAME: rng.standard_normal(SHAPE).astype(np.float32)} for _ in range(ranks)]
        for _ in range(steps)
    ]


@over(lambda facts: (*facts.variants, *facts.conserves[:1]))
@pytest.mark.parametrize("size", [2, 9])
def test_nothing_that_is_kept_changes(id, options, size):
    """Whatever comes meanwhile. On nine ranks more algorithms go dense."""
    before, meanwhile, spec = steps_of(3, size), steps_of(4, size, seed=1), spec_of(id, options)
    meanwhile[1][-1][NAME][2, 3] = np.nan
    found = hc.simulate(spec, before + meanwhile, lr=[0.1] * 3 + [0] * 4)
    expected = hc.simulate(spec, before, lr=[0.1] * 3)
    roles = get_compressor(spec).roles
    for its, own in zip(found.state, expected.state):
        assert its[NAME].keys() == own[NAME].keys()
        for key in own[NAME]:
            if roles[key] is LOCAL and key != "u":
                np.testing.assert_array_equal(its[NAME][key], own[NAME][key], err_msg=key)
    finite = [np.isfinite(mean[NAME]).all() for mean in found.mean]
    assert finite == [True] * 4 + [False] + [True] * 2


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_goes_on_as_in_sgd(nesterov):
    grads = steps_of(6, 3)
    run = hc.simulate(f"dgc:ratio=0.1,momentum=0.9,nesterov={nesterov}", grads, lr=[0] * 6)
    buffer = 0.0
    for ranks in grads:
        buffer = 0.9 * buffer + sum(named[NAME] for named in ranks) / 3
    u = sum(state[NAME]["u"] for state in run.state).reshape(SHAPE) / 3
    np.testing.assert_allclose(u, buffer * (0.9 if nesterov else 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        "topk:ratio=0.01",
        "dgc:ratio=0.01,momentum=0",
        "dgc:ratio=0.01,momentum=0.9",
        "topk:ratio=0.01,exchange=split",
        "dgc:ratio=0.01,momentum=0.9,hosts=true",
        "powersgd:rank=1",
        "adacomp",
    ],
)
def test_the_way_after_a_thaw_is_not_longer_than_sgds(spec):
    steps, momentum = [[{NAME: named[NAME]} for named in steps_of(1)[0]]] * 65, 0.0
    if "momentum=0.9" in spec:
        momentum = 0.9
    run = hc.simulate(spec, steps, lr=[0] * 60 + [1] * 5, local_size=2 if "hosts" in spec else 1)
    gradient = sum(named[NAME] for named in steps[0]) / 2
    plain = 5 * np.linalg.norm(gradient) / (1 - momentum)
    assert np.linalg.norm(sum(mean[NAME] for mean in run.mean[60:])) < plain


def test_what_a_switch_has_left_to_bring_waits():
    exchanges = ranks_of("topk:ratio=0.01", 2, {NAME: SHAPE})
    flat = [{NAME: named[NAME].ravel()} for named in steps_of(1)[0]]
    (sent, _) = run_step(exchanges, [{NAME: named[NAME].copy()} for named in flat])
    left = sum(named[NAME] for named in flat) / 2 - sent[NAME]
    none = get_compressor("none")
    for exchange in exchanges:
        exchange.switch(none, {NAME: (SHAPE, none)}, {NAME: 1.0})
    for lr, expected in ((0.0, 0), (0.0, 0), (0.1, left), (0.1, 0)):
        found, _ = run_step(exchanges, [{NAME: 0 * named[NAME]} for named in flat], lr)
        np.testing.assert_allclose(found[NAME], expected, atol=1e-6)
