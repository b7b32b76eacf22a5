#!/usr/bin/env python3
"""Step time of backward and optimizer at the gradient shapes of known networks, on two hosts joined
by links of several speeds.

    .venv/bin/python benchmarks/step_time.py [SPEC ...] [--model resnet50]
        [--rates 100mbit 1gbit 10gbit none] [--backward 200] [--ranks 2 ...]

Needs root (see two_hosts.py). For every rate and number of ranks, each in a job of its own:
`floor`, a step without any exchange; `none` and `fp16`, Horovod's own; and the specs, of which
updates/SPEC compresses updates in place of gradients. Backward only writes the gradients, and waits
for as long as --backward says, so what is measured is the exchange, and what of it does not hide.
Prints tables in Markdown; --points writes figures as docs/results/data/README.md describes them,
--plot draws them.
"""

import argparse
import json
import pathlib
import resource
import statistics
import sys
import time

import numpy as np
import points
from two_hosts import LAUNCHERS, Hosts, link_rate

from horovod_compress.tools.models import MODELS

DEFAULT = ["dgc:ratio=0.001"]
OWN = ("floor", "none", "fp16")
WARMUP = 3
# Steps of a compression, until frames keep their lengths.
SETTLED = 10
# After which a slow configuration has been measured for long enough.
SECONDS = 30
LEAST = 3  # steps, however slow


# -- what every rank does


def tiled(recorded, shapes):
    """Gradients of `shapes` made of recorded ones: what has as many dimensions, over and over, from
    another place for each."""
    steps = []
    for step in recorded:
        kinds = {}
        for array in step.values():
            kinds.setdefault(min(array.ndim, 3), []).append(array.ravel())
        whole = {kind: np.concatenate(arrays) for kind, arrays in kinds.items()}
        steps.append(
            {
                name: np.resize(np.roll(whole[min(len(shape), 3)], 7919 * i), shape)
                for i, (name, shape) in enumerate(shapes.items())
            }
        )
    return steps


def shapes_of(model):
    return MODELS[model]() if model in MODELS else {f"t{i}": (250, 100) for i in range(1000)}


def worker(options):
    import horovod.torch as hvd
    import torch
    from told import tensors

    from horovod_compress.tools.gradients import load_gradients, random_gradients

    hvd.init()
    torch.set_num_threads(1)
    shapes = shapes_of(options.model)
    if options.gradients:
        recorded = load_gradients(f"{options.gradients}.{hvd.rank()}.npz")
        steps = tiled(recorded[: SETTLED + options.steps], shapes)
    else:
        steps = random_gradients(shapes, hvd.rank())
    result = measure(
        hvd, torch, options.specs[0], shapes, tensors(steps), options.steps, options.backward / 1e3
    )
    if hvd.rank() == 0:
        pathlib.Path(options.worker).write_text(json.dumps(result))


def measure(hvd, torch, spec, shapes, gradients, most, backward):
    """{seconds: median step of the slowest rank; bytes, encode, exchange, decode: of a step; peak:
    bytes of memory of the largest rank}.

    What is sent by what adapts (adacomp, variance, strom) is that of a training's start, where no
    residual has gathered yet.
    """
    from told import Model

    import horovod_compress.torch as hvdc

    model = Model(shapes, backward / len(shapes))
    named = model.named
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    compression = {"floor": None, "none": hvd.Compression.none, "fp16": hvd.Compression.fp16}.get(
        spec
    )
    ours = spec not in OWN
    if spec.startswith("updates/"):
        optimizer = hvdc.UpdateOptimizer(
            optimizer, named_parameters=named, compression=spec[len("updates/") :]
        )
        compression = optimizer.compression
    elif ours:
        compression = hvdc.Compression.from_spec(spec, optimizer, named_parameters=named)
    if compression and not isinstance(optimizer, hvdc.UpdateOptimizer):
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compression
        )
    seconds, before, warmup = [], None, SETTLED if ours else WARMUP
    steps, step = warmup + most, 0
    while step < steps:
        if step == warmup and ours:
            before = compression.stats()
        loss = model(gradients[step % len(gradients)])
        if compression:
            hvd.barrier()
        started = time.perf_counter()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
        # The first holds what is done once.
        if step == 1 and compression:
            slowest = hvd.allreduce(torch.tensor(seconds[1]), op=hvd.Max, name="slowest").item()
            steps = warmup + max(LEAST, min(most, int(SECONDS / slowest)))
        step += 1
    all_ranks = hvd.allreduce(torch.tensor(seconds[warmup:]), op=hvd.Max, name="seconds").tolist()
    numel = sum(p.numel() for p in model.parameters())
    peak = torch.tensor(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    result = {
        "seconds": statistics.median(all_ranks),
        "steps": len(all_ranks),
        "bytes": {"floor": 0, "fp16": 2 * numel}.get(spec, 4 * numel),
        "peak": hvd.allreduce(peak, op=hvd.Max, name="peak").item(),
    }
    if ours:
        after = compression.stats()
        result["bytes"] = (after["bytes_sent"] - before["bytes_sent"]) / len(all_ranks)
        for part in ("encode", "exchange", "decode"):
            result[part] = (after[f"{part}_seconds"] - before[f"{part}_seconds"]) / len(all_ranks)
    return result


# -- the driver


def table(results, model):
    """Markdown of {(rate, ranks): {spec: figures}}."""
    lines = []
    for (rate, ranks), found in results.items():
        lines += [f"\n{model}, {ranks} ranks on two hosts, link {rate}\n"]
        titles = [
            "step ms",
            "of none",
            "of fp16",
            "over the floor, ms",
            "MB a step",
            "encode ms",
            "wait ms",
            "decode ms",
            "peak, MB over none",
        ]
        lines += [f"| spec | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
        for spec, figures in found.items():
            ms, floor = 1e3 * figures["seconds"], 1e3 * found["floor"]["seconds"]
            parts = [
                f"{1e3 * figures[part]:.1f}" if part in figures else ""
                for part in ("encode", "exchange", "decode")
            ]
            row = [
                spec,
                f"{ms:.1f}",
                *(f"{figures['seconds'] / found[own]['seconds']:.3f}" for own in ("none", "fp16")),
                f"{ms - floor:.1f}",
                f"{figures['bytes'] / 1e6:.2f}",
                *parts,
                f"{(figures['peak'] - found['none']['peak']) / 1e6:+.0f}",
            ]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


UNITS = {
    "step": "ms",
    "of_none": "of none's step",
    "of_fp16": "of fp16's step",
    "sent": "MB a step that a rank sends",
    "encode": "ms",
    "wait": "ms",
    "decode": "ms",
    "over": "MB of peak memory over none's",
}


def measured(results, options):
    """The points of {(link, ranks): {spec: figures}}."""
    for (link, ranks), found in results.items():
        at = {"model": options.model, "ranks": ranks, "link": link}
        for spec, its in found.items():
            ms = {"step": its["seconds"], "encode": its.get("encode")}
            ms.update(wait=its.get("exchange"), decode=its.get("decode"))
            yield (
                {**at, "library": points.LIBRARIES[options.launcher], "run": spec},
                {
                    **{name: value and round(1e3 * value, 1) for name, value in ms.items()},
                    "of_none": round(its["seconds"] / found["none"]["seconds"], 3),
                    "of_fp16": round(its["seconds"] / found["fp16"]["seconds"], 3),
                    "sent": round(its["bytes"] / 1e6, 2),
                    "over": round((its["peak"] - found["none"]["peak"]) / 1e6),
                },
            )


def plot(results, path, title):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5))
    axes = figure.subplots()
    specs = [spec for spec in next(iter(results.values())) if spec != "floor"]
    for i, spec in enumerate(specs):
        at = [j + (i - len(specs) / 2) * 0.8 / len(specs) for j in range(len(results))]
        axes.bar(
            at,
            [found[spec]["seconds"] for found in results.values()],
            0.8 / len(specs),
            label=spec,
            align="edge",
        )
    axes.set_xticks(range(len(results)), [f"{rate}\n{ranks} ranks" for rate, ranks in results])
    axes.set_yscale("log")
    axes.set_ylabel("seconds a step")
    axes.set_title(title)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "specs", nargs="*", default=DEFAULT, metavar="SPEC", help=f"default: {' '.join(DEFAULT)}"
    )
    parser.add_argument(
        "--model",
        choices=[*MODELS, "thousand"],
        default="resnet50",
        help="thousand: 1000 tensors of 25 000 floats",
    )
    rates = ["100mbit", "1gbit", "10gbit", "none"]
    parser.add_argument(
        "--rates",
        type=link_rate,
        nargs="+",
        default=rates,
        help="of the link; none: as fast as it goes",
    )
    parser.add_argument(
        "--backward",
        type=float,
        default=0.0,
        help="milliseconds that backward takes besides, as on an accelerator (default: 0)",
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2], help="half of them on each host (default: 2)"
    )
    parser.add_argument(
        "--steps", type=int, default=10, help=f"at most; {LEAST} where one takes long (default: 10)"
    )
    parser.add_argument(
        "--launcher", choices=LAUNCHERS, default="gloo", help="what Horovod runs on (default: gloo)"
    )
    parser.add_argument(
        "--gradients", help="of record_gradients.py, tiled to the shapes, instead of random ones"
    )
    parser.add_argument("--points", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if any(ranks < 2 or ranks % 2 for ranks in options.ranks):
        parser.error("--ranks: an even number, half of them on each host")
    if options.worker:
        return worker(options)
    results = {}
    given = ["--model", options.model, "--steps", options.steps, "--backward", options.backward]
    given += ["--gradients", options.gradients] if options.gradients else []
    for rate in options.rates:
        with Hosts(rate) as hosts:
            for ranks in options.ranks:
                found = results[points.LINKS.get(rate, rate), ranks] = {}
                for spec in [*OWN, *options.specs]:
                    found[spec] = hosts.measure(options.launcher, ranks, __file__, [*given, spec])
                    print(
                        f"{rate}, {ranks} ranks, {spec}: {1e3 * found[spec]['seconds']:.1f} ms",
                        file=sys.stderr,
                        flush=True,
                    )
    print(table(results, options.model))
    if options.points:
        points.write(options.points, UNITS, measured(results, options))
    if options.plot:
        plot(results, options.plot, f"{options.model} on two hosts, {options.launcher}")


if __name__ == "__main__":
    main()
