"""exchange=split: regions, what owners accept and keep, conservation, rollback on all ranks as one,
hostile messages, and bytes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import jobs, ranks_of
from tiers import examples

import horovod_compress as hc
from horovod_compress.compressors.base import Step
from horovod_compress.engine.dense_policy import go_dense, times_dense
from horovod_compress.engine.lockstep import make_ranks, run_step
from horovod_compress.engine.split import SelectAgain, regions_of, split_of
from horovod_compress.protocol.wire import WireError
from horovod_compress.tools.models import MODELS
from horovod_compress.transport.loopback import Loopback

SPLIT = "topk:min_numel=0,ratio=0.05,exchange=split"
W = {"w": (60, 50)}
JOBS = jobs(st.integers(2, 9))


# -- regions


@examples(100)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.floats(0.001, 1)), min_size=1, max_size=8),
    st.integers(1, 70),
    st.floats(1, 9),
)
def test_every_element_has_one_owner_and_regions_have_equally_many_entries(tensors, ranks, accept):
    sizes = tuple((numel, math.ceil(ratio * numel)) for numel, ratio in tensors)
    regions = regions_of(sizes, ranks, accept)
    assert len(regions) == ranks
    for tensor, (numel, _) in enumerate(sizes):
        parts = [part for region in regions for part in region if part.tensor == tensor]
        assert [part.first for part in parts] == [0, *(part.last for part in parts[:-1])] and parts[
            -1
        ].last == numel
    total = sum(k for _, k in sizes)
    for region in regions:
        entries = sum(
            sizes[part.tensor][1] * (part.last - part.first) / sizes[part.tensor][0]
            for part in region
        )
        assert abs(entries - total / ranks) <= 2 + len(region)  # which are whole


@examples(100)
@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 50)), min_size=1, max_size=8),
    st.integers(2, 70),
    st.floats(1, 9),
)
def test_quotas_add_up_to_what_is_to_be_accepted(tensors, ranks, accept):
    sizes = tuple((numel, min(k, numel)) for numel, k in tensors)
    parts = [part for region in regions_of(sizes, ranks, accept) for part in region]
    total = accept * sum(k for _, k in sizes)
    if accept < ranks:
        assert all(part.quota >= 1 for part in parts)
        assert (
            total - 1
            <= sum(part.quota for part in parts)
            <= total + 1 + sum(part.quota == 1 for part in parts)
        )
    else:
        assert all(part.quota == part.last - part.first for part in parts)


# -- results


@examples(60)
@given(JOBS, st.sampled_from(["topk", "dgc"]), st.sampled_from([0.01, 0.05, 0.15]))
def test_with_all_accepted_results_are_those_of_the_allgather_bit_for_bit(job, id, ratio):
    named, steps = job
    ranks = len(steps[0])
    gathered = hc.simulate(f"{id}:min_numel=0,ratio={ratio}", steps)
    split = hc.simulate(f"{id}:min_numel=0,ratio={ratio},exchange=split,accept={ranks}", steps)
    alike = [
        name
        for name, shape in named.items()
        if brings_more(id, ratio, shape, ranks) == brings_more(id, ratio, shape, 1 + ranks)
    ]
    for expected, found in zip(gathered.mean, split.mean):
        for name in alike:
            np.testing.assert_array_equal(found[name], expected[name])
    for expected, found in zip(gathered.state, split.state):
        for name in alike:
            for key, array in expected[name].items():
                np.testing.assert_array_equal(found[name][key], array)


def brings_more(id, ratio, shape, payloads):
    """Whether a dense exchange brings a rank fewer bytes than so many payloads of the tensor.
    Splitting brings one more than gathering does."""
    return (
        times_dense(
            hc.get_compressor(f"{id}:ratio={ratio}").payload_bits(
                math.prod(shape), Step(0, 0, payloads)
            ),
            payloads,
        )
        > 1
    )


@examples(60)
@given(
    JOBS,
    st.sampled_from(["fp32", "fp16", "bf16", "power", "2bit", "sign"]),
    st.sampled_from(["auto", 1, 1.7]),
)
def test_nothing_is_lost_and_replicas_agree(job, values, accept):
    named, steps = job
    run = hc.simulate(f"{SPLIT},values={values},accept={accept}", steps)  # which compares replicas
    for name, shape in named.items():
        given = np.nan_to_num(
            np.array([[ranks[name] for ranks in step] for step in steps], np.float64),
            nan=0,
            posinf=0,
        )
        sent = sum(
            len(steps[0]) * mean[name].astype(np.float64)
            for mean in run.mean
            if np.isfinite(mean[name]).all() and all_finite(mean)
        )
        kept = sum(state[name]["residual"].astype(np.float64).reshape(shape) for state in run.state)
        np.testing.assert_allclose(
            sent + kept,
            given.sum((0, 1)),
            atol=1e-6 * np.abs(given).sum() / math.prod(shape) * 9 + 1e-6,
        )


def all_finite(mean):
    return all(np.isfinite(array).all() for array in mean.values())


@examples(40)
@given(JOBS, st.sampled_from(["fp32", "fp16", "power"]), st.integers(0, 8))
def test_a_step_that_is_not_finite_is_undone_on_all_ranks_bit_for_bit(job, values, at):
    named, steps = job
    exchanges = make_ranks(
        hc.get_compressor(f"{SPLIT},values={values}"), named, Loopback.group(len(steps[0]))
    )
    for step in steps:
        run_step(exchanges, flat(step))
    before = [
        {n: arrays["residual"].copy() for n, arrays in ex.arrays().items()} for ex in exchanges
    ]
    last = flat(steps[-1])
    poisoned = sorted(named)[at % len(named)]
    last[at % len(last)][poisoned][-1] = np.nan
    expected = [
        {n: v[n] + np.where(np.isfinite(g[n]), g[n], np.float32(0)) for n in named}
        for v, g in zip(before, last)
    ]
    dense = {
        name
        for group in exchanges[0]._group_of.values()
        for name in go_dense(group, exchanges[0].now)
    }
    results = run_step(exchanges, last)
    for ex, residuals, result in zip(exchanges, expected, results):
        for name in named:
            told = np.isnan(result[name])
            assert told.any() == (name == poisoned)
            assert told.all() or not told.any() or name in dense  # where one NaN tells the others
            np.testing.assert_array_equal(ex.arrays()[name]["residual"], residuals[name])


def flat(ranks):
    return [{name: np.array(grad).reshape(-1) for name, grad in named.items()} for named in ranks]


def test_owners_accept_the_largest_sums_and_keep_the_others():
    """Three ranks of a tensor of nine elements, an owner for each three: each accepts two, of six
    entries that came at most."""
    rows = [[9, 0, 0, 1, 0, 0, 0, 5, 0], [0, -8, 0, 1, 0, 0, 0, 5, 0], [0, 0, 7, 0, 2, 4, 0, 0, 0]]
    run = hc.simulate(
        "topk:min_numel=0,k=3,exchange=split,accept=2",
        [[{"w": np.array(row, np.float32)[:, None]} for row in rows]],
    )
    np.testing.assert_array_equal(
        3 * run.mean[0]["w"][:, 0], np.array([9, -8, 0, 2, 0, 4, 0, 10, 0], np.float32)
    )
    kept = [state["w"]["residual"] for state in run.state]
    np.testing.assert_array_equal(
        kept, [[0, 0, 7, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 2, 0, 0, 0, 0], [0] * 9]
    )


@pytest.mark.parametrize("ranks, accept", [(1, 1), (2, 1), (3, 1.5), (7, 3.5), (8, 4), (64, 4)])
def test_by_default_four_times_are_accepted_and_at_most_half_the_ranks(ranks, accept):
    assert split_of(hc.get_compressor(SPLIT), 1000, Step(0, 0, ranks)) == (50, accept, "fp32")


def test_a_sum_too_large_for_a_residual_is_accepted_beyond_the_quota():
    """It would make every later step infinite."""
    exchanges = ranks_of("topk:min_numel=0,k=1,exchange=split,accept=1", 4, {"w": (64, 1)})
    grads = [{"w": np.zeros(64, np.float32)} for _ in exchanges]
    for rank, named in enumerate(grads):
        named["w"][rank // 2] = (2 + rank // 2) * 2.0**108
    run_step(exchanges, grads)
    assert grads[0]["w"][0] == 2.0**108 and grads[0]["w"][1] == 1.5 * 2.0**108
    assert not any(ex.arrays()["w"]["residual"].any() for ex in exchanges)


def test_so_is_one_too_large_beside_what_the_residual_holds():
    exchanges = ranks_of("topk:min_numel=0,k=1,exchange=split,accept=1", 4, {"w": (64, 1)})
    kept = exchanges[3].arrays()["w"]["residual"]  # of the one that owns all
    kept[0] = 2.0**109
    grads = [{"w": np.zeros(64, np.float32)} for _ in exchanges]
    for named, (place, size) in zip(grads, [(0, 1), (0, 1), (1, 3), (40, 3.5)]):
        named["w"][place] = size * 2.0**108
    run_step(exchanges, grads)
    assert grads[0]["w"][[0, 1, 40]].tolist() == [2.0**107, 0, 3.5 * 2.0**106]
    exchanges[3].end_step()
    assert kept[[0, 1, 40]].tolist() == [2.0**109, 3 * 2.0**108, 0]


@pytest.mark.parametrize("accept", [0, 0.9, -1, float("inf"), "many"])
def test_accept_is_checked(accept):
    with pytest.raises(ValueError, match="accept must be a number at least 1, or auto"):
        hc.get_compressor({"id": "topk", "accept": accept})


# -- messages


class Damaging(Loopback):
    """Changes what rank 1 sends to rank 2, in the step that `damage` says, as it says."""

    damage = None

    def alltoall(self, name, payload, splits):
        wait = super().alltoall(name, payload, splits)

        def damaged():
            parts = wait()
            if self.rank == 2 and self.damage is not None:
                parts[1] = self.damage(parts[1].copy())
            return parts

        return damaged


def flipped(part):
    part[-3] ^= 1
    return part


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        lambda part: part[:-7],
        lambda part: part[:0],
        lambda part: np.concatenate([part, part]),
    ],
)
def test_what_one_owner_refuses_is_undone_on_all_ranks(damage):
    exchanges = ranks_of(SPLIT, 4, W, Damaging)
    rng = np.random.default_rng(0)
    steps = [
        [{"w": rng.standard_normal(3000).astype(np.float32)} for _ in exchanges] for _ in range(3)
    ]
    given = np.sum([named["w"] for step in steps for named in step], axis=0, dtype=np.float64)
    results = [run_step(exchanges, steps[0])[0]["w"].copy()]
    before = [ex.arrays()["w"]["residual"].copy() for ex in exchanges]
    expected = [v + named["w"] for v, named in zip(before, steps[1])]
    exchanges[2].transport.damage = damage
    for ex, named in zip(exchanges, steps[1]):
        ex.submit("w", named["w"])
    rounds = [ex.rounds() for ex in exchanges]
    for _ in range(2):
        for its in rounds:
            next(its)
    for ex, its in zip(exchanges, rounds):
        with pytest.raises(WireError, match="payload of rank 2: it refuses what it was sent: "):
            next(its)
        with pytest.raises(RuntimeError, match="its step has failed before"):
            ex.finish("w", np.ones(1, np.float32))
        ex.rollback()
    for ex, residual in zip(exchanges, expected):
        np.testing.assert_array_equal(ex.arrays()["w"]["residual"], residual)
    exchanges[2].transport.damage = None
    results.append(run_step(exchanges, steps[2])[0]["w"])
    np.testing.assert_allclose(
        4 * sum(results) + sum(ex.arrays()["w"]["residual"] for ex in exchanges), given, atol=1e-4
    )


def entries_of(spec, named, rank, size, residuals):
    """What a rank's tensors ask for in a first step, of gradients {name: flat array}, which are
    zero afterwards."""
    compressor, step = hc.get_compressor(spec), Step(0, rank, size)
    found = []
    for name, grad in sorted(named.items()):
        state = compressor.init(name, grad.shape)
        payload = compressor.encode(grad, state, step)
        found.append(
            SelectAgain(
                payload,
                split_of(compressor, grad.size, step),
                grad,
                residuals[name],
                compressor.traits.number,
                0,
            )
        )
    return found


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("topk", marks=pytest.mark.release),
        pytest.param("topk:values=fp16", marks=pytest.mark.release),
        pytest.param("dgc", marks=pytest.mark.extended),
    ],
)
def test_bytes_on_64_ranks_with_the_shapes_of_resnet50(spec):
    """A rank gets (1 + a)·k·b at most, and 5 %, where gathering brings 63·k·b. Owners' sums are
    made in memory that all ranks share here."""
    size, rng = 64, np.random.default_rng(0)
    sizes = {
        name: math.prod(shape) for name, shape in MODELS["resnet50"]().items() if len(shape) > 1
    }
    gradient = {name: rng.standard_normal(numel, np.float32) for name, numel in sizes.items()}
    memory, residuals = (
        {name: np.zeros(numel, np.float32) for name, numel in sizes.items()} for _ in range(2)
    )
    hops, gathered = [], 0
    for rank in range(size):
        for name, grad in memory.items():
            np.copyto(grad, np.roll(gradient[name], 7919 * rank))
        entries = entries_of(
            f"{spec}{',' if ':' in spec else ':'}ratio=0.001,exchange=split",
            memory,
            rank,
            size,
            residuals,
        )
        gathered += sum(len(each.payload.buffer) for each in entries)
        hops.append(SelectAgain.exchange(entries, Step(0, rank, size, gain=1 / size)))
    first = [next(hop) for hop in hops]
    parts = [np.split(request.array, np.cumsum(request.splits)[:-1]) for request in first]
    second = [hop.send([sent[rank] for sent in parts]).array for rank, hop in enumerate(hops)]
    joined = np.concatenate(second)
    for hop in hops:
        with pytest.raises(StopIteration) as stop:
            hop.send(joined)
        received = sum(selected.received for selected in stop.value.value)
        assert received <= (1 + 4) * 1.05 * gathered / size
    assert first[0].array.nbytes <= 1.05 * gathered / size


def test_frames_tell_a_tensor_that_was_not_finite():
    """Only that one's result is not."""
    exchanges = ranks_of(SPLIT, 3, {"w": (60, 50), "x": (20, 20)})
    grads = [{"w": np.ones(3000, np.float32), "x": np.ones(400, np.float32)} for _ in exchanges]
    grads[1]["x"][0] = np.inf
    for named in run_step(exchanges, grads):
        assert np.isfinite(named["w"]).all() and np.isnan(named["x"]).all()
    assert all(ex.stats()["steps_undone"] == 1 for ex in exchanges)
