#!/usr/bin/env python3
"""Seconds of training until a test accuracy is reached: the demo's network on Fashion-MNIST, on two
hosts joined by a slow link.

    .venv/bin/python benchmarks/time_to_accuracy.py [--rate 100mbit] [--target 88] [SPEC ...]

Needs root (see two_hosts.py). Each of `none`, `fp16` and the specs trains in a job of its own from
the same seeds, with the same optimizer, rate and batches. The clock stands still while accuracy is
measured. Prints a table in Markdown; --points writes the figures as docs/results/data/README.md
describes them, --plot draws accuracy over time.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import points
from two_hosts import LAUNCHERS, Hosts, link_rate

OWN = ("none", "fp16")
DEFAULT = ["dgc:ratio=0.001", "dgc:ratio=0.01"]
BATCH = 16  # images a rank and step
# Steps between two measurements of accuracy.
EVERY = 100
# Epochs, after which a training is given up.
MOST = 10


def worker(options):
    import horovod.torch as hvd
    import torch
    from demo_network import load

    hvd.init()
    torch.set_num_threads(1)
    data = {
        part: [torch.from_numpy(array) for array in arrays]
        for part, arrays in load(None)[1].items()
    }
    result = train(hvd, torch, options.specs[0], data, options.seed, options.target / 100)
    if hvd.rank() == 0:
        pathlib.Path(options.worker).write_text(json.dumps(result))


def train(hvd, torch, spec, data, seed, target):
    """{seconds, steps: until the target was reached, seconds null where it was not; curve:
    [seconds, accuracy] on the way}."""
    from demo_network import accuracy, network

    import horovod_compress.torch as hvdc

    torch.manual_seed(seed)
    images, labels = data["train"]
    model = network(images.shape[-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    compression = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}.get(spec)
    if compression is None:
        compression = hvdc.Compression.from_spec(
            spec, optimizer, named_parameters=model.named_parameters()
        )
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    seconds, curve, step = 0.0, [], 0
    test = [part[hvd.rank() :: hvd.size()] for part in data["test"]]
    order = torch.Generator().manual_seed(seed)
    for _ in range(MOST):
        shuffled = torch.randperm(len(images), generator=order)
        whole = len(images) // (BATCH * hvd.size()) * BATCH * hvd.size()
        for mine in shuffled[:whole].view(-1, hvd.size(), BATCH)[:, hvd.rank()]:
            started = time.perf_counter()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
            seconds += time.perf_counter() - started
            step += 1
            if step % EVERY == 0:
                curve.append([seconds, accuracy(model, *test)])
                if curve[-1][1] >= target:
                    return {"seconds": seconds, "steps": step, "curve": curve}
    return {"seconds": None, "steps": step, "curve": curve}


def table(results, options):
    """Markdown of {spec: one result a seed}; times are medians over seeds."""
    reached = {}
    for spec, found in results.items():
        reached[spec] = (
            statistics.median(r["seconds"] for r in found)
            if all(r["seconds"] for r in found)
            else None
        )

    def against(own, spec):
        return f"{reached[own] / reached[spec]:.1f}" if reached[own] and reached[spec] else ""

    lines = [
        f"\n{options.target:g} % test accuracy, {options.ranks} ranks on two hosts, link "
        f"{options.rate}, seeds {options.seeds}\n"
    ]
    lines += [
        "| spec | seconds | steps | ms a step | times faster than none | than fp16 |",
        "|---|" + "---:|" * 5,
    ]
    for spec, found in results.items():
        if reached[spec] is None:
            lines.append(f"| {spec} | not reached in {MOST} epochs | | | | |")
            continue
        ms = statistics.median(1e3 * r["seconds"] / r["steps"] for r in found)
        row = [
            spec,
            f"{reached[spec]:.1f}",
            f"{statistics.median(r['steps'] for r in found):.0f}",
            f"{ms:.1f}",
        ]
        lines.append("| " + " | ".join([*row, against("none", spec), against("fp16", spec)]) + " |")
    return "\n".join(lines)


UNITS = {"seconds": "s until the accuracy is reached", "steps": "steps"}


def measured(results, options):
    """The points of {spec: one result a seed}, without those of which a seed did not get there."""
    link = points.LINKS.get(options.rate, options.rate)
    for spec, found in results.items():
        if all(its["seconds"] for its in found):
            at = {"run": spec, "link": link, "ranks": options.ranks, "target": options.target}
            by_seed = [
                {str(seed): its[name] for seed, its in zip(options.seeds, found)} for name in UNITS
            ]
            yield at, dict(zip(UNITS, by_seed))


def plot(results, path, title):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots()
    for spec, found in results.items():
        seconds, scores = zip(*found[0]["curve"])
        axes.plot(seconds, [100 * score for score in scores], label=spec)
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("test accuracy, %")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "specs", nargs="*", default=DEFAULT, metavar="SPEC", help=f"default: {' '.join(DEFAULT)}"
    )
    parser.add_argument(
        "--target", type=float, default=88, help="test accuracy in %% (default: 88)"
    )
    parser.add_argument(
        "--rate",
        type=link_rate,
        default="100mbit",
        help="of the link; none: as fast as it goes (default: 100mbit)",
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="half of them on each host (default: 2)"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="(default: 0)")
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, default="gloo", help="what Horovod runs on (default: gloo)"
    )
    parser.add_argument("--points", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks < 2 or options.ranks % 2:
        parser.error("--ranks: an even number, half of them on each host")
    if options.worker:
        return worker(options)
    results = {}
    with Hosts(options.rate) as hosts:
        for seed in options.seeds:
            for spec in [*OWN, *options.specs]:
                found = hosts.measure(
                    options.launcher,
                    options.ranks,
                    __file__,
                    ["--target", options.target, "--seed", seed, spec],
                )
                results.setdefault(spec, []).append(found)
                print(
                    f"seed {seed}, {spec}: {found['seconds']} s, {found['steps']} steps",
                    file=sys.stderr,
                    flush=True,
                )
    print(table(results, options))
    if options.points:
        points.write(options.points, UNITS, measured(results, options), seeds=options.seeds)
    if options.plot:
        plot(
            results,
            options.plot,
            f"Fashion-MNIST, {options.ranks} ranks on two hosts, link {options.rate}",
        )


if __name__ == "__main__":
    main()
