"""What Horovod's ranks negotiate in a step, as its log says: what its response cache does not
answer."""

import re

import pytest
from jobs import LAUNCHERS, launch

pytestmark = pytest.mark.extended
_FRAMEWORKS = {"cases": "horovod.torch", "tensorflow_cases": "horovod.tensorflow"}


@pytest.mark.parametrize(
    "cases, case, at_first",
    [
        ("cases", "gathers_with_steps_that_are_told", 14),
        ("cases", "splits_with_steps_that_are_told", 2),
        ("tensorflow_cases", "gathers_with_steps_that_are_told", 14),
    ],
)
def test_nothing_is_negotiated_once_frames_keep_their_lengths(tmp_path, cases, case, at_first):
    """ResNet-50's first 40 tensors, of which 14 are gathered. What a rank sends to rank 0 in a step
    is what it negotiates."""
    pytest.importorskip(_FRAMEWORKS[cases])
    outcome = launch(
        tmp_path,
        LAUNCHERS["horovodrun-gloo"],
        2,
        [case],
        cases=cases,
        environment={"HOROVOD_LOG_LEVEL": "trace"},
    )
    outcome.assert_passed(case)
    negotiated = [0]
    for sent, step in re.findall(
        r"\[1\]: Sent (\d+) messages|step (\d+) of rank 1", outcome.printed
    ):
        if step:
            negotiated.append(0)
        else:
            negotiated[-1] += int(sent)
    assert len(negotiated) == 31
    assert at_first // 2 <= max(negotiated[1:5]) <= at_first, negotiated
    assert max(negotiated[20:30]) <= 4, negotiated
    assert sum(negotiated[20:30]) <= 10, negotiated
