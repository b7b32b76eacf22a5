#!/usr/bin/env python3
"""What `hvdc.Compression.auto()` costs beside the best of its candidates, at the gradient shapes of known networks, on two hosts.

    .venv/bin/python benchmarks/regret.py [--models resnet50 ...] [--rates 100mbit 1gbit 10gbit none] [--blocks 10] [CANDIDATE ...]

Needs root (see two_hosts.py). In each cell, a model on a link, one job of 2 ranks trains with auto() until it has chosen, and then takes blocks of
steps with each candidate and with what was chosen, in turn, each round beginning with another. The regret is the chosen one's time over that of the
best candidate, medians over blocks. Backward only writes the gradients, as in step_time.py. Prints a table in Markdown; --json writes all figures.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

from step_time import backward_of, shapes_of
from two_hosts import LAUNCHERS, TwoHosts

CHOSEN = "auto"
LEAST, MOST, SECONDS = 2, 6, 3  # steps of a block: at least, at most, and for about how long
FAR = 2.0  # times the shortest of the first round: such a candidate has no block in other rounds, of which it cannot be the best


# -- what every rank does -------------------------------------------------------------------------------------------------


class Job:
    """A model whose backward pass writes given gradients, and its steps."""

    def __init__(self, hvd, torch, shapes, gradients, compression):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes.values()])
        self._hvd, self._torch, self._apply = hvd, torch, backward_of(torch)
        self._named, self._gradients = list(zip(shapes, model)), gradients
        sgd = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(sgd, named_parameters=self._named, compression=compression)
        for param in model:
            param.grad = torch.zeros_like(param)

    def step(self):
        """Seconds of a step, of the slowest rank."""
        for _, param in self._named:
            param.grad.zero_()
        loss = sum(self._apply(param, self._gradients[name]) for name, param in self._named)
        self._hvd.barrier()
        started = time.perf_counter()
        loss.backward()
        self.optimizer.step()
        seconds = self._torch.tensor(time.perf_counter() - started)
        return self._hvd.allreduce(seconds, op=self._hvd.Max, name="seconds").item()


def worker(options):
    import horovod.torch as hvd
    import torch

    import horovod_compress.torch as hvdc
    from horovod_compress.bench import random_gradients

    hvd.init()
    torch.set_num_threads(1)
    shapes = shapes_of(options.models[0])
    gradients = {name: torch.from_numpy(array) for name, array in random_gradients(shapes, hvd.rank())[0].items()}
    job = Job(hvd, torch, shapes, gradients, hvdc.Compression.auto(candidates=options.candidates or None))
    steps = 0
    while steps == 0 or hvdc.compression_of(job.optimizer).plan["spec"] is None:
        job.step()
        steps += 1
    plan = hvdc.compression_of(job.optimizer).plan
    job = Job(hvd, torch, shapes, gradients, hvdc.Compression.from_spec("none"))
    compression = hvdc.compression_of(job.optimizer)
    measured = {spec: [] for spec in [*plan["candidates"], CHOSEN]}
    turns = list(measured)
    for _ in range(options.blocks):
        for spec in list(turns):
            compression.switch(plan["spec"] if spec == CHOSEN else spec)
            job.step()  # makes buffers, and sends what was held back
            first = job.step()
            others = [job.step() for _ in range(max(LEAST, min(MOST, int(SECONDS / first))) - 1)]
            measured[spec].append(statistics.median([first, *others]))
        best = min(medians[0] for medians in measured.values())
        turns = [spec for spec in [*turns[1:], turns[0]] if measured[spec][0] < FAR * best or spec == CHOSEN]
    if hvd.rank() == 0:
        pathlib.Path(options.worker).write_text(json.dumps({"steps": steps, "plan": plan, "measured": measured}))


# -- the driver -------------------------------------------------------------------------------------------------------------


def summary(found):
    """(regret, {spec: predicted over measured}) of a cell."""
    measured = found["measured"]
    medians = {spec: statistics.median(each) for spec, each in measured.items()}
    regret = medians.pop(CHOSEN) / min(medians.values())
    tried = {spec: its["seconds"] for spec, its in found["plan"]["candidates"].items() if its["steps"] > 1}
    return regret, {spec: seconds / medians[spec] for spec, seconds in tried.items()}


def table(cells):
    lines = ["| model | link | chosen | regret | steps tried | ms a step | ms of the others |", "|---|---|---|---:|---:|---:|---|"]
    for (model, rate), found in cells.items():
        medians = {spec: 1e3 * statistics.median(each) for spec, each in found["measured"].items()}
        others = ", ".join(f"{spec} {ms:.1f}" for spec, ms in medians.items() if spec != CHOSEN)
        lines.append(
            f"| {model} | {rate} | {found['plan']['spec']} | {summary(found)[0]:.3f} | {found['steps']} | {medians[CHOSEN]:.1f} | {others} |"
        )
    regrets = [summary(found)[0] for found in cells.values()]
    ratios = [ratio for found in cells.values() for ratio in summary(found)[1].values()]
    within = sum(0.75 <= ratio <= 1.25 for ratio in ratios)
    lines.append(f"\nregret: median {statistics.median(regrets):.3f}, most {max(regrets):.3f}")
    lines.append(f"a candidate's time while it was tried is within 25 % of that in its blocks {within} times of {len(ratios)}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("candidates", nargs="*", metavar="CANDIDATE", help="specs, the dense one first (default: those of auto())")
    parser.add_argument("--models", nargs="+", default=["resnet50", "lstm", "thousand", "bert"])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit", "none"], help="of the link; none: as fast as it goes")
    parser.add_argument("--blocks", type=int, default=10, help="of each candidate (default: 10)")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="gloo", help="what Horovod runs on (default: gloo)")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    cells = {}
    for rate in options.rates:
        with TwoHosts(None if rate == "none" else rate) as hosts:
            for model in options.models:
                given = ["--models", model, "--blocks", options.blocks, "--", *options.candidates]
                found = cells[model, "unshaped" if rate == "none" else rate] = hosts.measure(options.launcher, 2, __file__, given)
                print(f"{model}, {rate}: {found['plan']['spec']}, regret {summary(found)[0]:.3f}", file=sys.stderr, flush=True)
    print(table(cells))
    if options.json:
        options.json.write_text(json.dumps([{"model": model, "link": rate, **found} for (model, rate), found in cells.items()], indent=1))


if __name__ == "__main__":
    main()
