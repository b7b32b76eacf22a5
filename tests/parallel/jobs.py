"""Jobs of real ranks that run named cases, and what became of each case.

Only a job that hangs is ended: when none of its ranks has begun or ended a case for LIMIT seconds,
many times what the longest case needs.
"""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from run_cases import START

HERE = pathlib.Path(__file__).parent
LIMIT = 600

# horovodrun, but quicker.
HOROVODRUN = f"{sys.executable} {HERE / 'horovodrun.py'}"
# --bind-to none: Open MPI would pin every rank of a small machine to the same core.
LAUNCHERS = {
    "mpirun": "mpirun --allow-run-as-root --bind-to none --oversubscribe -np {size}",
    "horovodrun-gloo": f"{HOROVODRUN} --gloo -np {{size}}",
    "horovodrun-mpi": "horovodrun --mpi -np {size}",
}
# Horovod itself waits 30 s for ranks to start and to answer: on a busy machine imports alone may
# take that.
PATIENT = {"HOROVOD_START_TIMEOUT": str(LIMIT), "HOROVOD_GLOO_TIMEOUT_SECONDS": str(LIMIT)}
# Ranks share cores with other ranks: one that waits should leave its core to them.
YIELDS = {"OMPI_MCA_mpi_yield_when_idle": "1"}
ENVIRONMENT = {
    **os.environ,
    **PATIENT,
    **YIELDS,
    "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
}


class Job:
    """A job that runs the named cases of a file, here or on two hosts; a context, which ends it. It
    writes into `folder`."""

    def __init__(
        self, folder, launcher, size, names, hosts=None, cases="cases", environment=(), limit=LIMIT
    ):
        self.folder, self.size, self.names, self.limit = folder, size, tuple(names), limit
        ranks = launcher.format(size=size, half=size // 2).split()
        job = [*ranks, sys.executable, HERE / "run_cases.py", cases, folder / "results", *names]
        self._environment = {
            **(ENVIRONMENT if hosts is None else {**hosts.environment, **PATIENT}),
            **dict(environment),
        }
        self._command = job if hosts is None else hosts.command("a", job)

    def __enter__(self):
        with open(self.folder / "output", "w") as output:
            self.process = subprocess.Popen(
                self._command,
                cwd=HERE,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # A launcher may leave ranks behind, as on a host that was cut off.
        self._signal_ranks(signal.SIGKILL)
        self.process.wait()

    def outcome(self):
        """Waits until the job has ended or hangs."""
        seen, since, limit = None, time.monotonic(), LIMIT
        while self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
            ranks = self.ranks()
            if ranks != seen:
                seen, since = ranks, time.monotonic()
                limit = (
                    self.limit if all("ended" in rank.get(START, {}) for rank in ranks) else LIMIT
                )
            if time.monotonic() - since > limit:
                return Outcome(self, limit, self._stacks())
        return Outcome(self)

    def ranks(self):
        """For each rank: {case: what it has written of it}."""
        return [self._written_by(rank) for rank in range(self.size)]

    def printed(self):
        return (self.folder / "output").read_text(errors="replace")

    def _written_by(self, rank):
        file, cases = self.folder / f"results.{rank}", {}
        text = file.read_text() if file.exists() else ""
        for line in text[: text.rfind("\n") + 1].splitlines():  # whole lines
            result = json.loads(line)
            cases.setdefault(result["case"], {}).update(result)
        return cases

    def _signal_ranks(self, number):
        """Sends a signal to the ranks that are alive, and returns which those are."""
        alive = []
        for rank, cases in enumerate(self.ranks()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                pid = cases.get(START, {}).get("pid")
                if (
                    pid
                    and os.fsencode(self.folder)
                    in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
                ):
                    os.kill(pid, number)
                    alive.append(rank)
        return alive

    def _stacks(self):
        """{rank: the stacks of its threads}."""
        files = {
            rank: self.folder / f"results.{rank}.stacks"
            for rank in self._signal_ranks(signal.SIGUSR1)
        }
        until = time.monotonic() + 30
        while not all(file.stat().st_size for file in files.values()) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(1)  # for those that are being written
        return {rank: file.read_text() for rank, file in files.items()}


class Outcome:
    """What became of a job's cases. limit: the seconds after which it was ended, None where it
    ended by itself."""

    def __init__(self, job, limit=None, stacks=None):
        self.names, self.ranks, self.printed = job.names, job.ranks(), job.printed()
        self.status, self.limit, self._stacks, self._now = (
            job.process.poll(),
            limit,
            stacks,
            time.time(),
        )

    def passed(self, case):
        return all(self._ended(rank, case) and rank[case]["error"] is None for rank in self.ranks)

    def assert_ended(self):
        """By itself; otherwise, what the ranks were doing."""
        if self.limit is not None:
            pytest.fail(self._told_of_all(self.stopped_at()), pytrace=False)

    @staticmethod
    def _ended(rank, case):
        return "ended" in rank.get(case, {})

    def stopped_at(self):
        """The first case that did not pass on all ranks; None where all did."""
        return next((case for case in (START, *self.names) if not self.passed(case)), None)

    def assert_passed(self, case):
        """The first case that did not pass is told in full, with it all that the ranks have left;
        those after it name it."""
        stopped = self.stopped_at()
        told_at = {START: self.names[0], None: self.names[-1] if self.limit else None}.get(
            stopped, stopped
        )
        if case == told_at:
            pytest.fail(self._told(stopped), pytrace=False)
        if not self.passed(case):
            why = "failed" if self._errors(stopped) else "hung" if self.limit else "ended the job"
            pytest.fail(
                f"{case} was not run, or not to its end: {stopped} {why} before it, in the same "
                f"job",
                pytrace=False,
            )

    def _errors(self, case):
        return {
            number: rank[case]["error"]
            for number, rank in enumerate(self.ranks)
            if rank.get(case, {}).get("error")
        }

    def _told(self, case):
        errors = self._errors(case)
        if errors:
            return "\n".join(f"rank {rank}:\n{error}" for rank, error in errors.items())
        return self._told_of_all(case)

    def _told_of_all(self, case):
        printed = f"the job printed:\n{self.printed[-3000:]}"
        behind = [
            str(number)
            for number, rank in enumerate(self.ranks)
            if case and not self._ended(rank, case)
        ]
        where = "all cases passed, but the ranks did not end"
        if case:
            where = f"{case} did not end on rank {', '.join(behind)} of {len(self.ranks)}"
        if not self.limit:
            return f"{where}: the job ended, with status {self.status}; {printed}"
        stacks = [
            f"rank {rank} {self._doing(self.ranks[rank])}\n{stack}"
            for rank, stack in self._stacks.items()
        ]
        ended = f"time ran out: no case began or ended for {self.limit} s, and the job was ended"
        return "\n\n".join([f"{where}. {ended}", *stacks, printed])

    def _doing(self, rank):
        case, its = list(rank.items())[-1]
        if "ended" in its:
            return f"ended {case} {self._now - its['ended']:.0f} s ago"
        return f"has been in {case} for {self._now - its['began']:.0f} s"


def on_sizes(cases, promises, again, largest=8):
    """pytest's parameters of cases: a number of ranks and a case each, with its tier.

    Args:
        cases: {case: the numbers of ranks that it is for}.
        promises: those that everybody runs, on two ranks.
        again: {ranks: cases that show more there than on fewer}. Others run on more than two, or
            on more than they need, for a release only.
        largest: on more ranks nothing runs but for a release.
    """

    def tier(size, case):
        if size == 2 and case in promises:
            return ()
        shows_more = size <= max(2, min(cases[case])) or case in again.get(size, ())
        return pytest.mark.extended if shows_more and size <= largest else pytest.mark.release

    return [
        pytest.param(size, case, marks=tier(size, case))
        for size in sorted({size for sizes in cases.values() for size in sizes})
        for case, sizes in cases.items()
        if size in sizes
    ]


def launch(folder, launcher, size, names, **options):
    with Job(folder, launcher, size, names, **options) as job:
        return job.outcome()
