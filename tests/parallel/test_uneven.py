"""Ranks with different numbers of steps. One job a launcher and size runs its cases; each case is a test of its own here."""
import functools

import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

from jobs import LAUNCHERS, launch
from test_ranks import needs_mpi
from uneven_cases import CASES

NAMES = {size: tuple(name for name, (sizes, _) in CASES.items() if size in sizes) for size in (1, 2, 3)}


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Runs a job when its first case is asked for, and keeps what it found."""

    @functools.lru_cache(maxsize=None)
    def job(launcher, size):
        return launch(tmp_path_factory.mktemp(f"{launcher}-{size}"), LAUNCHERS[launcher], size, NAMES[size], cases="uneven_cases")

    return job


@needs_mpi
@pytest.mark.parametrize("size, case", [(size, case) for size, cases in NAMES.items() for case in cases])
def test_under_mpirun(jobs, size, case):
    jobs("mpirun", size).assert_passed(case)


@pytest.mark.parametrize("case", NAMES[2])
def test_under_horovodrun_with_gloo(jobs, case):
    jobs("horovodrun-gloo", 2).assert_passed(case)
