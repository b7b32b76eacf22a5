"""What Horovod's ranks negotiate in a step, as its log says: what its response cache does not
answer."""

import re

import pytest
from jobs import LAUNCHERS, launch

pytestmark = pytest.mark.extended
_FRAMEWORKS = {"cases": "horovod.torch", "tensorflow_cases": "horovod.tensorflow"}


@pytest.mark.parametrize(
    "cases, at_first",
    [
        (
            "cases",
            {"gathers_with_steps_that_are_told": 1, "splits_with_steps_that_are_told": 2},
        ),
        ("tensorflow_cases", {"gathers_with_steps_that_are_told": 1}),
    ],
    ids=["torch", "tensorflow"],
)
def test_nothing_is_negotiated_once_frames_keep_their_lengths(tmp_path, cases, at_first):
    """ResNet-50's first 40 tensors, of which 14 are gathered, as one group, which is one message.
    What a rank sends to rank 0 in a step is what it negotiates."""
    pytest.importorskip(_FRAMEWORKS[cases])
    outcome = launch(
        tmp_path,
        LAUNCHERS["horovodrun-gloo"],
        2,
        list(at_first),
        cases=cases,
        environment={"HOROVOD_LOG_LEVEL": "trace"},
    )
    for case in at_first:
        outcome.assert_passed(case)
    # For each step, and for what comes before the first and after the last of a case.
    negotiated = [0]
    for sent, step in re.findall(
        r"\[1\]: Sent (\d+) messages|step (\d+) of rank 1", outcome.printed
    ):
        if step:
            negotiated.append(0)
        else:
            negotiated[-1] += int(sent)
    assert len(negotiated) == 30 * len(at_first) + 1
    for begin, most in zip(range(0, len(negotiated), 30), at_first.values()):
        steps = negotiated[begin : begin + 30]
        assert most // 2 <= max(steps[1:5]) <= most, steps
        assert max(steps[20:]) <= 4, steps
        assert sum(steps[20:]) <= 10, steps
