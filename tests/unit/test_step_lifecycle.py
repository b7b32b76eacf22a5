"""The states of a step in PyTorch. What users see of them is in test_steps.py."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("horovod.torch")  # horovod_compress.torch needs it

from horovod_compress.session.step_lifecycle import REFUSALS, TRANSITIONS, Event, Lifecycle, State


def in_state(state):
    step = Lifecycle()
    step.state = state
    return step


@pytest.mark.parametrize("state", [state for state in State if state is not State.FAILED])
def test_a_step_can_be_rolled_back_and_can_fail_from_everywhere(state):
    step = in_state(state)
    step.take(Event.ROLLBACK)
    assert step.state is State.IDLE
    step = in_state(state)
    step.fail("a reason")
    assert step.state is State.FAILED
    error = step.failure()
    assert "load the last saved states" in str(error) and step.state is State.IDLE


def test_a_step_fails_for_the_first_reason():
    step = in_state(State.EXCHANGING)
    step.fail("one")
    step.fail("another")
    assert str(step.failure()).startswith("one. The step was given up.")
    # Another error was raised then.
    step.fail(None)
    step.fail("another")
    assert step.failure() is None and step.state is State.IDLE


@pytest.mark.parametrize(("state", "event"), REFUSALS)
def test_what_is_refused_leaves_the_step_where_it_is(state, event):
    step = in_state(state)
    assert event not in TRANSITIONS[state]
    with pytest.raises(RuntimeError, match="synchronize") as refused:
        step.take(event)
    assert str(refused.value) == REFUSALS[state, event] and step.state is state


def test_results_that_come_before_a_closure_are_unused_after_one_that_brings_none():
    step = Lifecycle()
    for event in (Event.BEGIN, Event.ARRIVE):
        assert step.take(event)
    with step.closure():
        assert step.is_unused
        with pytest.raises(RuntimeError, match="at the step's beginning"):
            step.take(Event.COMMIT)
    assert step.state is State.UNUSED and step.take(Event.STEP) and not step.take(Event.STEP)
    assert step.take(Event.STEP_ENDED) and step.state is State.IDLE
