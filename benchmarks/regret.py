#!/usr/bin/env python3
"""What `hvdc.Compression.auto()` costs beside the best of its candidates, at the gradient shapes of
known networks, on two hosts.

    .venv/bin/python benchmarks/regret.py [CANDIDATE ...] [--models resnet50 ...]
        [--rates 100mbit 1gbit 10gbit none] [--rounds 30] [--alike SPEC]

Needs root (see two_hosts.py). In each cell, a model on a link, one job of 2 ranks trains with
auto() until it has chosen. Then blocks of three steps take turns, round after round, in an order
drawn anew for each: of the chosen candidate, and of all that took less than twice as long while
they were tried. All are steps of the one optimizer that auto() serves, which is switched at the
beginning of each block: two optimizers that do the very same differ by up to a tenth, for one job's
length (--alike shows it). A block's time is that of its last two steps. Ratios are medians over
rounds of what is in one round, so that a slow minute does not count. The regret is the largest
ratio of the chosen candidate's blocks to another's, and 1 where that is less. Backward only writes
the gradients, as in step_time.py. Prints a table in Markdown; --points writes the figures as
docs/results/data/README.md describes them.
"""

import argparse
import itertools
import json
import pathlib
import random
import statistics
import sys
import time

import points
from step_time import shapes_of
from two_hosts import LAUNCHERS, Hosts, link_rate

# Of a block; the first is not counted, because it makes buffers and sends what was held back.
STEPS = 3
# Steps of each, before those that do the same are measured.
WARM = 20
# Times the chosen one's steps: such a candidate has no blocks.
FAR = 2.0


# -- what every rank does


class Job:
    """The steps of a model whose backward pass writes given gradients."""

    def __init__(self, hvd, torch, model, gradients, compression):
        self._hvd, self._torch, self._model, self._gradients = hvd, torch, model, gradients
        sgd = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, weight_decay=1e-4)
        self.optimizer = hvd.DistributedOptimizer(
            sgd, named_parameters=model.named, compression=compression
        )

    def step(self):
        """Seconds of a step, of the slowest rank."""
        loss = self._model(self._gradients)
        self._hvd.barrier()
        started = time.perf_counter()
        loss.backward()
        self.optimizer.step()
        seconds = self._torch.tensor(time.perf_counter() - started)
        return self._hvd.allreduce(seconds, op=self._hvd.Max, name="seconds").item()


def blocks(begin, rounds):
    """{name: seconds of a step in each of its blocks}. begin: {name: function that begins a block
    and returns the Job to step}."""
    measured, order = {name: [] for name in begin}, random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(begin), len(begin)):
            job = begin[name]()
            measured[name].append(statistics.mean([job.step() for _ in range(STEPS)][1:]))
    return measured


def blocks_of_candidates(new_job, compression_of, compression, rounds):
    """Trains with auto() until it has chosen, which shows in the step after those that were tried,
    and measures what it has chosen beside what it has not."""
    job, steps = new_job(compression), 0
    while steps == 0 or compression_of(job.optimizer).plan["spec"] is None:
        job.step()
        steps += 1
    auto = compression_of(job.optimizer)
    plan = auto.plan
    tried = {spec: its["seconds"] for spec, its in plan["candidates"].items() if its["seconds"]}

    def begin(spec):
        auto.switch(spec)
        return job

    near = [spec for spec, seconds in tried.items() if seconds < FAR * tried[plan["spec"]]]
    return {
        "steps": steps - 1,
        "plan": plan,
        "measured": blocks({spec: lambda spec=spec: begin(spec) for spec in near}, rounds),
    }


def blocks_of_alike(new_job, compression, rounds):
    """Measures three optimizers with the same compression."""
    jobs = [new_job(compression) for _ in range(3)]
    for job in jobs * WARM:
        job.step()
    return {"measured": blocks({str(i): lambda job=job: job for i, job in enumerate(jobs)}, rounds)}


def worker(options):
    import horovod.torch as hvd
    import torch
    from told import Model, tensors

    import horovod_compress.torch as hvdc
    from horovod_compress.tools.gradients import random_gradients

    hvd.init()
    torch.set_num_threads(1)
    shapes = shapes_of(options.models[0])
    gradients = tensors(random_gradients(shapes, hvd.rank()))[0]

    def new_job(compression):
        return Job(hvd, torch, Model(shapes), gradients, compression)

    if options.alike:
        found = blocks_of_alike(new_job, hvdc.Compression.from_spec(options.alike), options.rounds)
    else:
        auto = hvdc.Compression.auto(candidates=options.candidates or None)
        found = blocks_of_candidates(new_job, hvdc.compression_of, auto, options.rounds)
    if hvd.rank() == 0:
        pathlib.Path(options.worker).write_text(json.dumps(found))


# -- the driver


def median_ratio(seconds, others):
    return statistics.median(its / other for its, other in zip(seconds, others))


def regret(found):
    """The chosen candidate's time over the best one's."""
    measured = found["measured"]
    return max(
        median_ratio(measured[found["plan"]["spec"]], seconds) for seconds in measured.values()
    )


def differences(found):
    """The ratios of optimizers that do the same, each over those made before it."""
    return [
        median_ratio(later, earlier)
        for earlier, later in itertools.combinations(found["measured"].values(), 2)
    ]


def predicted(found):
    """What candidates took while they were tried, over what they took in blocks."""
    tried = {spec: its["seconds"] for spec, its in found["plan"]["candidates"].items()}
    return [tried[spec] / statistics.median(seconds) for spec, seconds in found["measured"].items()]


def table(cells):
    lines = [
        "| model | link | chosen | steps tried | regret | ms a step | others |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    for (model, rate), found in cells.items():
        chosen = found["plan"]["spec"]
        # Of those without blocks.
        seconds = {spec: its["seconds"] for spec, its in found["plan"]["candidates"].items()}
        seconds.update((spec, statistics.median(each)) for spec, each in found["measured"].items())
        others = ", ".join(
            f"{spec} {1e3 * each:.0f}" for spec, each in seconds.items() if spec != chosen
        )
        row = [
            model,
            rate,
            chosen,
            found["steps"],
            f"{regret(found):.3f}",
            f"{1e3 * seconds[chosen]:.0f}",
            others,
        ]
        lines.append(f"| {' | '.join(map(str, row))} |")
    regrets = [regret(found) for found in cells.values()]
    all_predicted = [ratio for found in cells.values() for ratio in predicted(found)]
    within = sum(0.75 <= ratio <= 1.25 for ratio in all_predicted)
    lines.append(f"\nregret: median {statistics.median(regrets):.3f}, most {max(regrets):.3f}")
    lines.append(
        f"a candidate's time while it was tried is within 25 % of that in its blocks {within} "
        f"times of {len(all_predicted)}"
    )
    return "\n".join(lines)


def table_of_alike(cells):
    lines = [
        "| model | link | ms a step | second over first | third over first | third over second |",
        "|---|---|---|---:|---:|---:|",
    ]
    for (model, rate), found in cells.items():
        medians = ", ".join(
            f"{1e3 * statistics.median(seconds):.0f}" for seconds in found["measured"].values()
        )
        lines.append(
            f"| {model} | {rate} | {medians} | "
            f"{' | '.join(f'{ratio:.3f}' for ratio in differences(found))} |"
        )
    return "\n".join(lines)


UNITS = {
    "trial": "steps",
    "regret": "chosen over best",
    "tried": "ms, while it was tried",
    "step": "ms, of all blocks",
}


def measured(cells, alike):
    """The points of all cells: a cell's choice, and of each candidate its trial and its blocks."""
    for (model, link), found in cells.items():
        at, tried = {"model": model, "link": link}, {}
        if not alike:
            plan = found["plan"]
            tried = {spec: its["seconds"] for spec, its in plan["candidates"].items()}
            cost = round(regret(found), 3)
            yield at, {"chosen": plan["spec"], "trial": found["steps"], "regret": cost}
        for spec in {**tried, **found["measured"]}:
            blocks = found["measured"].get(spec)
            yield (
                {**at, "run": spec},
                {
                    "tried": round(1e3 * tried[spec], 1) if spec in tried else None,
                    "step": blocks and [round(1e3 * each, 1) for each in blocks],
                },
            )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "candidates",
        nargs="*",
        metavar="CANDIDATE",
        help="specs, the dense one first (default: those of auto())",
    )
    parser.add_argument("--models", nargs="+", default=["resnet50", "lstm", "thousand", "bert"])
    rates = ["100mbit", "1gbit", "10gbit", "none"]
    parser.add_argument(
        "--rates",
        type=link_rate,
        nargs="+",
        default=rates,
        help="of the link; none: as fast as it goes",
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="blocks of each candidate (default: 30)"
    )
    parser.add_argument(
        "--alike",
        metavar="SPEC",
        help="measure three optimizers that all have this compression, in place of auto()",
    )
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, default="gloo", help="what Horovod runs on (default: gloo)"
    )
    parser.add_argument("--points", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    cells = {}
    for rate in options.rates:
        with Hosts(rate) as hosts:
            for model in options.models:
                given = [
                    "--models",
                    model,
                    "--rounds",
                    options.rounds,
                    *(["--alike", options.alike] if options.alike else []),
                ]
                found = hosts.measure(
                    options.launcher, 2, __file__, [*given, "--", *options.candidates]
                )
                cells[model, points.LINKS.get(rate, rate)] = found
                print(f"{model}, {rate}: measured", file=sys.stderr, flush=True)
    print((table_of_alike if options.alike else table)(cells))
    if options.points:
        points.write(options.points, UNITS, measured(cells, bool(options.alike)))


if __name__ == "__main__":
    main()
