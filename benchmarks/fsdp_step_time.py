#!/usr/bin/env python3
"""Step time of a small transformer that fully_shard has cut over the two ranks of each of two
hosts, joined by links of several speeds.

    .venv/bin/python benchmarks/fsdp_step_time.py [SPEC ...] [--rates 100mbit 1gbit none]

Needs root (see two_hosts.py). Every row is a job of its own: `floor`, in which hosts exchange
nothing; `hsdp`, FSDP's own reduction over a mesh of two dimensions; and the specs. A row's time is
the median of the slowest rank's steps, forward, backward and optimizer. Prints Markdown; --points
writes the figures as docs/results/data/README.md describes them.
"""

import argparse
import json
import os
import pathlib
import sys
import time

import points
from ddp_step_time import measured
from two_hosts import HOSTS, Hosts, link_rate

RANKS_OF_HOST = 2
OWN = ("floor", "hsdp")
DEFAULT = ["none", "topk:ratio=0.01", "dgc:ratio=0.01", "maxnorm"]
BLOCKS, WIDTH, WORDS, LENGTH = 6, 320, 2048, 32
WARMUP = 3


def transformer():
    """Six blocks of width 320 and words: 8.7 million parameters."""
    from torch import nn

    torch_blocks = [
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(BLOCKS)
    ]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *torch_blocks, nn.Linear(WIDTH, WORDS))


def worker(spec, steps):
    """One rank. Writes the median and the least of a step's seconds as JSON to standard output."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from horovod_compress import fsdp

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = (len(HOSTS), RANKS_OF_HOST)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model, over = transformer(), mesh if spec == "hsdp" else mesh["shard"]
    for block in model:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if spec not in OWN:
        fsdp.compress(model, optimizer, spec, replicate_group=mesh["replicate"])
    generator, seconds = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(WARMUP + steps):
        words = torch.randint(0, WORDS, (2, LENGTH + 1), generator=generator)
        dist.barrier()
        started = time.perf_counter()
        optimizer.zero_grad()
        scores = model(words[:, :-1]).flatten(0, 1)
        torch.nn.functional.cross_entropy(scores, words[:, 1:].flatten()).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    slowest = torch.tensor(seconds[WARMUP:])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    print(json.dumps({"median": slowest.median().item(), "least": slowest.min().item()}))
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "specs", nargs="*", default=DEFAULT, metavar="SPEC", help=f"default: {' '.join(DEFAULT)}"
    )
    parser.add_argument(
        "--rates", type=link_rate, nargs="+", default=["100mbit", "1gbit", "none"], help="of links"
    )
    parser.add_argument("--steps", type=int, default=10, help="measured (default: 10)")
    parser.add_argument("--points", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.specs[0], options.steps)
    os.environ["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, __file__, "--worker", "--steps", options.steps]
    measured_points = []
    for rate in options.rates:
        print(f"\n2 hosts of {RANKS_OF_HOST} ranks, link {rate}\n")
        print("| spec | step ms | least | of hsdp | over the floor, ms |")
        print("|---|---:|---:|---:|---:|")
        with Hosts(rate) as hosts:
            found = {
                spec: measured(hosts, [*command, spec], RANKS_OF_HOST)
                for spec in [*OWN, *options.specs]
            }
        for spec, its in found.items():
            ms, least = 1e3 * its["median"], 1e3 * its["least"]
            ratio = its["median"] / found["hsdp"]["median"]
            over = ms - 1e3 * found["floor"]["median"]
            print(f"| {spec} | {ms:.0f} | {least:.0f} | {ratio:.3f} | {over:.0f} |", flush=True)
            at = {"run": spec, "link": points.LINKS.get(rate, rate)}
            figures = {"step": round(ms, 1), "least": round(least, 1), "of_hsdp": round(ratio, 3)}
            measured_points.append((at, figures))
    if options.points:
        units = {"step": "ms", "least": "ms", "of_hsdp": "of FSDP's own step"}
        points.write(options.points, units, measured_points)


if __name__ == "__main__":
    main()
