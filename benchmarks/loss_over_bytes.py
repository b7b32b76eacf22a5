#!/usr/bin/env python3
"""Where a small transformer ends over the bytes that a rank sends: none, the recommended
compression, and recipes that were published, each at its own best learning rate.

    .venv/bin/python benchmarks/loss_over_bytes.py [--ranks 4] [--workers 2] [--seconds 3600]
        [--device cuda] [--steps 1500] [--out FILE]

Every run is trained at each rate of a grid with seed 0. A grid whose best rate is its lowest or
highest goes on by another factor of two, up to five rates. The best rate is then trained with
further seeds. Workers are processes that train one run at a time; they take the most valuable that
is left. After so many seconds all end. Without --steps each worker first times some, and the number
of steps is such that three seeds take four fifths of the time. Each run is a line of FILE, by
default loss_over_bytes.jsonl, as of convergence.py, with the rate beside; those that are there
already are not run again.
"""

import argparse
import heapq
import json
import math
import multiprocessing
import multiprocessing.connection
import pathlib
import sys
import time
import traceback
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from convergence import train

TASK = "decoder"
ADAM = (0.002, 0.004, 0.008)
# Steps by signs are as large as Adam's largest.
SIGNS = (0.0005, 0.001, 0.002)
MOST_RATES = 5
# Steps that are timed, and by which the number of steps is divisible: by all numbers of local ones,
# at each measurement.
TIMED, MULTIPLE = 40, 300
# The share of the time in which three seeds are to be done, and seeds at most.
SHARE, SEEDS = 0.8, 5

OURS = "adacomp:bin_length=64,dense=fp16"
SPARSELOCO = "topk:chunk=4096,k=64,values=2bit,decay=0.95,min_numel=0"
# All entries in two bits, with error feedback.
TWO_BITS = "topk:ratio=1,values=2bit,dense=fp16"
DILOCO = "updates:every={},outer=0.7+0.9"
# In order of value. {tenth}: of the steps.
RUNS = [
    "adam/none",
    f"adam/updates:every=4/{OURS}",
    "adam/alone/none",
    f"adam/updates:every=15/{OURS}",
    f"adam/updates:every=30/{OURS}",
    f"adam/updates:every=1/{OURS}",
    f"adam/updates:every=15/{SPARSELOCO}",
    f"adam/updates:every=30/{SPARSELOCO}",
    f"adam/{DILOCO.format(30)}/none",
    "signs/demo",
    "muon/none",
    f"muon/{DILOCO.format(30)}/{TWO_BITS}",
    f"muon/updates:every=4/{OURS}",
    f"adam/{DILOCO.format(30)}/{OURS}",
    "adam/dgc:ratio=0.001,warmup_steps={tenth}",
    f"adam/{OURS}",
    "adam/powersgd:rank=2",
    f"muon/updates:every=30/{OURS}",
    f"adam/{DILOCO.format(15)}/none",
    f"muon/{DILOCO.format(30)}/none",
    f"adam/{DILOCO.format(15)}/{OURS}",
    f"muon/updates:every=30/{SPARSELOCO}",
    "adam/fp16",
]


def at(run: str, rate: float) -> str:
    """A RUN at this rate."""
    return run.replace("/", f":lr={rate:g}/", 1)


def grid(run: str) -> List[float]:
    return list(SIGNS if run.startswith("signs/") else ADAM)


def kind(run: str) -> str:
    """Runs of a kind take about as long a step."""
    return ("muon " if run.startswith("muon/") else "") + (
        "updates" if "/updates:every=" in run and "every=1/" not in run else "gradients"
    )


class Job(NamedTuple):
    """stage: jobs of a lower one come first; index: of the run."""

    stage: int
    index: int
    rate: float
    seed: int


class Plan:
    """The order of runs."""

    def __init__(self, runs: List[str], seeds: int) -> None:
        self.runs, self.seeds = runs, seeds
        self.grids = [grid(run) for run in runs]
        self.ends: List[Dict[float, float]] = [{} for _ in runs]  # of seed 0, by rate
        self.waiting = [
            Job(0, index, rate, 0) for index, rates in enumerate(self.grids) for rate in rates
        ]
        heapq.heapify(self.waiting)

    def next(self) -> Optional[Job]:
        return heapq.heappop(self.waiting) if self.waiting else None

    def ended(self, job: Job, loss: float) -> None:
        """Goes on from a run's loss."""
        if job.seed:
            return
        rates, ends = self.grids[job.index], self.ends[job.index]
        ends[job.rate] = loss if math.isfinite(loss) else math.inf
        if len(ends) < len(rates):
            return
        best = min(ends, key=lambda rate: ends[rate])
        further = {min(rates): best / 2, max(rates): best * 2}.get(best)
        if further and len(rates) < MOST_RATES:
            rates.append(further)
            heapq.heappush(self.waiting, Job(1, job.index, further, 0))
            return
        for seed in range(1, self.seeds):
            heapq.heappush(self.waiting, Job(1 + seed, job.index, best, seed))


def work(connection: Any, ranks: int, device: str) -> None:
    """A worker: trains what it is told, (run, seed, steps)."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    while True:
        run, seed, steps = connection.recv()
        started = time.time()
        try:
            row = train(TASK, run, seed, ranks, False, steps, device=device)
            connection.send({**row, "wall": time.time() - started})
        except Exception:
            connection.send({"failed": f"{run}, seed {seed}: {traceback.format_exc()}"})


class Workers:
    """Processes, each with a job or none."""

    def __init__(self, count: int, ranks: int, device: str) -> None:
        self.context, self.arguments = multiprocessing.get_context("spawn"), (ranks, device)
        self.processes: Dict[Any, Any] = {}
        self.jobs: Dict[Any, Any] = {}
        for _ in range(count):
            self._start()

    def _start(self) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=work, args=(theirs, *self.arguments), daemon=True)
        process.start()
        theirs.close()
        self.processes[ours], self.jobs[ours] = process, None

    def idle(self) -> List[Any]:
        return [connection for connection, job in self.jobs.items() if job is None]

    def start(self, connection: Any, job: Any, run: str, seed: int, steps: int) -> None:
        self.jobs[connection] = job
        connection.send((run, seed, steps))

    def finished(self, deadline: float) -> List[Any]:
        """(job, row) of those that end next, none after the deadline; a worker that died is
        replaced."""
        found = []
        left = max(deadline - time.time(), 0)
        for connection in multiprocessing.connection.wait(list(self.jobs), left):
            job = self.jobs[connection]
            try:
                found.append((job, connection.recv()))
                self.jobs[connection] = None
            except (EOFError, ConnectionError):
                code = self.processes.pop(connection).exitcode
                del self.jobs[connection]
                found.append((job, {"failed": f"{job}: a worker died, {code}"}))
                self._start()
        return found

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()


def timed(workers: Workers, runs: List[str], deadline: float) -> Dict[str, float]:
    """{kind: seconds of a step}, with all workers at work. Each first warms up."""
    kinds = sorted({kind(run) for run in runs})
    examples = [next(run for run in runs if kind(run) == each) for each in kinds]
    found: Dict[str, List[float]] = {each: [] for each in kinds}
    for steps in (5, TIMED):
        begun = workers.idle()
        for number, connection in enumerate(begun):
            run = examples[number % len(examples)]
            workers.start(connection, run, at(run, grid(run)[0]), 0, steps)
        for _ in begun:
            for run, row in workers.finished(deadline):
                if "failed" in row:
                    raise RuntimeError(row["failed"])
                if steps == TIMED:
                    found[kind(run)].append(row["wall"] / steps)
            if not any(workers.jobs.values()):
                break
    means = {each: sum(its) / len(its) for each, its in found.items() if its}
    return {each: means.get(each, max(means.values())) for each in kinds}


def steps_for(times: Dict[str, float], runs: List[str], workers: int, seconds: float) -> int:
    """How many steps leave time for three seeds of all runs, and a further rate of every third."""
    step = sum((len(grid(run)) + 2 + 1 / 3) * times[kind(run)] for run in runs)
    steps = SHARE * seconds * workers / step
    return int(min(max(steps // MULTIPLE, 2), 15)) * MULTIPLE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", type=int, help="so many runs, the first of all")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("loss_over_bytes.jsonl"))
    options = parser.parse_args()
    deadline = time.time() + options.seconds
    runs = RUNS[: options.only]
    if not hasattr(torch.optim, "Muon"):
        runs = [run for run in runs if not run.startswith("muon/")]
    workers = Workers(options.workers, options.ranks, options.device)
    steps = options.steps
    if not steps:
        times = timed(workers, runs, deadline)
        steps = steps_for(times, runs, options.workers, deadline - time.time())
        print("ms a step:", {each: round(1000 * its, 1) for each, its in times.items()})
    print(f"{steps} steps, {deadline - time.time():.0f} s left", flush=True)
    go_on(workers, Plan(runs, SEEDS), steps, options, deadline)
    workers.end()


def go_on(workers: Workers, plan: Plan, steps: int, options: Any, deadline: float) -> None:
    """Trains what the plan says until the deadline."""
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    known = {
        (row["run"], row["ranks"], row["steps"], row["seed"]): row for row in map(json.loads, lines)
    }
    with options.out.open("a") as file:
        while time.time() < deadline:
            for connection in workers.idle():
                job = plan.next()
                while job:
                    run = at(plan.runs[job.index].format(tenth=steps // 10), job.rate)
                    row = known.get((run, options.ranks, steps, job.seed))
                    if not row:
                        workers.start(connection, job, run, job.seed, steps)
                        break
                    plan.ended(job, row["measured"][-1][1])
                    job = plan.next()
            if len(workers.idle()) == len(workers.jobs):
                return
            for job, row in workers.finished(deadline):
                if "failed" in row:
                    print(row["failed"], file=sys.stderr, flush=True)
                    plan.ended(job, math.inf)
                    continue
                row = {**row, "rate": job.rate, "device": options.device}
                file.write(json.dumps(row) + "\n")
                file.flush()
                plan.ended(job, row["measured"][-1][1])


if __name__ == "__main__":
    main()
