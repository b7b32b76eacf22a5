"""A rank that is killed, or ends. Other faults while training are cases of their own, in
cases/faults.py."""

import os
import signal
import time

import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

from jobs import LAUNCHERS, LIMIT, Job, launch
from run_cases import START
from test_ranks import needs_mpi

pytestmark = pytest.mark.extended
under_each_launcher = pytest.mark.parametrize(
    "launcher", ["horovodrun-gloo", pytest.param("mpirun", marks=needs_mpi)]
)


@under_each_launcher
def test_a_rank_that_is_killed_ends_the_job(tmp_path, launcher):
    """The launcher notices, and ends the other rank, which says at most what Horovod says."""
    with Job(tmp_path, LAUNCHERS[launcher], 2, ["trains_until_cut_off"]) as job:
        until = time.monotonic() + LIMIT
        while not all((tmp_path / f"results.{rank}.trains").exists() for rank in range(2)):
            assert time.monotonic() < until and job.process.poll() is None, job.printed()
            time.sleep(0.1)
        os.kill(job.ranks()[1][START]["pid"], signal.SIGKILL)
        outcome = job.outcome()
    outcome.assert_ended()
    assert outcome.status, outcome.printed
    error = outcome.ranks[0]["trains_until_cut_off"].get("error")
    assert error is None or "HorovodInternalError" in error, error


@under_each_launcher
def test_a_rank_that_ends_after_fewer_steps_ends_the_job(tmp_path, launcher):
    """With Horovod's own error on the other; the rank itself has none."""
    case = "ends_after_fewer_steps"
    outcome = launch(tmp_path, LAUNCHERS[launcher], 2, [case])
    outcome.assert_ended()
    assert outcome.status, outcome.printed
    errors = [rank[case]["error"] for rank in outcome.ranks]
    assert "Horovod has been shut down" in errors[0] and errors[1] is None, errors
