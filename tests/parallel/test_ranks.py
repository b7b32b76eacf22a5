"""Real ranks under mpirun and horovodrun. One job runs all cases meant for its size; each case is a test of its own here."""
import functools
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

import horovod.torch as hvd
from cases import CASES
from jobs import ENVIRONMENT, HERE, LAUNCHERS, LIMIT, launch

from horovod_compress import kernels

MPI = shutil.which("mpirun") is not None and hvd.mpi_built()
needs_mpi = pytest.mark.skipif(not MPI, reason="needs Open MPI, and Horovod built with it")

needs_native = pytest.mark.skipif(kernels.backend != "native", reason="needs native kernels, which were not built")

ACROSS_LAUNCHERS = ("replicas_identical_after_100_steps", "dense_limit", "not_finite_gradients_lose_nothing", "resume_is_bit_for_bit",
                    "an_alltoall_in_a_step", "ranks_without_data_answer_with_zeros")


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Runs a job when its first case is asked for, and keeps what it found."""

    @functools.lru_cache(maxsize=None)
    def job(launcher, size, names):
        return launch(tmp_path_factory.mktemp(f"{launcher}-{size}"), LAUNCHERS[launcher], size, names)

    return job


def names_for(size):
    return tuple(name for name, (sizes, _) in CASES.items() if size in sizes)


@needs_mpi
@pytest.mark.parametrize("size, case", [(size, case) for size in (1, 2, 3, 4, 8) for case in names_for(size)])
def test_under_mpirun(jobs, size, case):
    jobs("mpirun", size, names_for(size)).assert_passed(case)


@pytest.mark.parametrize("case", (*ACROSS_LAUNCHERS, "mpi_needs_mpi"))
def test_under_horovodrun_with_gloo(jobs, case):
    jobs("horovodrun-gloo", 2, (*ACROSS_LAUNCHERS, "mpi_needs_mpi")).assert_passed(case)


@needs_mpi
@pytest.mark.parametrize("case", ACROSS_LAUNCHERS)
def test_under_horovodrun_with_mpi(jobs, case):
    jobs("horovodrun-mpi", 2, ACROSS_LAUNCHERS).assert_passed(case)


def test_beside_four_busy_processes(tmp_path, busy):
    """`scripts/test --busy 4` runs all tests so."""
    with busy(4):
        job = launch(tmp_path, LAUNCHERS["mpirun" if MPI else "horovodrun-gloo"], 2, ACROSS_LAUNCHERS)
    for case in ACROSS_LAUNCHERS:
        job.assert_passed(case)


@pytest.mark.parametrize("launcher", ["horovodrun-gloo", pytest.param("horovodrun-mpi", marks=needs_mpi)])
@pytest.mark.parametrize("case", ["join_is_refused", "join_is_refused_with_sums"])
def test_join_is_a_clear_error(tmp_path, launcher, case):
    """In a job of its own, because the ranks are not in step afterwards."""
    launch(tmp_path, LAUNCHERS[launcher], 2, [case]).assert_passed(case)


@needs_native
@pytest.mark.parametrize("launcher", ["horovodrun-gloo", pytest.param("mpirun", marks=needs_mpi)])
def test_ranks_on_different_kernels(tmp_path, launcher):
    case = "ranks_on_different_kernels"
    launch(tmp_path, LAUNCHERS[launcher], 2, [case], environment={"REFERENCE_ON_RANK": "1"}).assert_passed(case)


@pytest.mark.parametrize("launcher", ["horovodrun-gloo", pytest.param("mpirun", marks=needs_mpi)])
def test_check_cluster(launcher):
    command = [*LAUNCHERS[launcher].format(size=2).split(), sys.executable, HERE.parent.parent / "scripts" / "check_cluster.py", "--million", "1"]
    job = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
    assert job.returncode == 0, job.stdout + job.stderr
    for line in ("transport horovod: 19 of 19", "transport mpi: 19 of 19")[: 2 if launcher == "mpirun" else 1]:
        assert line in job.stdout
    assert "waits least" in job.stdout or "no compression pays" in job.stdout
