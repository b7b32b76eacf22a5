#!/usr/bin/env python3
"""What `hvdc.Compression.auto()` costs beside the best of its candidates, at the gradient shapes of known networks, on two hosts.

    .venv/bin/python benchmarks/regret.py [--models resnet50 ...] [--rates 100mbit 1gbit 10gbit none] [--rounds 30] [CANDIDATE ...]

Needs root (see two_hosts.py). In each cell, a model on a link, one job of 2 ranks trains with auto() until it has chosen. Then blocks of three
steps take turns, round after round: of that optimizer, which auto() serves, and of another one, which is switched to each candidate that took
less than twice as long as the chosen one while it was tried. A block's time is that of its last two steps. Ratios are medians over rounds of what is
in one round, so that a slow minute does not count. The regret is the largest ratio of auto()'s blocks to a candidate's, the chosen one's own
included. Of the choice alone it is the same, for the mean of auto()'s block and the chosen one's, which are of the same compression. Backward only
writes the gradients, as in step_time.py. Prints a table in Markdown; --json writes all figures.
"""
import argparse
import json
import math
import pathlib
import statistics
import sys
import time

from step_time import backward_of, shapes_of
from two_hosts import LAUNCHERS, TwoHosts

AUTO = "auto"
STEPS = 3  # of a block; the first is not counted, because it makes buffers and sends what was held back
FAR = 2.0  # times the chosen one's steps: such a candidate has no blocks


# -- what every rank does -------------------------------------------------------------------------------------------------


class Job:
    """A model whose backward pass writes given gradients, and its steps."""

    def __init__(self, hvd, torch, shapes, gradients, compression):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(shape)) for shape in shapes.values()])
        self._hvd, self._torch, self._apply = hvd, torch, backward_of(torch)
        self._named, self._gradients = list(zip(shapes, model)), gradients
        sgd = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, weight_decay=1e-4)
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
    from horovod_compress import choice
    from horovod_compress.bench import random_gradients

    choice._CHANGED = math.inf  # It watches, but the other optimizer's blocks between its own are no reason to try again.
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
    plain = Job(hvd, torch, shapes, gradients, hvdc.Compression.from_spec(plan["spec"]))
    plain.step()
    compression = hvdc.compression_of(plain.optimizer)
    tried = {spec: its["seconds"] for spec, its in plan["candidates"].items() if its["seconds"]}
    turns = [AUTO, *(spec for spec, seconds in tried.items() if seconds < FAR * tried[plan["spec"]])]
    measured = {spec: [] for spec in turns}
    for _ in range(options.rounds):
        for spec in turns:
            if spec != AUTO:
                compression.switch(spec)
            taken = [(job if spec == AUTO else plain).step() for _ in range(STEPS)]
            measured[spec].append(statistics.mean(taken[1:]))
        turns = [*turns[1:], turns[0]]
    if hvd.rank() == 0:
        pathlib.Path(options.worker).write_text(json.dumps({"steps": steps, "plan": plan, "measured": measured}))


# -- the driver -------------------------------------------------------------------------------------------------------------


def median_ratio(seconds, others):
    return statistics.median(its / other for its, other in zip(seconds, others))


def regret(found):
    """auto()'s time over that of the best candidate."""
    return over_best(found, found["measured"][AUTO])


def of_choice(found):
    """The same for the chosen compression, whoever serves it."""
    measured = found["measured"]
    return over_best(found, list(map(statistics.mean, zip(measured[AUTO], measured[found["plan"]["spec"]]))))


def over_best(found, its):
    return max(median_ratio(its, seconds) for spec, seconds in found["measured"].items() if spec != AUTO)


def overhead(found):
    """auto()'s time over that of the compression that it has chosen, bound by itself."""
    return median_ratio(found["measured"][AUTO], found["measured"][found["plan"]["spec"]])


def predicted(found):
    """What candidates took while they were tried, over what they took in blocks."""
    tried = {spec: its["seconds"] for spec, its in found["plan"]["candidates"].items()}
    return [tried[spec] / statistics.median(seconds) for spec, seconds in found["measured"].items() if spec != AUTO]


def table(cells):
    lines = ["| model | link | chosen | steps tried | regret | of the choice | auto over the chosen itself | ms a step | others |"]
    lines.append("|---|---|---|---:|---:|---:|---:|---:|---|")
    for (model, rate), found in cells.items():
        chosen = found["plan"]["spec"]
        seconds = {spec: its["seconds"] for spec, its in found["plan"]["candidates"].items()}  # of those without blocks
        seconds.update((spec, statistics.median(each)) for spec, each in found["measured"].items())
        others = ", ".join(f"{spec} {1e3 * each:.0f}" for spec, each in seconds.items() if spec not in (AUTO, chosen))
        ratios = [f"{ratio(found):.3f}" for ratio in (regret, of_choice, overhead)]
        row = [model, rate, chosen, found["steps"], *ratios, f"{1e3 * seconds[AUTO]:.0f}", others]
        lines.append(f"| {' | '.join(map(str, row))} |")
    regrets, choices, overheads = ([ratio(found) for found in cells.values()] for ratio in (regret, of_choice, overhead))
    all_predicted = [ratio for found in cells.values() for ratio in predicted(found)]
    within = sum(0.75 <= ratio <= 1.25 for ratio in all_predicted)
    lines.append(f"\nregret: median {statistics.median(regrets):.3f}, most {max(regrets):.3f}")
    lines.append(f"of the choice: median {statistics.median(choices):.3f}, most {max(choices):.3f}")
    lines.append(f"auto over the chosen itself: {min(overheads):.3f} to {max(overheads):.3f}, median {statistics.median(overheads):.3f}")
    lines.append(f"a candidate's time while it was tried is within 25 % of that in its blocks {within} times of {len(all_predicted)}")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("candidates", nargs="*", metavar="CANDIDATE", help="specs, the dense one first (default: those of auto())")
    parser.add_argument("--models", nargs="+", default=["resnet50", "lstm", "thousand", "bert"])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit", "none"], help="of the link; none: as fast as it goes")
    parser.add_argument("--rounds", type=int, default=30, help="blocks of each candidate (default: 30)")
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
                given = ["--models", model, "--rounds", options.rounds, "--", *options.candidates]
                found = cells[model, "unshaped" if rate == "none" else rate] = hosts.measure(options.launcher, 2, __file__, given)
                print(f"{model}, {rate}: {found['plan']['spec']}, regret {regret(found):.3f}", file=sys.stderr, flush=True)
    print(table(cells))
    if options.json:
        options.json.write_text(json.dumps([{"model": model, "link": rate, **found} for (model, rate), found in cells.items()], indent=1))


if __name__ == "__main__":
    main()
