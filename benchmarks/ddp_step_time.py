#!/usr/bin/env python3
"""Step time of backward and optimizer under DistributedDataParallel at a network's gradient shapes,
one rank on each of two hosts joined by links of several speeds. Horovod is not needed.

    .venv/bin/python benchmarks/ddp_step_time.py [SPEC ...] [--rates 100mbit 1gbit none]
        [--device cuda]

Needs root (see two_hosts.py). With --device cuda both ranks have their model on one GPU, and DDP
is on Gloo all the same. Every row is a job of its own: `floor`, a step without any exchange;
`none`, DDP itself; `fp16` and `powersgd_hook`, the hooks that PyTorch maintains (the latter with
all gradients in one bucket, because with several it aborts on Gloo); and the specs. Backward only
writes the gradients. A row's time is the median of the slower rank's steps. Prints Markdown;
--points writes the figures as docs/results/data/README.md describes them.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import points
from step_time import SETTLED, WARMUP, shapes_of
from two_hosts import HOSTS, Hosts, link_rate

from horovod_compress.tools.models import MODELS

OWN = ("floor", "none", "fp16", "powersgd_hook")
DEFAULT = ["dgc:ratio=0.001", "topk:ratio=0.001", "powersgd", "maxnorm"]


def worker(spec, model_name, most, device):
    """One rank. Writes the median and the least of a step's seconds as JSON to standard output."""
    import torch
    import torch.distributed as dist
    from told import Model, tensors
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from horovod_compress import ddp
    from horovod_compress.tools.gradients import random_gradients

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    shapes = shapes_of(model_name)
    steps = tensors(random_gradients(shapes, dist.get_rank()), device)
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    model = Model(shapes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    if spec != "floor":
        # Rebuilt buckets are in the order of the gradients, which the first step tells.
        whole = {"bucket_cap_mb": 4096} if spec == "powersgd_hook" else {}
        model = DistributedDataParallel(model, **whole)
    if spec == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif spec == "powersgd_hook":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif spec not in OWN:
        ddp.compress(model, optimizer, spec)
    seconds, warmup = [], WARMUP if spec in OWN else SETTLED
    for step in range(warmup + most):
        loss = model(steps[step % len(steps)])
        finish()
        dist.barrier()
        started = time.perf_counter()
        loss.backward()
        optimizer.step()
        finish()
        seconds.append(time.perf_counter() - started)
    slowest = torch.tensor(seconds[warmup:])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    print(json.dumps({"median": slowest.median().item(), "least": slowest.min().item()}))
    dist.destroy_process_group()


def measured(hosts, worker, ranks_of_host=1):
    """Figures of a job: those of its rank 0. worker: the command of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        ranks, places = [], [host for host in HOSTS for _ in range(ranks_of_host)]
        for rank, host in enumerate(places):
            environment = {
                **hosts.environment,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "MASTER_ADDR": HOSTS["a"],
                "MASTER_PORT": "29511",
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            with open(pathlib.Path(folder, str(rank)), "w") as output:
                command = hosts.command(host, worker)
                ranks.append(subprocess.Popen(command, env=environment, stdout=output))
        if any([rank.wait() for rank in ranks]):
            sys.exit(f"failed: {worker[-1]}")
        return json.loads(pathlib.Path(folder, "0").read_text())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "specs", nargs="*", default=DEFAULT, metavar="SPEC", help=f"default: {' '.join(DEFAULT)}"
    )
    parser.add_argument("--model", choices=[*MODELS], default="resnet50")
    parser.add_argument(
        "--rates", type=link_rate, nargs="+", default=["100mbit", "1gbit", "none"], help="of links"
    )
    parser.add_argument("--steps", type=int, default=10, help="measured (default: 10)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the model")
    parser.add_argument("--points", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options.specs[0], options.model, options.steps, options.device)
    os.environ["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, __file__, "--worker", "--model", options.model]
    command += ["--steps", options.steps, "--device", options.device]
    measured_points = []
    for rate in options.rates:
        print(f"\n{options.model} on {options.device}, 2 ranks on two hosts, link {rate}\n")
        print("| spec | step ms | least | of none | of fp16 | over the floor, ms |")
        print("|---|---:|---:|---:|---:|---:|")
        found = {}
        with Hosts(rate) as hosts:
            for spec in [*OWN, *options.specs]:
                found[spec] = measured(hosts, [*command, spec])
        for spec, its in found.items():
            ratios = [its["median"] / found[own]["median"] for own in ("none", "fp16")]
            ms = [1e3 * its["median"], 1e3 * its["least"]]
            row = [f"{each:.1f}" for each in ms] + [f"{each:.3f}" for each in ratios]
            row.append(f"{ms[0] - 1e3 * found['floor']['median']:.1f}")
            print(f"| {spec} | {' | '.join(row)} |", flush=True)
            at = {"model": options.model, "run": spec, "link": points.LINKS.get(rate, rate)}
            figures = {"step": round(ms[0], 1), "least": round(ms[1], 1)}
            measured_points.append((at, {**figures, "of_none": round(ratios[0], 3)}))
    if options.points:
        units = {"step": "ms", "least": "ms", "of_none": "of none's step"}
        points.write(options.points, units, measured_points)


if __name__ == "__main__":
    main()
