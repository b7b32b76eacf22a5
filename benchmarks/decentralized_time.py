#!/usr/bin/env python3
"""Step time of decentralized training and of all ranks' exchanges, at a network's gradient shapes,
one rank on each of four hosts joined by a switch.

    .venv/bin/python benchmarks/decentralized_time.py [RUN ...] [--rates 100mbit 1gbit]
        [--late 200] [--delay 20]
    .venv/bin/python benchmarks/decentralized_time.py [RUN ...] [--rates 100mbit] --train 300

A RUN is an exchange of gradients (floor: none at all, or a spec), or ALGORITHM/SPEC, which is
decentralized training on a ring. Needs root (see two_hosts.py). Backward only writes the gradients;
--late has the last rank wait for so many milliseconds before each. Nothing else brings the ranks
together. A row has the median step of the median rank and of the last. --train trains the demo's
network on Fashion-MNIST for so many steps in place of that; a row has the accuracy of the mean
model, what a rank sends in a step, and the seconds of all steps. Prints Markdown.
"""

import argparse
import contextlib
import json
import statistics
import time

from decentralized import parsed
from step_time import SETTLED, shapes_of
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
# Of --train: images of all ranks in a step, and the highest learning rate.
BATCH, RATE = 128, 0.05


def optimizer_of(run, named):
    import horovod.torch as hvd
    import torch

    import horovod_compress.torch as hvdc

    optimizer = torch.optim.SGD([param for _, param in named], lr=1e-6, momentum=0.9)
    if run == "floor":
        return optimizer
    if "/" in run:
        algorithm, zeta, spec = parsed(run)
        return hvdc.DecentralizedOptimizer(
            optimizer, named, algorithm=algorithm, compression=spec, step=zeta
        )
    compression = hvdc.Compression.from_spec(run, optimizer, named_parameters=named)
    return hvd.DistributedOptimizer(optimizer, named, compression)


def timed(options):
    """{seconds: the median step of each rank}"""
    import horovod.torch as hvd
    from told import Model, tensors

    from horovod_compress.tools.gradients import random_gradients

    shapes = shapes_of(options.model)
    gradients, model = tensors(random_gradients(shapes, hvd.rank())), Model(shapes)
    optimizer = optimizer_of(options.runs[0], model.named)
    late = options.late / 1e3 if hvd.rank() == hvd.size() - 1 else 0
    ends = []
    for step in range(SETTLED + options.steps + 1):
        loss = model(gradients[step % len(gradients)])
        time.sleep(late)
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter())
    seconds = statistics.median(b - a for a, b in zip(ends[SETTLED:], ends[SETTLED + 1 :]))
    return {"seconds": hvd.allgather_object(seconds)}


def trained(options):
    """{seconds: of all steps; accuracy: of the mean model; megabytes: that a rank sends in a
    step}"""
    import horovod.torch as hvd
    import torch
    from demo_network import accuracy, network
    from tasks import fashion, steps_down

    import horovod_compress.torch as hvdc

    torch.manual_seed(0)
    model, data = network(28, width=26, strided=True), fashion(28)
    optimizer, (images, labels) = (
        optimizer_of(options.runs[0], [*model.named_parameters()]),
        data["train"],
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    batches = order[: options.train * BATCH].view(options.train, hvd.size(), -1)[:, hvd.rank()]
    hvd.barrier()
    began = time.perf_counter()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = RATE * steps_down(step / options.train)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    decentralized = isinstance(optimizer, hvdc.DecentralizedOptimizer)
    stats = optimizer.stats() if decentralized else optimizer._compression.stats()
    with optimizer.mean_parameters() if decentralized else contextlib.nullcontext():
        right = accuracy(model, *(part[hvd.rank() :: hvd.size()] for part in data["test"]))
    megabytes = stats["bytes_sent"] / options.train / 1e6
    return {"seconds": seconds, "accuracy": right, "megabytes": megabytes}


def worker(options):
    """One rank. Rank 0 writes what was found as JSON."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    found = trained(options) if options.train else timed(options)
    if hvd.rank() == 0:
        with open(options.worker, "w") as file:
            json.dump(found, file)


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
    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="train, in so many")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    given = ["--model", options.model, "--late", options.late, "--steps", options.steps]
    given += ["--train", options.train]
    for rate in options.rates:
        about = f"{options.ranks} hosts, link {rate}, delay {options.delay:g} ms"
        if options.train:
            print(f"\nThe demo's network, {options.train} steps of {BATCH} images, {about}\n")
            print("| run | accuracy, % | MB a step | seconds |\n|---|---:|---:|---:|", flush=True)
        else:
            print(f"\n{options.model}, {about}, last rank {options.late:g} ms late\n")
            print("| run | median rank, ms | last rank, ms |\n|---|---:|---:|", flush=True)
        with Hosts(rate, options.delay / 1e3, options.ranks) as hosts:
            for run in options.runs:
                found = hosts.measure("gloo", options.ranks, __file__, [*given, run])
                print(f"| `{run}` | {' | '.join(cells(found))} |", flush=True)


def cells(found):
    """Of a row, of what a worker has found."""
    if "accuracy" in found:
        return [
            f"{100 * found['accuracy']:.2f}",
            f"{found['megabytes']:.3f}",
            f"{found['seconds']:.0f}",
        ]
    seconds = found["seconds"]
    return [f"{1e3 * each:.0f}" for each in (statistics.median(seconds), seconds[-1])]


if __name__ == "__main__":
    main()
