"""The choice by trial is a pure function of durations: tested with durations that are known."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from horovod_compress.trials import Trials


def run(durations, seed=0, noise=0.0, steps=30, **options):
    """(the trials, how many steps each candidate took) where steps take these seconds, times a factor of up to 1 + noise."""
    rng, trials, taken = np.random.default_rng(seed), Trials(list(durations), steps, **options), dict.fromkeys(durations, 0)
    while trials.chosen is None:
        spec = trials.current
        taken[spec] += 1
        first = 1.5 if taken[spec] == 1 else 1
        trials.add(first * durations[spec] * (1 + noise * rng.random()))
    return trials, taken


seconds = st.floats(1e-3, 100)


@examples(300)
@given(st.lists(seconds, min_size=1, max_size=8), st.integers(0, 1000), st.integers(24, 60))
def test_the_choice_is_never_slower_than_any_candidate(durations, seed, steps):
    durations = {str(i): each for i, each in enumerate(durations)}
    noise = 0.1
    trials, taken = run(durations, seed, noise, steps)
    assert sum(taken.values()) <= steps
    allowed = (1 + noise) / (1 - 0.05)  # the margin is what the baseline may be slower by
    assert durations[trials.chosen] <= min(durations.values()) * allowed
    assert run(durations, seed, noise, steps)[0].chosen == trials.chosen


def test_the_baseline_stays_where_little_is_gained():
    assert run({"none": 1.0, "dgc": 0.97})[0].chosen == "none"
    assert run({"none": 1.0, "dgc": 0.94})[0].chosen == "dgc"
    assert run({"none": 1.0, "dgc": 0.97}, margin=0.0)[0].chosen == "dgc"


def test_what_is_far_slower_takes_two_steps():
    trials, taken = run({"none": 9.0, "fp16": 4.5, "dgc:ratio=0.01": 0.09, "dgc:ratio=0.001": 0.08})
    assert trials.chosen == "dgc:ratio=0.001" and taken["none"] == taken["fp16"] == 2


def test_close_candidates_have_several_turns():
    _, taken = run({"none": 1.3, "fp16": 1.0, "dgc": 1.02})
    assert taken["fp16"] == taken["dgc"] == 12 and taken["none"] == 3


def test_a_single_slow_step_decides_nothing():
    trials, steps = Trials(["none", "dgc"]), 0
    while trials.chosen is None:
        steps += 1
        disturbed = trials.current == "dgc" and steps == 2
        trials.add(1.9 if disturbed else {"none": 1.0, "dgc": 0.8}[trials.current])
    assert trials.chosen == "dgc"


@pytest.mark.parametrize("disturbed", range(1, 7))
def test_a_pause_of_any_length_gives_nothing_up(disturbed):
    """An evaluation between two steps, or a checkpoint, in any of the first steps."""
    trials, steps = Trials(["none", "topk"]), 0
    while trials.chosen is None:
        steps += 1
        trials.add(100.0 if steps == disturbed else {"none": 0.8, "topk": 1.0}[trials.current])
    assert trials.chosen == "none"


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="different specs"):
        Trials(["none", "none"])
    with pytest.raises(ValueError, match="5 are too few"):
        Trials(["none", "fp16"], steps=5)
    with pytest.raises(ValueError, match="whole number, not 30.5"):
        Trials(["none", "fp16"], steps=30.5)
    assert Trials(["none"]).chosen == "none"
