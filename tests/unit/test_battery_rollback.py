"""For every id of available(): steps that are not finite or are abandoned are undone, and lose
nothing."""

import numpy as np
import pytest
from battery_facts import (
    SHAPES,
    assert_conserved,
    bytes_of,
    copies,
    over,
    quiet,
    residual_of,
    spec_of,
    steps_of,
    variants,
)
from ranks import copy_of, ranks_of

from horovod_compress.engine.lockstep import mean_of, run_step, start_step

pytestmark = quiet


# -- not finite


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
            assert all(
                np.isfinite(a).all() for arrays in copy_of(ex).values() for a in arrays.values()
            )
            assert ex.stats()["steps_undone"] == (step >= 2)


@over(lambda facts: facts.conserves)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_of_a_not_finite_gradient_the_finite_part_is_kept(id, options, poison):
    """A step that is undone has sent nothing; all that was finite waits in the residuals, in all
    tensors."""
    exchanges = ranks_of(spec_of(id, options), 2, SHAPES)
    steps = steps_of(0, 5, 2, spread=False)
    counted = [copies(ranks) for ranks in steps]
    steps[2][1]["w"][17], counted[2][1]["w"][17] = poison, 0
    results = [run_step(exchanges, ranks)[0] for ranks in steps]
    for name in SHAPES:
        residuals = [residual_of(id, options, ex.arrays()[name]) for ex in exchanges]
        # No residual: that step's gradient is gone, as always.
        dense = not any(ex.arrays()[name] for ex in exchanges)
        kept = [step for step in range(5) if step != 2]
        assert_conserved(
            id,
            options,
            [results[step][name] for step in kept],
            residuals,
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
    """Elements at the end of float32's range, or of what residuals hold, may fail a step, not all
    that follow."""
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
    assert all(
        np.isfinite(a).all()
        for ex in exchanges
        for arrays in copy_of(ex).values()
        for a in arrays.values()
    )


# -- abandoned steps


@over(lambda facts: facts.conserves)
@pytest.mark.parametrize("until", ["submitted", "a round", "one finished"])
def test_an_abandoned_step_loses_nothing(id, options, until):
    """Wherever it ends: then the next step begins, and the gradients of this one wait in the
    residuals."""
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
            [
                [named[name] for named in ranks]
                for step, ranks in enumerate(counted)
                if not (dense and step == 2)
            ],
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
