#!/usr/bin/env python3
"""Step time of decentralized training and of all ranks' exchanges, at a network's gradient shapes,
one rank on each of four hosts joined by a switch.

    .venv/bin/python benchmarks/decentralized_time.py [RUN ...] [--rates 100mbit 1gbit]
        [--late 200] [--delay 20]

A RUN is an exchange of gradients (floor: none at all, or a spec), or ALGORITHM/SPEC, which is
decentralized training on a ring. Needs root (see two_hosts.py). Backward only writes the gradients;
--late has the last rank wait for so many milliseconds before each. Nothing else brings the ranks
together. A row has the median step of the median rank and of the last. Prints Markdown.
"""

import argparse
import json
import statistics
import sys
import time

from step_time import SETTLED, backward_of, shapes_of
from two_hosts import Hosts, link_rate

from horovod_compress.tools.models import MODELS

DEFAULT = [
    "floor",
    "none",
    "dgc:ratio=0.001",
    "exact/none",
    "dcd/qsgd:bits=7,norm=max",
    "dcd/qsgd:bits=3,norm=max",
    "choco/topk:ratio=0.01",
]


def optimizer_of(run, named):
    import horovod.torch as hvd
    import torch

    import horovod_compress.torch as hvdc

    optimizer = torch.optim.SGD([param for _, param in named], lr=1e-6, momentum=0.9)
    algorithm, decentralized, spec = run.partition("/")
    if run == "floor":
        return optimizer
    if decentralized:
        return hvdc.DecentralizedOptimizer(
            optimizer, named, algorithm=algorithm, compression=spec, step=None
        )
    compression = hvdc.Compression.from_spec(run, optimizer, named_parameters=named)
    return hvd.DistributedOptimizer(optimizer, named, compression)


def worker(options):
    """One rank. Rank 0 writes {seconds: the median step of each rank} as JSON."""
    import horovod.torch as hvd
    import torch

    from horovod_compress.tools.gradients import random_gradients

    hvd.init()
    torch.set_num_threads(1)
    shapes = shapes_of(options.model)
    gradients = [
        {name: torch.from_numpy(array) for name, array in step.items()}
        for step in random_gradients(shapes, hvd.rank())
    ]
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape in shapes.items()]
    for _, param in named:
        param.grad = torch.zeros_like(param)
    optimizer, apply = optimizer_of(options.runs[0], named), backward_of(torch, 0)
    late = options.late / 1e3 if hvd.rank() == hvd.size() - 1 else 0
    ends = []
    for step in range(SETTLED + options.steps + 1):
        for _, param in named:
            param.grad.zero_()
        told = gradients[step % len(gradients)]
        loss = sum(apply(param, told[name]) for name, param in named)
        time.sleep(late)
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
    seconds = statistics.median(b - a for a, b in zip(ends[SETTLED:], ends[SETTLED + 1 :]))
    found = hvd.allgather_object(seconds)
    if hvd.rank() == 0:
        with open(options.worker, "w") as file:
            json.dump({"seconds": found}, file)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", default=DEFAULT, metavar="RUN")
    parser.add_argument("--model", choices=[*MODELS], default="mobilenetv2")
    parser.add_argument("--rates", type=link_rate, nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--late", type=float, default=0.0, help="milliseconds of the last rank")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds from host to host")
    parser.add_argument("--steps", type=int, default=10, help="measured (default: 10)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    given = ["--model", options.model, "--late", options.late, "--steps", options.steps]
    for rate in options.rates:
        print(
            f"\n{options.model}, {options.ranks} hosts, link {rate}, delay {options.delay:g} ms, "
            f"last rank {options.late:g} ms late\n"
        )
        print("| run | median rank, ms | last rank, ms |\n|---|---:|---:|", flush=True)
        with Hosts(rate, options.delay / 1e3, options.ranks) as hosts:
            for run in options.runs:
                found = hosts.measure("gloo", options.ranks, __file__, [*given, run])["seconds"]
                ms = [1e3 * statistics.median(found), 1e3 * found[-1]]
                print(f"| `{run}` | {ms[0]:.0f} | {ms[1]:.0f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
