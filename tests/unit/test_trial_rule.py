"""The choice by trial is a pure function of durations: tested with durations that are known."""

import pathlib
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from horovod_compress.session import auto
from horovod_compress.session.trial_rule import RULE, Trials, decide, spread


def run(durations, seed=0, noise=0.0, steps=30, **options):
    """(the trials, how many steps each candidate took) where steps take these seconds, times a
    factor of up to 1 + noise."""
    rng, trials, taken = (
        np.random.default_rng(seed),
        Trials(list(durations), steps, **options),
        dict.fromkeys(durations, 0),
    )
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
    # The dense one may be slower by what steps spread, and where there are too few steps to tell,
    # by a factor of two.
    most = max((taken[spec] for spec in durations if spec != "0"), default=steps)
    allowed = (1 + 2 * noise) / (1 - noise)
    if trials.chosen == "0" and min(taken["0"], most) < 12:
        allowed = 2 * (1 + noise)
    assert durations[trials.chosen] <= min(durations.values()) * allowed
    assert run(durations, seed, noise, steps)[0].chosen == trials.chosen


def test_the_baseline_stays_where_little_is_gained():
    assert run({"none": 1.0, "dgc": 0.97})[0].chosen == "none"
    assert run({"none": 1.0, "dgc": 0.94})[0].chosen == "dgc"
    assert run({"none": 1.0, "dgc": 0.97}, margin=0.0)[0].chosen == "dgc"


def test_what_is_far_slower_takes_two_steps():
    trials, taken = run({"none": 9.0, "fp16": 4.5, "dgc:ratio=0.01": 0.09, "dgc:ratio=0.001": 0.08})
    assert trials.chosen == "dgc:ratio=0.001" and taken["fp16"] == 2
    # The dense one has another turn, because the first may have been an accident.
    assert taken["none"] == 4


def test_a_first_step_may_take_twice_as_long():
    """It makes buffers and moves state."""
    trials = Trials(["none", "dgc"])
    for seconds in (1.0, 1.0, 1.0, 3.0, 2.1):
        trials.add(seconds)
    assert trials.current == "none" and not trials.tried["none"].hopeless


def test_close_candidates_have_several_turns():
    _, taken = run({"none": 1.3, "fp16": 1.0, "dgc": 1.02})
    assert taken["fp16"] == taken["none"] == 12 and taken["dgc"] == 3


# Milliseconds of a small GPT with AdamW on one idle machine, of two runs of one command: what the
# first one chose the second one had far behind.
TWICE = (
    {"none": 43.3, "fp16": 49.1, "topk:ratio=0.01": 35.5, "topk:ratio=0.01,min_numel=65536": 40.3},
    {"none": 39.6, "fp16": 50.9, "topk:ratio=0.01": 43.5, "topk:ratio=0.01,min_numel=65536": 56.8},
)


def test_noise_decides_nothing():
    """Steps that differ as much as those runs did, in any order, and both runs by themselves."""
    both = {spec: [its[spec] for its in TWICE] for spec in TWICE[0]}
    for steps in (2, 8, 20, 100):
        assert decide({spec: (its * steps)[:steps] for spec, its in both.items()}, 0.05) == "none"
    for figures in TWICE:
        assert decide({spec: [its] for spec, its in figures.items()}, 0.05) == "none"
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(200):
        trials = Trials(list(TWICE[0]))
        while trials.chosen is None:
            trials.add(rng.uniform(*sorted(both[trials.current])))
        chosen.append(trials.chosen)
    assert chosen.count("none") >= 190, chosen


@pytest.mark.parametrize(
    "dense, other, chosen",
    [
        ([43, 44] * 4, [35, 36] * 4, "topk"),  # far apart, close together
        ([43, 44] * 4, [42, 42.2] * 4, "none"),  # less than the margin
        # 8 faster, and the quartiles 12 apart.
        ([43, 44] * 4, [30, 48, 31, 40] * 2, "none"),
        ([30, 56] * 4, [30] * 8, "none"),
        ([43, 44, 43], [35, 36, 35], "none"),  # too few steps
        # Twice as long throughout, but for an accident.
        ([90, 91], [44, 30, 500], "topk"),
        ([90, 91, 60], [44, 30, 500], "none"),
    ],
)
def test_a_gain_has_to_exceed_what_steps_spread(dense, other, chosen):
    assert decide({"none": dense, "topk": other}, 0.05) == chosen


def test_the_fastest_of_those_that_are_surely_faster():
    seconds = {"none": [9] * 8, "a": [5, 9, 1, 9] * 2, "b": [7] * 8, "c": [6] * 8}
    assert decide(seconds, 0.05) == "c"
    assert spread([3.0]) == 0 and spread([1, 2, 3, 4]) == 2.5


class Session:
    """Notes what it is switched to."""


def controller_of(switched):
    """A controller of a compression that notes what it is switched to."""
    ranks = types.SimpleNamespace(
        gathered=lambda name, value: [value],
        rank_and_size=lambda: (0, 1),
    )
    session = Session()
    session.ranks, session.switch = ranks, switched.append
    its = auto.Controller(session, ["none", "fp16"], auto.Auto())
    # A controller does not keep its session.
    its.kept = session
    return its


def test_a_controller_switches_its_compression_and_keeps_the_choice():
    switched = []
    its = controller_of(switched)
    while its.trials.chosen is None:
        its._step_ended({"none": 0.05, "fp16": 0.04}[its.in_force])
        its.follow()
    assert switched[0] == "none" and its.in_force == its.trials.chosen == "fp16"
    assert its.plan()["spec"] == "fp16" and its.plan()["candidates"]["none"]["steps"] >= 8
    again = controller_of(switched)
    with pytest.raises(ValueError, match="no state"), again.resuming({"auto": {"spec": "none"}}):
        raise ValueError("no state")
    assert switched[-2:] == ["none", "fp16"] and again.trials.chosen is None
    with again.resuming({"auto": {"spec": "none", "chosen": True}}):
        pass
    assert again.state() == {"auto": {"spec": "none", "chosen": True}}
    assert again.trials.current == again.in_force == switched[-1] == "none"


def test_the_rule_is_told():
    summaries, original = [], auto._log.warning
    its = controller_of([])
    auto._log.warning = lambda message, *values: summaries.append(message % values)
    try:
        while its.trials.chosen is None:
            its._step_ended({"none": 0.04, "fp16": 0.05}[its.in_force])
            its.follow()
    finally:
        auto._log.warning = original
    (told,) = summaries
    assert "by speed only" in told and RULE in told and "none 40 ms in the median of" in told
    root = pathlib.Path(__file__).parents[2]
    for file in ("docs/guides/tune.md", "horovod_compress/torch/unbound.py"):
        assert RULE in " ".join((root / file).read_text().split()), file


def test_no_default_is_one_percent_of_adams_gradients():
    assert auto.default_candidates(is_sgd=False, takes_over=False) == ["none", "fp16"]
    sparse = ["topk:ratio=0.01", "topk:ratio=0.01,min_numel=65536"]
    assert auto.default_candidates(is_sgd=True, takes_over=False)[2:] == sparse


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
