"""Steps in which gathering would move more than a dense exchange: every algorithm that gathers goes
dense there."""

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import assert_same, gradients, ranks_of
from tiers import examples

import horovod_compress as hc
from horovod_compress.compressors.base import Step
from horovod_compress.engine.dense_policy import times_dense
from horovod_compress.engine.lockstep import run_step

GATHERING = [id for id, about in hc.available().items() if about["collective"] == "allgather"]
ELEMENTS = 64 * 64
DENSE = 4 * ELEMENTS  # bytes
# Bytes that a frame, and a carrier, are at most besides the payload.
FRAME = 64
FED_BACK = {
    "topk:ratio=0.3": "residual",
    "dgc:ratio=0.3,momentum=0": "v",
    "randomk:ratio=0.3": "residual",
    "adacomp:bin_length=3": "residual",
    "strom:tau=0.1": "residual",
    "efsignsgd": "residual",
    "onebit": "residual",
    "variance:alpha=0.1,error_feedback=true": "r",
}


def noise(steps, size, scale=1.0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        [{"w": scale * rng.standard_normal((64, 64)).astype(np.float32)} for _ in range(size)]
        for _ in range(steps)
    ]


def test_the_rule():
    """N − 1 payloads of b bits an element against 2·(N − 1)/N times 32: even at N·b = 64."""
    assert times_dense(16, 4) == 1 and times_dense(9, 64) == 9 and times_dense(1, 64) == 1


@pytest.mark.parametrize("size", [2, 24, 64])
@pytest.mark.parametrize("id", GATHERING)
def test_no_step_moves_more_than_a_dense_one(id, size):
    """But where only the gradients tell: there such a step is followed by dense ones."""
    run = hc.simulate(id, noise(6, size))
    dense = [sent == [DENSE] * size for sent in run.bytes_sent]
    moved = [
        2 * DENSE if flat else sum(sent) - size * FRAME for flat, sent in zip(dense, run.bytes_sent)
    ]
    too_much = [step for step, bytes_ in enumerate(moved) if bytes_ > 2 * DENSE]
    if hc.get_compressor(id).payload_bits(4096, Step(0, 0, size)) is None:
        assert len(too_much) <= 1 and all(dense[step + 1] for step in too_much), moved
    else:
        assert not too_much, moved


@pytest.mark.parametrize(
    "spec", ["bf16", "natural", "efsignsgd", "onebit", "randomk:ratio=0.1", "topk:ratio=0.1"]
)
def test_bits_that_are_known_beforehand_are_those_of_payloads(spec):
    """They decide who goes dense. topk's are an estimate."""
    compressor, step = hc.get_compressor(spec), Step(0, 0, 2)
    ((named,),) = noise(1, 1)
    payload = compressor.encode(named["w"].ravel(), compressor.init("w", (64, 64)), step)
    bits = 8 * len(payload.body) / ELEMENTS
    assert compressor.payload_bits(ELEMENTS, step) == pytest.approx(bits, rel=0.1)


@pytest.mark.parametrize("id", ["natural", "qsgd", "randomk:ratio=0.1", "bf16"])
def test_what_gathered_several_times_too_much_is_exact_now(id):
    """At 64 ranks these received 3 to 9 times what a ring allreduce moves."""
    grads = noise(3, 64)
    run = hc.simulate(id, grads)
    assert run.bytes_sent[1:] == [[DENSE] * 64] * 2
    for step in (1, 2):
        given = sum(named["w"].astype(np.float64) for named in grads[step]) / 64
        if "randomk" in id:
            continue  # the residual comes too
        np.testing.assert_allclose(run.mean[step]["w"], given, atol=1e-6)


@examples(40)
@given(
    st.sampled_from(sorted(FED_BACK)),
    st.integers(1, 90),
    st.integers(1, 5),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_nothing_is_lost_between_dense_and_gathered_steps(spec, size, steps, seed, fails):
    rng = np.random.default_rng(seed)
    grads = [
        [{"w": rng.standard_normal((5, 8)).astype(np.float32)} for _ in range(size)]
        for _ in range(steps)
    ]
    given = sum(named["w"].astype(np.float64) for ranks in grads for named in ranks)
    if fails:
        bad = [{"w": named["w"].copy()} for named in grads[0]]
        bad[-1]["w"][2, 3] = np.nan
        # What is finite waited for the next step.
        given = given + sum(np.nan_to_num(named["w"]).astype(np.float64) for named in bad)
        grads.insert(rng.integers(len(grads) + 1), bad)
    run = hc.simulate(f"{spec}{',' if ':' in spec else ':'}min_numel=0", grads)
    finite = [mean["w"] for mean in run.mean if np.isfinite(mean["w"]).all()]
    assert len(finite) == steps
    sent = size * sum(mean.astype(np.float64) for mean in finite)
    waits = sum(state["w"][FED_BACK[spec]].astype(np.float64).reshape(5, 8) for state in run.state)
    np.testing.assert_allclose(sent + waits, given, atol=1e-4 * size)


def test_gathering_is_tried_again():
    """Gradients that all fire make strom go dense; when few do, it gathers once more, and stays
    with it."""
    size = 64
    run = hc.simulate("strom:tau=1", noise(1, size, 1e3) + noise(80, size, 1e-3))
    dense = [sent == [DENSE] * size for sent in run.bytes_sent]
    assert not dense[0] and all(dense[1:17])
    first = dense.index(False, 1)
    assert not any(dense[first:])


def test_a_state_knows_until_when_it_goes_dense():
    shapes = {"w": (64, 64)}
    make = lambda: ranks_of("strom:tau=0.01", 40, shapes)  # noqa: E731
    exchanges = make()
    run_step(exchanges, gradients(0, 40, shapes))
    again = make()
    for old, new in zip(exchanges, again):
        state = old.state_dict()
        assert state["dense_until"]["w"] > 1
        new.load_state_dict(state)
    first, second = (run_step(group, gradients(1, 40, shapes)) for group in (exchanges, again))
    assert_same({"": first[0]}, {"": second[0]})
    assert exchanges[0].stats()["bytes_sent"] - again[0].stats()["bytes_sent"] > 0
    assert again[0].stats()["bytes_sent"] == DENSE
    for ex in make():  # a file from before this was kept
        state = exchanges[ex.transport.rank].state_dict()
        del state["dense_until"]
        ex.load_state_dict(state)


def test_rank_0_says_so_once(caplog):
    with caplog.at_level(logging.WARNING, logger="horovod_compress"):
        hc.simulate("natural", noise(3, 10))
        hc.simulate("natural", noise(3, 4))
    (record,) = caplog.records
    assert all(word in record.getMessage() for word in ("natural", "step 0", "10 ranks", "dense"))
