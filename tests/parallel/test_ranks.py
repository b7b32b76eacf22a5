"""Real ranks under mpirun and horovodrun. One job runs all cases meant for its size; each case is a test of its own here."""
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

import horovod.torch as hvd  # noqa: E402
from cases import CASES  # noqa: E402

HERE = pathlib.Path(__file__).parent
MPI = shutil.which("mpirun") is not None and hvd.mpi_built()
needs_mpi = pytest.mark.skipif(not MPI, reason="needs Open MPI, and Horovod built with it")

# --bind-to none: Open MPI would pin every rank of a small machine to the same core.
LAUNCHERS = {
    "mpirun": "mpirun --allow-run-as-root --bind-to none --oversubscribe -np {size}",
    "horovodrun-gloo": "horovodrun --gloo -np {size}",
    "horovodrun-mpi": "horovodrun --mpi -np {size}",
}
ACROSS_LAUNCHERS = ("replicas_identical_after_100_steps", "dense_limit", "not_finite_gradients_lose_nothing", "resume_is_bit_for_bit")


def launch(folder, launcher, size, names, timeout=240):
    """{case: [result of each rank]} of one job, and what it printed."""
    results = folder / "results"
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    command = [*LAUNCHERS[launcher].format(size=size).split(), sys.executable, str(HERE / "run_cases.py"), str(results)]
    with open(folder / "output", "w+") as output:
        job = subprocess.Popen(
            [*command, *names], cwd=HERE, env={**os.environ, "PATH": path}, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            job.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        output.seek(0)
        printed = output.read()
    found = {}
    for rank in range(size):
        file = pathlib.Path(f"{results}.{rank}")
        for line in file.read_text().splitlines() if file.exists() else []:
            result = json.loads(line)
            found.setdefault(result["case"], []).append(result)
    return found, printed


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Runs a job when its first case is asked for, and keeps what it found."""

    @functools.lru_cache(maxsize=None)
    def job(launcher, size, names):
        return launch(tmp_path_factory.mktemp(f"{launcher}-{size}"), launcher, size, names)

    return job


def assert_passed(job, case, size):
    found, printed = job
    results = found.get(case, [])
    errors = [f"rank {rank}:\n{result['error']}" for rank, result in enumerate(results) if result["error"]]
    assert not errors, "\n".join(errors)
    assert len(results) == size, f"{case} ended on {len(results)} of {size} ranks; the job printed:\n{printed[-3000:]}"


def names_for(size):
    return tuple(name for name, (sizes, _) in CASES.items() if size in sizes)


@needs_mpi
@pytest.mark.parametrize("size, case", [(size, case) for size in (1, 2, 3, 4) for case in names_for(size)])
def test_under_mpirun(jobs, size, case):
    assert_passed(jobs("mpirun", size, names_for(size)), case, size)


@pytest.mark.parametrize("launcher", ["horovodrun-gloo", pytest.param("horovodrun-mpi", marks=needs_mpi)])
@pytest.mark.parametrize("case", ACROSS_LAUNCHERS)
def test_under_horovodrun(jobs, launcher, case):
    assert_passed(jobs(launcher, 2, ACROSS_LAUNCHERS), case, 2)


@pytest.mark.parametrize("launcher", ["horovodrun-gloo", pytest.param("horovodrun-mpi", marks=needs_mpi)])
@pytest.mark.parametrize("case", ["join_is_refused", "join_is_refused_with_sums"])
def test_join_is_a_clear_error(tmp_path, launcher, case):
    """In a job of its own, because the ranks are not in step afterwards."""
    assert_passed(launch(tmp_path, launcher, 2, [case], timeout=90), case, 2)
