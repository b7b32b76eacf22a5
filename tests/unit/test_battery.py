"""What holds for every algorithm: each id of available() goes through all of this."""
import dataclasses
import itertools
import json
import math
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from ranks import any_gradients, copy_of, mean_of, ranks_of, run_step, start_step

import horovod_compress as hc
from horovod_compress import kernels
from horovod_compress.compressors import REGISTRY
from horovod_compress.compressors.base import State
from horovod_compress.compressors.options import Ascending, Auto, Choice, Count, Flag, Number, Patterns, Schedule, ZeroOrCount
from horovod_compress.kernels import reference
from horovod_compress.transport.loopback import Loopback

pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered", "ignore:invalid value encountered", "ignore:horovod_compress. .* infinite in float16"
)


@dataclasses.dataclass
class Facts:
    """What is true of one id. Options are spec strings; every tensor is compressed, whatever its size, unless they say
    otherwise.

    variants: options under which it does something worth testing on some hundred elements;
    conserves: options under which what was sent and the residuals add up to all gradients;
    rounds: to float32 rounding of "elements", or of the tensor as a whole;
    dense: options under which the result is the mean gradient, to `dense_error`;
    unbiased: options under which it is on average, with the largest variance of one rank's result, a function of the
        gradient;
    drawn: "own" random choices on each rank, "shared" ones, or neither;
    scales: the largest power of two that a gradient can be multiplied by and the result is just multiplied too;
    """

    variants: tuple = ("",)
    conserves: tuple = ()
    rounds: str = "tensor"
    dense: tuple = ()
    dense_error: float = 2e-6
    unbiased: dict = dataclasses.field(default_factory=dict)
    drawn: str = None
    scales: int = 60


def at_most(steps):
    """Variance of rounding to one of `steps` parts of the largest element."""
    return lambda g: np.abs(g).max() ** 2 / (4 * steps**2)


def any_variance(g):
    return math.inf


FACTS = {
    "none": Facts(dense=("",)),
    "fp16": Facts(dense=("",), dense_error=2**-9, scales=0),
    "bf16": Facts(dense=("",), dense_error=2**-8),
    "dgc": Facts(
        variants=(
            "ratio=0.05",
            "ratio=0.05,momentum=0.5,nesterov=true,values=fp16",
            "ratio=0.05,clip_norm=1",
            "ratio=1",
        ),
        conserves=("ratio=0.05,momentum=0", "ratio=0.1,momentum=0,values=bf16", "ratio=0.9,momentum=0,masking=false"),
        rounds="elements",
        dense=("ratio=1,momentum=0",),
    ),
    "topk": Facts(
        variants=("ratio=0.05", "ratio=0.1,values=fp16"),
        conserves=("ratio=0.05", "ratio=0.1,values=fp16", "ratio=0.1,values=bf16", "ratio=0.9"),
        rounds="elements",
        dense=("ratio=1",),
    ),
    "randomk": Facts(
        variants=("ratio=0.1",),
        conserves=("ratio=0.1", "ratio=0.7"),
        rounds="elements",
        dense=("ratio=1",),
        drawn="own",
    ),
    "strom": Facts(variants=("tau=0.5",), conserves=("tau=0.5", "tau=100"), scales=None),
    "adacomp": Facts(variants=("", "bin_length=7"), conserves=("", "bin_length=7", "bin_length=50,scale_factor=3")),
    "variance": Facts(
        variants=("", "alpha=0.5,tau=0.5", "error_feedback=true"),
        conserves=("error_feedback=true", "error_feedback=true,alpha=0.1", "tau=0.5"),
        scales=30,
    ),
    "globalrandk": Facts(
        variants=("ratio=0.1", "k=30,unbiased=true", "ratio=0.02,of=model"),
        conserves=("ratio=0.1", "k=3", "k=5,of=model"),
        rounds="elements",
        dense=("ratio=1", "k=100000", "ratio=1,unbiased=true", "ratio=1,of=model"),
        unbiased={"ratio=0.3,unbiased=true": any_variance, "ratio=0.3,of=model,unbiased=true": any_variance},
        drawn="shared",
    ),
    "maxnorm": Facts(
        variants=("", "bits=2,norm=l2", "ratio=0.3", "k=30,unbiased=true", "k=3,of=model"),
        conserves=("ratio=0.3", "ratio=1,bits=2", "k=10,bits=8,norm=l2", "ratio=0.1,of=model"),
        unbiased={
            "": at_most(15),
            "bits=2": at_most(3),
            "bits=8": at_most(255),
            "ratio=0.3,unbiased=true": any_variance,
        },
        drawn="own",
    ),
    "multiscale": Facts(
        variants=("", "bits=2+4+8,norm=l2", "ratio=0.3", "k=30,unbiased=true", "k=3,of=model"),
        conserves=("ratio=0.3", "ratio=1", "k=10,bits=4+8,norm=l2"),
        unbiased={
            "": at_most(3),
            "bits=4+8": at_most(15),
            "bits=1+3+5": at_most(1),
            "ratio=0.3,unbiased=true": any_variance,
        },
        drawn="own",
    ),
    "terngrad": Facts(
        variants=("", "clip=0", "ratio=0.3", "k=30,unbiased=true"),
        conserves=("ratio=0.3", "ratio=1,clip=0"),
        unbiased={"clip=0": at_most(1), "clip=0,ratio=0.3,unbiased=true": any_variance},
        drawn="own",
    ),
    "signsgd": Facts(scales=None),
    "efsignsgd": Facts(conserves=("",)),
    "onebit": Facts(conserves=("",)),
    "natural": Facts(unbiased={"": lambda g: g**2 / 8}, drawn="own"),
    "powersgd": Facts(
        variants=("min_rate=0,rank=2", "min_rate=0,rank=2,start_step=2", ""),
        conserves=("min_rate=0,rank=2", "min_rate=0,rank=1", ""),
        dense=("min_rate=0,rank=1000",),
        drawn="shared",
    ),
    "qsgd": Facts(
        variants=("bucket_size=64", "norm=max,bits=2", "coding=fixed", "coding=elias,levels=5"),
        unbiased={
            "bucket_size=64": any_variance,
            "norm=max,bucket_size=100000": at_most(15),
            "levels=1,bucket_size=32": any_variance,
        },
        drawn="own",
    ),
}


def test_there_are_facts_about_every_id():
    assert set(FACTS) == set(hc.available())


def spec_of(id, options):
    """The spec, with every tensor compressed."""
    if "min_numel" in hc.available()[id]["options"] and "min_numel" not in options:
        options = f"min_numel=0,{options}"
    return f"{id}:{options}"


def over(of):
    """Parametrizes a test over the specs that `of` takes from an id's facts."""
    specs = [(id, options) for id in hc.available() for options in (of(FACTS[id]) if id in FACTS else ())]
    return pytest.mark.parametrize("id, options", specs, ids=[f"{id}:{options}" for id, options in specs])


def variants(facts):
    return facts.variants


SHAPES = {"w": (24, 30), "conv": (6, 5, 3, 3), "bias": (7,)}


def steps_of(seed, steps, size, shapes=SHAPES, spread=True):
    """gradients[step][rank][name] of flat arrays; with `spread` of very different sizes on the ranks."""
    rng = np.random.default_rng(seed)
    return [
        [
            {
                n: (rng.standard_normal(math.prod(s)) * (10.0**rank if spread else 1)).astype(np.float32)
                for n, s in shapes.items()
            }
            for rank in range(size)
        ]
        for _ in range(steps)
    ]


def shaped(steps, shapes=SHAPES):
    return [[{n: g.reshape(shapes[n]) for n, g in named.items()} for named in ranks] for ranks in steps]


def copies(ranks):
    return [{n: g.copy() for n, g in named.items()} for named in ranks]


def bytes_of(results):
    return [{n: g.tobytes() for n, g in named.items()} for named in results]


# -- replicas agree ----------------------------------------------------------------------------------------------------


@over(variants)
@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_replicas_agree_bit_for_bit(id, options, size):
    exchanges = ranks_of(spec_of(id, options), size, SHAPES)
    for ranks in steps_of(size, 4, size):
        results = bytes_of(run_step(exchanges, ranks))
        assert all(result == results[0] for result in results)


@over(variants)
def test_the_order_of_submission_may_differ_between_ranks(id, options):
    orders = [["w", "conv", "bias"], ["bias", "w", "conv"], ["conv", "bias", "w"]]
    (steps,), (again,) = steps_of(0, 1, 3), steps_of(0, 1, 3)
    expected = bytes_of(run_step(ranks_of(spec_of(id, options), 3, SHAPES), steps))
    reordered = [{n: named[n] for n in order} for named, order in zip(again, orders)]
    assert bytes_of(run_step(ranks_of(spec_of(id, options), 3, SHAPES), reordered)) == expected


# -- nothing is lost ---------------------------------------------------------------------------------------------------


def residual_of(id, options, arrays):
    residual = hc.get_compressor(spec_of(id, options)).residual(State("", arrays))
    return np.zeros(1) if residual is None else residual.astype(np.float64)


def assert_conserved(id, options, sent, residuals, gradients):
    """sent: results[step], float arrays or None; residuals[rank]; gradients[step][rank]."""
    ranks = len(residuals)
    total = sum(g.astype(np.float64) for step in gradients for g in step)
    moved = sum(np.abs(g).astype(np.float64) for step in gradients for g in step)
    found = sum(ranks * mean.astype(np.float64) for mean in sent) + sum(residuals)
    if FACTS[id].rounds == "tensor":
        moved = np.linalg.norm(moved) if moved.size else 0
    assert (np.abs(found - total) <= 5e-7 * len(gradients) * moved + 1e-30).all()


@over(lambda facts: facts.conserves)
@settings(max_examples=25, deadline=None)
@given(grads=any_gradients())
def test_nothing_is_lost(id, options, grads):
    run = hc.simulate(spec_of(id, options), grads)
    for name in grads[0][0]:
        residuals = [residual_of(id, options, run.state[rank][name]) for rank in range(len(grads[0]))]
        assert_conserved(
            id, options, [mean[name].reshape(-1) for mean in run.mean], residuals,
            [[named[name].reshape(-1) for named in ranks] for ranks in grads],
        )


def test_what_has_a_residual_conserves():
    """No id with error feedback is left out of the test above."""
    for id, facts in FACTS.items():
        compressors = [hc.get_compressor(spec_of(id, options)) for options in facts.variants]
        residuals = [compressor.residual(compressor.init("t", (4, 4))) for compressor in compressors]
        assert any(residual is not None for residual in residuals) == bool(facts.conserves), id


# -- unbiased ----------------------------------------------------------------------------------------------------------

# Among them what lies at the boundaries of scales: 3/63 of the largest and its neighbours, 15/255, 1/7.
VALUES = np.float32([
    0, 1, -1, 0.3, -0.77, 0.5, 2e-3, -3e-3, 3 / 63, -3 / 63, 3.001 / 63, 2.999 / 63, 3.5 / 63, 4 / 63, 15 / 255,
    15.5 / 255, 1 / 7, 1.01 / 7, 1 / 31, 2**-7, -(2**-7) * 1.5, 1 / 15, 2 / 15,
])


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
    """The ranks' own rounding is independent: with the same gradient on 6 ranks it has a sixth of the variance.
    (On 8 some would go dense.)"""
    if "unbiased" in options:
        options += ",ratio=1"  # noise of rounding only, not of the coordinates that ranks share
        options = ",".join(part for part in options.split(",") if part != "ratio=0.3")
    gradient = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    alone, together = (
        np.var(hc.simulate(spec_of(id, options), [[{"t": gradient}] * size] * 3).mean[2]["t"] - gradient)
        for size in (1, 6)
    )
    assert together / alone == pytest.approx(1 / 6, rel=0.15)


# -- the dense limit, and tensors that go dense ------------------------------------------------------------------------


@over(lambda facts: facts.dense)
@settings(max_examples=25, deadline=None)
@given(grads=any_gradients())
def test_dense_limit(id, options, grads):
    facts = FACTS[id]
    if id == "fp16":  # has no range for 12 orders of magnitude
        grads = [[{n: np.clip(g, -1000, 1000) for n, g in named.items()} for named in ranks] for ranks in grads]
    if id == "powersgd":  # finds all directions from its random start; later from those of the last step
        grads = grads[:1]
    run = hc.simulate(spec_of(id, options), grads)
    for name in grads[0][0]:
        size = 0
        for mean, ranks in zip(run.mean, grads):
            values = np.array([named[name] for named in ranks], np.float64)
            size = size + (np.linalg.norm(values) if id == "powersgd" else np.abs(values).max(axis=0))
            assert (np.abs(mean[name] - values.mean(axis=0)) <= facts.dense_error * size + 2.0**-24).all()


@pytest.mark.parametrize("id", [id for id, about in hc.available().items() if "dense" in about["options"]])
@pytest.mark.parametrize("dense, width", [("fp32", 4), ("fp16", 2)])
def test_small_one_dimensional_and_excluded_tensors_go_dense(id, dense, width):
    shapes = {"small": (10, 10), "bias": (5000,), "embedding.weight": (50, 50), "scalar": ()}
    grads = shaped(steps_of(0, 3, 2, shapes, spread=False), shapes)
    options = f"min_numel=1024,exclude=embed*+nothing,dense={dense}" + (",momentum=0" if id == "dgc" else "")
    run = hc.simulate(f"{id}:{options}", grads)
    for step, ranks in enumerate(grads):
        for name in shapes:
            expected = mean_of([named[name].astype(f"f{width}") for named in ranks])
            np.testing.assert_array_equal(run.mean[step][name], expected.astype(np.float32))
    assert run.bytes_sent == [[width * (100 + 5000 + 2500 + 1)] * 2] * 3
    assert run.state == [{name: {} for name in shapes}] * 2
    covered = hc.simulate(f"{id}:min_numel=1024", [[{"w": np.ones((64, 64), np.float32)}] * 2])
    assert covered.bytes_sent[0][0] < 64 * 64 * 4


# -- seeds -------------------------------------------------------------------------------------------------------------


def with_seed(spec, seed):
    return f"{spec},seed={seed}" if "seed" in hc.available()[spec.partition(":")[0]]["options"] else spec


@over(variants)
def test_runs_repeat_exactly_and_seeds_matter_where_something_is_drawn(id, options):
    grads = shaped(steps_of(0, 4, 3))
    first, again, other = (hc.simulate(with_seed(spec_of(id, options), seed), grads) for seed in (1, 1, 2))
    assert bytes_of(first.mean) == bytes_of(again.mean) and first.bytes_sent == again.bytes_sent
    if FACTS[id].drawn:
        assert bytes_of(first.mean) != bytes_of(other.mean)
    if not FACTS[id].drawn and id not in ("dgc", "topk"):  # those two sample places, to find a threshold
        assert bytes_of(first.mean) == bytes_of(other.mean)


@over(variants)
def test_global_generators_are_left_alone(id, options):
    grads = shaped(steps_of(0, 3, 2))
    torch = sys.modules.get("torch")
    states = []
    for _ in range(2):
        states.append((random.getstate(), str(np.random.get_state()), torch and torch.get_rng_state().tolist()))
        first = bytes_of(hc.simulate(spec_of(id, options), grads).mean)
    assert states[0] == states[1]
    random.seed(99)
    np.random.seed(99)
    assert bytes_of(hc.simulate(spec_of(id, options), grads).mean) == first


# -- state -------------------------------------------------------------------------------------------------------------


@over(variants)
def test_a_loaded_state_continues_bit_for_bit(id, options):
    steps = steps_of(0, 9, 3)
    exchanges = ranks_of(spec_of(id, options), 3, SHAPES)
    for ranks in steps[:5]:
        run_step(exchanges, copies(ranks))
    saved = [ex.state_dict() for ex in exchanges]
    frozen = [
        {n: {k: a.tobytes() for k, a in arrays.items()} for n, arrays in state["tensors"].items()} for state in saved
    ]
    expected = [bytes_of(run_step(exchanges, copies(ranks))) for ranks in steps[5:]]
    again = ranks_of(spec_of(id, options), 3, SHAPES)
    run_step(again, copies(steps[0]))
    for ex, state in zip(again, saved):
        ex.load_state_dict(state)
    assert [bytes_of(run_step(again, copies(ranks))) for ranks in steps[5:]] == expected
    assert frozen == [
        {n: {k: a.tobytes() for k, a in arrays.items()} for n, arrays in state["tensors"].items()} for state in saved
    ]
    for ex, other in zip(exchanges, again):
        for name, arrays in copy_of(ex).items():
            for key, array in arrays.items():
                assert array.tobytes() == other.arrays()[name][key].tobytes()


@over(lambda facts: facts.variants[:1])
def test_a_state_of_another_seed_or_rank_is_refused(id, options):
    spec = spec_of(id, options)
    own, other_rank = ranks_of(spec, 2, SHAPES)
    with pytest.raises(ValueError, match="rank is 1 in it and 0 here"):
        own.load_state_dict(other_rank.state_dict())
    if "seed" in hc.available()[id]["options"]:
        with pytest.raises(ValueError, match="seed is 5 in it and 0 here"):
            own.load_state_dict(ranks_of(with_seed(spec, 5), 2, SHAPES)[0].state_dict())


# -- not finite --------------------------------------------------------------------------------------------------------


@over(variants)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_a_not_finite_gradient_is_seen_by_all_and_poisons_nothing(id, options, poison):
    exchanges = ranks_of(spec_of(id, options), 3, SHAPES)
    steps = steps_of(0, 5, 3, spread=False)
    steps[2][1]["w"][17] = poison
    for step, ranks in enumerate(steps):
        results = run_step(exchanges, ranks)
        assert all(bytes_of(results)[0] == other for other in bytes_of(results))
        for name in SHAPES:
            assert np.isfinite(results[0][name]).all() == (step != 2 or name != "w"), (step, name)
        for ex in exchanges:
            assert all(np.isfinite(a).all() for arrays in copy_of(ex).values() for a in arrays.values())
            assert ex.stats()["steps_undone"] == (step >= 2)


@over(lambda facts: facts.conserves)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_of_a_not_finite_gradient_the_finite_part_is_kept(id, options, poison):
    """A step that is undone has sent nothing; all that was finite waits in the residuals, in all tensors."""
    exchanges = ranks_of(spec_of(id, options), 2, SHAPES)
    steps = steps_of(0, 5, 2, spread=False)
    counted = [copies(ranks) for ranks in steps]
    steps[2][1]["w"][17], counted[2][1]["w"][17] = poison, 0
    results = [run_step(exchanges, ranks)[0] for ranks in steps]
    for name in SHAPES:
        residuals = [residual_of(id, options, ex.arrays()[name]) for ex in exchanges]
        dense = not any(ex.arrays()[name] for ex in exchanges)  # no residual: that step's gradient is gone, as always
        kept = [step for step in range(5) if step != 2]
        assert_conserved(
            id, options, [results[step][name] for step in kept], residuals,
            [[named[name] for named in counted[step]] for step in (kept if dense else range(5))],
        )


@over(variants)
def test_a_sum_that_the_host_made_infinite_is_undone(id, options):
    """The carriers come back not finite: the result is not finite, and what was taken goes back."""
    exchanges = ranks_of(spec_of(id, options), 2, SHAPES)
    first, *steps = steps_of(0, 4, 2, spread=False)
    run_step(exchanges, copies(first))
    carriers = start_step(exchanges, first)
    for name in SHAPES:
        for ex, named in zip(exchanges, carriers):
            named[name].fill(np.inf)
            ex.finish(name, named[name])
        for named in first:
            assert not np.isfinite(named[name]).all()
    for ranks in steps:
        for named in run_step(exchanges, ranks):
            assert all(np.isfinite(g).all() for g in named.values())
    assert exchanges[0].stats()["steps_undone"] == 1


@over(variants)
@pytest.mark.parametrize("size", [1e33, 3e38])
def test_huge_gradients_do_not_stop_training_for_ever(id, options, size):
    """Elements at the end of float32's range, or of what residuals hold, may fail a step, not all that follow."""
    shape = {"w": (24, 30)}
    exchanges = ranks_of(spec_of(id, options), 2, shape)
    rng = np.random.default_rng(0)
    for step, ranks in enumerate(steps_of(0, 40, 2, shape, spread=False)):
        if step == 0:
            for named in ranks:
                named["w"][...] = rng.choice([-size, size], 720)
        results = run_step(exchanges, ranks)
        assert results[0]["w"].tobytes() == results[1]["w"].tobytes()
    assert np.isfinite(results[0]["w"]).all()
    assert all(np.isfinite(a).all() for ex in exchanges for arrays in copy_of(ex).values() for a in arrays.values())


# -- abandoned steps ---------------------------------------------------------------------------------------------------


@over(lambda facts: facts.conserves)
@pytest.mark.parametrize("until", ["submitted", "a round", "one finished"])
def test_an_abandoned_step_loses_nothing(id, options, until):
    """Wherever it ends: then the next step begins, and the gradients of this one wait in the residuals."""
    exchanges = ranks_of(spec_of(id, options), 2, SHAPES)
    steps = steps_of(0, 5, 2, spread=False)
    counted = [copies(ranks) for ranks in steps]
    results = []
    for step, ranks in enumerate(steps):
        if step == 2:
            abandon(exchanges, ranks, until)
        else:
            results.append(run_step(exchanges, ranks)[0])
    assert [ex.stats()["steps_undone"] for ex in exchanges] == [1, 1]
    for name in SHAPES:
        dense = not any(ex.arrays()[name] for ex in exchanges)
        assert_conserved(
            id,
            options,
            [result[name] for result in results],
            [residual_of(id, options, ex.arrays()[name]) for ex in exchanges],
            [[named[name] for named in ranks] for step, ranks in enumerate(counted) if not (dense and step == 2)],
        )


def abandon(exchanges, ranks, until):
    if until == "one finished":
        carriers = start_step(exchanges, ranks)
        for ex in exchanges:
            ex.finish("w", mean_of([named["w"] for named in carriers]))
        return
    for ex, named in zip(exchanges, ranks):
        for name in SHAPES:
            ex.submit(name, named[name])
    if until == "a round":
        for rounds in [ex.rounds() for ex in exchanges]:
            next(rounds, None)


@over(variants)
@pytest.mark.parametrize("until", ["submitted", "a round", "one finished"])
def test_after_an_abandoned_step_the_next_is_as_good_as_ever(id, options, until):
    exchanges = ranks_of(spec_of(id, options), 2, SHAPES)
    steps = steps_of(0, 3, 2)
    abandon(exchanges, steps[0], until)
    for ranks in steps[1:]:
        results = bytes_of(run_step(exchanges, ranks))
        assert results[0] == results[1]
        assert all(np.isfinite(g).all() for g in ranks[0].values())
    assert [ex.stats()["steps_undone"] for ex in exchanges] == [1, 1]


# -- shapes, types and values ------------------------------------------------------------------------------------------


@over(variants)
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (1,), (1, 1), (2,), (3, 1, 7), (1, 50), (50, 1)])
def test_every_shape(id, options, shape):
    rng = np.random.default_rng(0)
    grads = [
        [{"t": rng.standard_normal(shape).astype(np.float32), "u": np.ones(3)} for _ in range(3)] for _ in range(3)
    ]
    run = hc.simulate(spec_of(id, options), grads)
    for mean in run.mean:
        assert mean["t"].shape == shape and mean["t"].dtype == np.float32 and np.isfinite(mean["t"]).all()


@over(variants)
def test_types_and_layouts_of_memory_do_not_matter(id, options):
    rng = np.random.default_rng(0)
    wide = [[rng.standard_normal((60, 48)).astype(np.float16) for _ in range(2)] for _ in range(3)]
    kept = [[array.copy() for array in ranks] for ranks in wide]
    expected = hc.simulate(
        spec_of(id, options), [[{"t": np.ascontiguousarray(a[::2, ::2].T, np.float32)} for a in r] for r in wide]
    )
    for dtype in (np.float16, np.float64):
        run = hc.simulate(spec_of(id, options), [[{"t": a.astype(dtype)[::2, ::2].T} for a in ranks] for ranks in wide])
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
    exact = id != "powersgd" and "values" not in options  # 16-bit values have a range of their own
    for mean, its_mean in zip(run.mean, its.mean):
        for name in SHAPES:
            if exact:
                np.testing.assert_array_equal(mean[name] * factor, its_mean[name])
            elif id == "powersgd":
                np.testing.assert_allclose(mean[name], its_mean[name] / factor, rtol=1e-3, atol=1e-4)


@over(variants)
@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-40, 1e-45])
def test_huge_and_denormal_gradients(id, options, size):
    """The result is finite and in proportion, or not finite on all ranks, and then counted."""
    rng = np.random.default_rng(0)
    grads = [[{"t": (size * rng.choice([-1, 0, 1], (20, 30))).astype(np.float32)} for _ in range(2)] for _ in range(3)]
    run = hc.simulate(spec_of(id, options), grads)
    undone = sum(not np.isfinite(mean["t"]).all() for mean in run.mean)
    assert run.stats[0]["steps_undone"] == undone
    assert undone == 0 or (size == 1e30 and id in ("fp16", "variance")), "these two say that they cannot"
    if id != "signsgd" and not undone:
        d = np.sqrt(600)
        least = 2.0**-126 if id in ("natural",) else 0
        assert all(np.abs(mean["t"]).max() <= 20 * d * max(size, least) for mean in run.mean)


# -- specs -------------------------------------------------------------------------------------------------------------


def fields():
    return [(id, field) for id, cls in REGISTRY.items() for field in dataclasses.fields(cls)]


over_options = pytest.mark.parametrize("id, field", fields(), ids=[f"{id}.{field.name}" for id, field in fields()])


def wrong_values(kind):
    """Values of the wrong type or out of range, for a kind of option."""
    if isinstance(kind, Auto):
        return [v for v in wrong_values(kind.kind) if v != "auto"]
    none = [] if getattr(kind, "optional", False) else [None]
    if isinstance(kind, (Number, Count)):
        below = [kind.low - 1] + ([kind.low] if getattr(kind, "low_open", False) else [])
        above = [2 * kind.high + 1] if kind.high < math.inf else []
        halves = [1.5] if isinstance(kind, Count) else []
        return [*below, *above, *halves, *none, "1", "many", True, math.nan, math.inf, -math.inf, 1j, [1], {}]
    if isinstance(kind, Flag):
        return [0, 1, "true", 0.0, [], *none]
    if isinstance(kind, Choice):
        return ["", "pigeon", 5, True, [], kind.words[0].upper(), *none]
    if isinstance(kind, Patterns):
        return [5, [1], {"a": 1}, 0.5, *none]
    if isinstance(kind, Ascending):
        return [5, (), (4,), (6, 2), (4, 4), (0, 4), (4, 17), tuple(range(1, 10)), (2.5, 6), "2+6", (True, 4), *none]
    if isinstance(kind, Schedule):
        pairs = [((1, 0.5),), ((0, 0.5), (0, 0.1)), ((0, 2),), ((0, 0),), ((0.5, 0.1),), ((0, 0.1, 3),), ((0,),)]
        return [5, "0/1", *pairs, *none]
    raise AssertionError(f"say what is wrong for {kind}")


WRONG_TEXTS = {
    Number: ["", "many", "1e", "nan", "inf"],
    Count: ["", "many", "1.5", "1e3"],
    ZeroOrCount: ["", "many", "1", "3"],
    Flag: ["", "yes", "1"],
    Choice: ["", "pigeon"],
    Ascending: ["", "5", "6+2", "a+b"],
    Auto: ["", "automatic", "0", "1.5"],
    Schedule: ["5", "0/2", "a/b", "1/0.5"],
    Patterns: [],
}


@over_options
def test_bad_options_name_the_problem_and_what_is_valid(id, field):
    kind = field.metadata["kind"]
    for value in wrong_values(kind):
        with pytest.raises(ValueError) as error:
            hc.get_compressor({"id": id, field.name: value})
        assert f"{id}: {field.name} must be {kind}, not {value!r}" == str(error.value)
    for text in WRONG_TEXTS[type(kind)]:
        with pytest.raises(ValueError) as error:
            hc.get_compressor(f"{id}:{field.name}={text}")
        assert id in str(error.value) and field.name in str(error.value)
    with pytest.raises(ValueError, match="twice"):
        text = text_of(kind, valid_values(kind)[-1])
        hc.get_compressor(f"{id}:{field.name}={text},{field.name}={text}")


EXTREMES = {Number: [1e300, 1e-300, 1e39, 1e-46, 10**400, -(10**400)], Count: [2**31, 2**63, 2**64 - 1, 2**64, 10**400]}
LENGTHS = ("bin_length", "bucket_size")


@over_options
def test_extreme_numbers_are_refused_or_work(id, field):
    """What a spec takes does not fail later."""
    kind = field.metadata["kind"]
    for value in EXTREMES.get(type(kind), []) if field.name not in LENGTHS else []:
        needs = {"ratio": 0.5} if field.name in ("unbiased", "of") else {}
        try:
            compressor = hc.get_compressor({"id": id, "min_numel": 0, **needs, field.name: value})
        except ValueError as error:
            assert f"{field.name} must be {kind}" in str(error)
            continue
        run = hc.simulate(compressor, [[{"w": np.ones((5, 5))}] * 2] * 2)
        assert all(np.isfinite(mean["w"]).all() for mean in run.mean), value


@pytest.mark.parametrize("option", ["adacomp:min_numel=0,bin_length", "qsgd:min_numel=0,bucket_size"])
def test_lengths_far_beyond_the_tensor_are_refused_or_work(option):
    """In a process of its own, that may crash."""
    code = (
        "import horovod_compress as hc, numpy as np\n"
        f"for length in ({10**30}, {2**64}, {2**64 - 1}, {2**63}, {2**31}):\n"
        f"    try: compressor = hc.get_compressor('{option}=%d' % length)\n"
        "    except ValueError: continue\n"
        "    assert (hc.simulate(compressor, [[{'w': np.ones((5, 5))}] * 2]).mean[0]['w'] == 1).all()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("id", hc.available())
def test_unknown_ids_and_options_name_the_valid_ones(id):
    with pytest.raises(ValueError) as error:
        hc.get_compressor(f"{id}x")
    assert all(name in str(error.value) for name in hc.available())
    for spec in (f"{id}:bogus=1", {"id": id, "bogus": 1}):
        with pytest.raises(ValueError, match=f"{id} has no option 'bogus'") as error:
            hc.get_compressor(spec)
        assert all(name in str(error.value) for name in hc.available()[id]["options"])
    with pytest.raises(ValueError, match="option=value"):
        hc.get_compressor(f"{id}:bogus")


def valid_values(kind):
    """Values other than the default, for most."""
    if isinstance(kind, Auto):
        return ["auto", *valid_values(kind.kind)]
    none = [None] if getattr(kind, "optional", False) else []
    if isinstance(kind, Number):
        high = min(kind.high, kind.low + 1)
        return [high, kind.low + 0.7 * (high - kind.low), (kind.low + high) / 3 + 1e-9, np.float32(high), *none]
    if isinstance(kind, Count):
        return [kind.low, min(kind.high, kind.low + 3), np.int64(kind.low + 1), *none]
    if isinstance(kind, Flag):
        return [True, False, *none]
    if isinstance(kind, Choice):
        return list(kind.words)
    if isinstance(kind, Patterns):
        return [("a*", "b.c"), (), ["x"], "one"]
    if isinstance(kind, Ascending):
        return [(1, 16), (3, 5, 7), [4, 8]]
    if isinstance(kind, Schedule):
        return [(), ((0, 0.25), (10, 0.01)), [[0, 1]]]
    raise AssertionError(f"say what is valid for {kind}")


def text_of(kind, value):
    """A value as it stands in a spec."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(kind, Schedule):
        return "+".join(f"{step}/{ratio}" for step, ratio in value)
    return "+".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


NEEDS = {"unbiased": {"ratio": 0.5}, "of": {"ratio": 0.5}, "nesterov": {"momentum": 0.5}}  # what an option needs besides


@over_options
def test_specs_dicts_reprs_and_configs_are_one(id, field):
    kind, needs = field.metadata["kind"], NEEDS.get(field.name, {})
    needs = {name: value for name, value in needs.items() if name in hc.available()[id]["options"]}
    for value in valid_values(kind):
        text = ",".join(f"{name}={text_of(None, v)}" for name, v in needs.items())
        if value or not isinstance(value, tuple):  # an empty tuple is the default of what has it, and not to be said
            text += f",{field.name}={text_of(kind, value)}"
        compressor = hc.get_compressor({"id": id, field.name: value, **needs})
        cls = type(compressor)
        assert compressor == cls(**{field.name: value}, **needs) == hc.get_compressor(f"{id}:{text}")
        assert hc.get_compressor(json.loads(json.dumps(compressor.config))) == compressor
        assert eval(repr(compressor), {cls.__name__: cls}) == compressor
        assert hash(compressor) == hash(hc.get_compressor(compressor))
        assert set(compressor.config) == {"id", *hc.available()[id]["options"]}


@pytest.mark.parametrize("id", hc.available())
def test_what_available_says_is_what_there_is(id):
    about = hc.available()[id]
    compressor = hc.get_compressor(id)
    assert about["road"] in ("allreduce", "allgather") and about["paper"]
    assert {name: option["default"] for name, option in about["options"].items()} == {
        name: value for name, value in compressor.config.items() if name != "id"
    }
    assert all(option["doc"] and option["values"] for option in about["options"].values())
    assert len({cls.number for cls in REGISTRY.values()}) == len(REGISTRY) and 0 <= compressor.number < 256


# -- bytes -------------------------------------------------------------------------------------------------------------


class Counting(Loopback):
    """Counts what goes through it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sent, self.calls, self.waited = 0, [], 0

    def allgather(self, name, payload):
        return self._counted(("gather", name), payload, super().allgather(name, payload))

    def allreduce(self, name, array, op="sum"):
        return self._counted((op, name), array, super().allreduce(name, array, op))

    def _counted(self, call, array, wait):
        self.sent += array.nbytes
        self.calls.append(call)

        def counted():
            self.waited += 1
            return wait()

        return counted


@over(variants)
def test_every_byte_is_counted(id, options):
    """What the host's carriers and the collectives of a step hold, on each rank."""
    exchanges = ranks_of(spec_of(id, options), 3, SHAPES, Counting)
    steps = steps_of(0, 4, 3)
    steps[2][1]["w"][3] = np.nan
    carried = [0] * 3
    for ranks in copies_of_steps(steps):
        carriers = start_step(exchanges, ranks)
        for rank, named in enumerate(carriers):
            carried[rank] += sum(carrier.nbytes for carrier in named.values())
        for name in SHAPES:
            for ex in exchanges:
                ex.finish(name, mean_of([named[name] for named in carriers]))
    sent = [bytes_carried + ex.transport.sent for bytes_carried, ex in zip(carried, exchanges)]
    assert [ex.stats()["bytes_sent"] for ex in exchanges] == sent
    run = hc.simulate(spec_of(id, options), shaped(copies_of_steps(steps)))
    assert np.sum(run.bytes_sent, axis=0).tolist() == sent
    for stats in run.stats:
        assert stats["dense_bytes"] == 4 * 4 * (720 + 270 + 7)
        assert stats["ratio"] == stats["dense_bytes"] / stats["bytes_sent"]


def copies_of_steps(steps):
    return [copies(ranks) for ranks in steps]


@over(variants)
def test_submitting_never_waits_and_names_every_operation(id, options):
    """Inside a backward hook nothing may block; and ranks may come to operations in different orders."""
    (exchange,) = ranks_of(spec_of(id, options), 1, SHAPES, Counting)
    ((named,),) = steps_of(0, 1, 1)
    carriers = {name: exchange.submit(name, named[name]) for name in SHAPES}
    assert exchange.transport.waited == 0
    for name, carrier in carriers.items():
        exchange.finish(name, carrier)
    calls = exchange.transport.calls
    assert len(set(calls)) == len(calls) and all(any(n in name for n in [*SHAPES, ":agree", ":step"]) for _, name in calls)


# -- backends ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(kernels.backend != "native", reason="needs native kernels, which were not built")
@over(variants)
def test_ranks_on_different_kernels_agree(id, options, monkeypatch):
    """Rank 0 has native kernels, rank 1 the reference. Where replicas then differ, the handshake compares the kernels."""
    exchanges = ranks_of(spec_of(id, options), 2, SHAPES)

    def use(rank):
        monkeypatch.setattr(kernels, "host", reference if rank else kernels.native)
        return exchanges[rank]

    def rounds_of(rank):
        for _ in use(rank).rounds():
            yield
            use(rank)

    for grads in steps_of(0, 4, 2):
        carriers = [{n: use(rank).submit(n, g) for n, g in named.items()} for rank, named in enumerate(grads)]
        for _ in itertools.zip_longest(*map(rounds_of, range(2))):
            pass  # every rank starts a round before any waits for it
        for name in SHAPES:
            reduced = mean_of([named[name] for named in carriers])
            for rank in range(2):
                use(rank).finish(name, reduced)
            same = np.array_equal(*(named[name] for named in grads), equal_nan=True)
            assert same or exchanges[0].compressor.same_kernels, name


@over(variants)
def test_the_reference_kernels_do_the_same(id, options, monkeypatch):
    """The runs that native kernels and the reference make; which of the largest are sent may differ."""
    grads = shaped(steps_of(0, 4, 3))
    native = hc.simulate(spec_of(id, options), grads)
    monkeypatch.setattr(kernels, "host", reference)
    stated = hc.simulate(spec_of(id, options), grads)
    if id not in ("dgc", "topk"):
        assert native.bytes_sent == stated.bytes_sent
        for mean, its_mean in zip(native.mean, stated.mean):
            for name in SHAPES:
                np.testing.assert_allclose(mean[name], its_mean[name], rtol=2e-5, atol=2e-5 * np.abs(mean[name]).max())
