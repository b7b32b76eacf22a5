"""Ranks come and go in one process: for every id that keeps a residual, what was sent and the mean
of what was not add up to all gradients."""

import numpy as np
import pytest
from battery_facts import FACTS, SHAPES, copies, over, quiet, spec_of, steps_of
from hypothesis import given
from hypothesis import strategies as st
from ranks import copy_of, on_all_ranks
from tiers import examples

import horovod_compress as hc
from horovod_compress.engine import checkpoint
from horovod_compress.engine.exchange import Exchange
from horovod_compress.engine.lockstep import run_step
from horovod_compress.transport.loopback import Loopback

pytestmark = quiet


def new_rank(spec):
    """A process that has just begun."""
    compressor = hc.get_compressor(spec)
    return Exchange(
        compressor,
        Loopback.group(1)[0],
        {name: (shape, compressor) for name, shape in SHAPES.items()},
        dense_alone=True,
    )


def together(ranks, even=False, resized=True):
    """All ranks take part in `checkpoint.synced`; their steps go on between them."""

    def sync(exchange, transport):
        exchange.go_back_to(checkpoint.synced(exchange.state_dict(), transport, "state", even))

    if resized:
        for rank, (exchange, transport) in enumerate(zip(ranks, Loopback.group(len(ranks)))):
            exchange.transport = transport
            exchange.resize(rank, len(ranks))
    on_all_ranks(sync, ranks)
    return ranks


def residual_of(ranks):
    """{name: the mean over ranks of what was not sent}, float64."""
    compressors = {
        name: tensor.compressor for name, tensor in ((each.name, each) for each in ranks[0].tensors)
    }
    arrays = [copy_of(exchange) for exchange in ranks]
    return {
        name: np.mean(
            [each[name][compressor.traits.accumulator] for each in arrays], axis=0, dtype=np.float64
        )
        for name, compressor in compressors.items()
        if compressor.traits.accumulator in arrays[0][name]
    }


def train(ranks, seed, sums):
    """A few steps; adds mean gradients less results to `sums`."""
    for grads in steps_of(seed, 3, len(ranks), spread=False):
        results = run_step(ranks, copies(grads))
        for name, total in sums.items():
            total += np.mean([g[name] for g in grads], axis=0, dtype=np.float64) - results[0][name]
            for named in results:
                np.testing.assert_array_equal(named[name], results[0][name])


def assert_owed(ranks, sums, steps):
    """The mean residual is what was not sent."""
    for name, residual in residual_of(ranks).items():
        np.testing.assert_allclose(residual, sums[name], atol=1e-5 * steps, err_msg=name)


@over(lambda facts: facts.conserves[:1])
def test_nothing_is_lost_from_two_ranks_to_four_to_one_and_back(id, options):
    check_history(spec_of(id, options), [2, 4, 3, 1, 2], True, 0)


CONSERVING = [spec_of(id, options) for id, facts in FACTS.items() for options in facts.conserves]


@examples(40)
@given(
    spec=st.sampled_from(CONSERVING),
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    evened=st.booleans(),
    seed=st.integers(0, 99),
)
def test_nothing_is_lost_where_ranks_come_and_go_in_good_order(spec, sizes, evened, seed):
    """Where nobody leaves, without the mean before, too."""
    check_history(spec, sizes if evened else sorted(sizes), evened, seed)


def check_history(spec, sizes, evened, seed):
    ranks, sums = (
        together([new_rank(spec) for _ in range(sizes[0])]),
        {name: np.zeros(np.prod(shape)) for name, shape in SHAPES.items()},
    )
    train(ranks, seed, sums)
    for i, size in enumerate(sizes[1:], 1):
        before = residual_of(ranks)
        if evened:
            together(ranks, even=True, resized=False)
        old = ranks[:size]
        kept = [copy_of(exchange) for exchange in old]
        ranks = together([*old, *(new_rank(spec) for _ in range(size - len(old)))])
        for exchange, arrays in zip(ranks, kept):
            for name, named in copy_of(exchange).items():
                for key, array in named.items():
                    np.testing.assert_array_equal(array, arrays[name][key])
        for name, residual in residual_of(ranks).items():
            np.testing.assert_allclose(
                residual,
                before[name],
                rtol=1e-6,
                atol=1e-6 * np.abs(before[name]).max(initial=0),
                err_msg=name,
            )
        train(ranks, (seed, i), sums)
        assert_owed(ranks, sums, 3 * (i + 1))
        if size == 1:
            assert not any(residual.any() for residual in residual_of(ranks).values())


@over(lambda facts: facts.variants)
def test_after_a_crash_the_mean_is_that_of_the_ranks_that_are_left(id, options):
    """They go back to what they have kept; one that was a step behind, and new ones, get the mean
    of the others."""
    spec, sums = spec_of(id, options), {}
    ranks = together([new_rank(spec) for _ in range(4)])
    train(ranks, 0, sums)
    saved = [exchange.state_dict() for exchange in ranks]
    behind = ranks[2].state_dict()
    train(ranks, 1, sums)
    for name, grad in steps_of(2, 1, 4)[0][3].items():
        ranks[3].submit(name, grad)  # and nobody answers
    saved[2] = {**behind, "step": 2}
    survivors = [1, 2, 3]
    for rank in survivors:
        ranks[rank].go_back_to(saved[rank])
    kept = {rank: copy_of(ranks[rank]) for rank in survivors}
    went_on = together([*(ranks[rank] for rank in survivors), new_rank(spec)])
    for exchange, rank in zip(went_on, [1, None, 3, None]):
        assert exchange.state_dict()["step"] == 3
        for name, named in copy_of(exchange).items():
            for key, array in named.items():
                expected = np.mean(
                    [kept[1][name][key], kept[3][name][key]], axis=0, dtype=np.float64
                )
                if rank:
                    np.testing.assert_array_equal(array, kept[rank][name][key])
                else:
                    np.testing.assert_allclose(array, expected, rtol=1e-6, atol=1e-30)
    train(went_on, 3, sums)


def test_alone_signs_stay_signs():
    """What holds nothing back is compressed alone as ever: else its results would be of another
    size."""
    assert not FACTS["signsgd"].conserves
    exchange = together([new_rank("signsgd:min_numel=0")])[0]
    (results,) = run_step([exchange], steps_of(0, 1, 1)[0])
    assert set(np.unique(results["w"])) == {-1.0, 1.0}


@pytest.mark.parametrize("size", [1, 2])
def test_simulated_ranks_alone_compress(size):
    """`simulate` on one rank shows what an algorithm does."""
    run = hc.simulate("topk:ratio=0.1,min_numel=0", [[{"w": np.ones((30, 40), np.float32)}] * size])
    assert np.count_nonzero(run.mean[0]["w"]) <= 120 * size


def test_the_last_copy_is_evened_out_too():
    """A rank that goes back after others have left goes back to the mean."""
    elastic = pytest.importorskip("horovod_compress.session.elastic", reason="needs Horovod")

    class Keeping:
        def __init__(self):
            self.now = {"owed": 1.0}

        def entry(self, into=None):
            return dict(self.now)

        def go_back_to(self, state):
            self.now = dict(state)

        def even_out(self, saved):
            return {"owed": saved["owed"] / 2}

    keeping = Keeping()
    entry = elastic.Entry(keeping)
    entry.even_out()
    entry.restore()
    assert keeping.now == {"owed": 0.5}
