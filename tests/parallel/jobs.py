"""Jobs of real ranks that run named cases, and what they found."""
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

HERE = pathlib.Path(__file__).parent

# --bind-to none: Open MPI would pin every rank of a small machine to the same core.
LAUNCHERS = {
    "mpirun": "mpirun --allow-run-as-root --bind-to none --oversubscribe -np {size}",
    "horovodrun-gloo": "horovodrun --gloo -np {size}",
    "horovodrun-mpi": "horovodrun --mpi -np {size}",
}


@contextlib.contextmanager
def started(folder, launcher, size, names, hosts=None, cases="cases", environment=()):
    """A job that runs the named cases of a file, here or on two hosts; it writes their results to folder/results.RANK."""
    here = {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]), **dict(environment)}
    ranks = launcher.format(size=size, half=size // 2).split()
    job = [*ranks, sys.executable, HERE / "run_cases.py", cases, folder / "results", *names]
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(
            job if hosts is None else hosts.command("a", job),
            cwd=HERE, env=here if hosts is None else hosts.environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def launch(folder, launcher, size, names, timeout=240, **options):
    """{case: [result of each rank]} of one job, and what it printed."""
    with started(folder, launcher, size, names, **options) as job, contextlib.suppress(subprocess.TimeoutExpired):
        job.wait(timeout)
    return found_in(folder, size)


def found_in(folder, size):
    found = {}
    for rank in range(size):
        file = folder / f"results.{rank}"
        for line in file.read_text().splitlines() if file.exists() else []:
            result = json.loads(line)
            found.setdefault(result["case"], []).append(result)
    return found, (folder / "output").read_text()


def assert_passed(job, case, size):
    found, printed = job
    results = found.get(case, [])
    errors = [f"rank {rank}:\n{result['error']}" for rank, result in enumerate(results) if result["error"]]
    assert not errors, "\n".join(errors)
    assert len(results) == size, f"{case} ended on {len(results)} of {size} ranks; the job printed:\n{printed[-3000:]}"
