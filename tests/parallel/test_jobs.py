"""Jobs of ranks themselves: what is said of a case that hangs, fails or crashes, and of those after
it."""

import pathlib
import shutil
import time

import pytest
from jobs import ENVIRONMENT, LAUNCHERS, LIMIT, launch

LAUNCHERS_HERE = [
    name
    for name in ("mpirun", "horovodrun-gloo")
    if shutil.which(name.split("-")[0], path=ENVIRONMENT["PATH"])
]

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not LAUNCHERS_HERE, reason="needs mpirun or horovodrun"),
]


def stopped(folder, case, launcher):
    """The outcome of a job that a case stops; what is said of that case, and of the one after it.
    The one before it has passed."""
    job = launch(
        folder,
        LAUNCHERS[launcher],
        2,
        ["passes", case, "comes_after"],
        cases="stopping_cases",
        limit=5,
    )
    job.assert_passed("passes")
    said = []
    for name in (case, "comes_after"):
        with pytest.raises(pytest.fail.Exception) as failure:
            job.assert_passed(name)
        said.append(str(failure.value))
    return job, *said


def runs(folder):
    """Whether some process has the folder in its command line."""
    for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in process.read_bytes():
                return True
        except OSError:  # it has ended meanwhile
            pass
    return False


on_each_launcher = pytest.mark.parametrize("launcher", LAUNCHERS_HERE)


@on_each_launcher
def test_a_case_that_hangs_is_named_with_the_stacks_of_all_ranks(tmp_path, launcher):
    job, hung, after = stopped(tmp_path, "hangs_on_one_rank", launcher)
    assert hung.startswith(
        "hangs_on_one_rank did not end on rank 1 of 2. time ran out: no case began or ended for 5 s"
    )
    first, second = hung[hung.index("rank 0 has been in comes_after for ") :].split(
        "rank 1 has been in hangs_on_one_rank for "
    )
    for stack, caller in ((first, "comes_after"), (second, "hangs_on_one_rank")):
        assert "in wait_for_what_never_comes" in stack and f"in {caller}" in stack
    assert (
        after
        == "comes_after was not run, or not to its end: hangs_on_one_rank hung before it, in the "
        "same job"
    )
    with pytest.raises(
        pytest.fail.Exception,
        match="did not end on rank 1 of 2. time ran out(.|\n)*in wait_for_what_never_comes",
    ):
        job.assert_ended()
    # What was killed may take a moment to be gone.
    until = time.monotonic() + LIMIT
    while runs(tmp_path):
        assert time.monotonic() < until, "a rank was left behind"
        time.sleep(0.1)


@on_each_launcher
def test_a_case_that_fails_is_told_by_the_rank_that_it_failed_on(tmp_path, launcher):
    _, failed, after = stopped(tmp_path, "fails_on_one_rank", launcher)
    assert (
        failed.startswith("rank 1:\nTraceback")
        and "rank 1 is wrong" in failed
        and "rank 0:" not in failed
    )
    assert after.endswith("fails_on_one_rank failed before it, in the same job")


@on_each_launcher
def test_a_case_that_crashes_is_named_with_what_the_job_printed(tmp_path, launcher):
    _, crashed, after = stopped(tmp_path, "crashes", launcher)
    assert (
        crashed.startswith("crashes did not end on rank 0, 1 of 2: the job ended, with status ")
        and "; the job printed:" in crashed
    )
    assert after.endswith("crashes ended the job before it, in the same job")
