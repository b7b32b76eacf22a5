#!/usr/bin/env python3
"""Where decentralized training ends, with N ranks in one process: the accuracy of the mean model,
and how far ranks are apart.

    .venv/bin/python benchmarks/decentralized.py [RUN ...] [--task mlp] [--ranks 8]
        [--seeds 0 1 2] [--steps 600] [--sorted] [--device cuda] [--out FILE]

A RUN is allreduce, or ALGORITHM/SPEC: dcd/qsgd:bits=4,norm=max, choco:step=0.05/topk:ratio=0.01.
exact/none is D-PSGD, and exact with another SPEC sends parameters that are quantized naively. Each
rank has SGD with momentum of its own, a fixed part of the data, and a part of the batch that all
ranks share; the rate falls as in convergence.py. --sorted gives ranks parts with few classes. Each
run is a line of FILE, by default decentralized.jsonl; those that are there already are not run
again. Prints a table in Markdown of all runs in FILE.
"""

import argparse
import json
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from graphs import backward_of
from networks import resnet20
from tasks import fashion, steps_down
from torch import nn

import horovod_compress as hc

QSGD = "qsgd:bits={},norm=max"
RUNS = [
    "allreduce",
    "exact/none",
    *(f"exact/{QSGD.format(bits)}" for bits in (7, 3)),
    *(f"dcd/{QSGD.format(bits)}" for bits in (7, 3, 2, 1)),
    *(f"ecd/{QSGD.format(bits)}" for bits in (7, 3)),
    *(f"choco/{QSGD.format(bits)}" for bits in (7, 3)),
    "choco/efsignsgd",
    *(f"choco:step={step}/topk:ratio=0.01" for step in (0.05, 0.1, 0.2)),
]


def mlp():
    """784, 128, 128, 10: 0.12 million parameters."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


# Name: (model, width of images, batch of all ranks, steps, learning rate).
TASKS = {"mlp": (mlp, 28, 256, 600, 0.05), "resnet20": (resnet20, 32, 128, 1400, 0.1)}


def parsed(run):
    """(algorithm, choco's ζ or None, spec) of a RUN."""
    algorithm, _, spec = run.partition("/")
    algorithm, _, zeta = algorithm.partition(":step=")
    return algorithm, float(zeta) if zeta else None, spec


def cross_entropy(model, inputs, targets):
    return F.cross_entropy(model(inputs), targets)


class Ranks:
    """The local steps of all ranks: a model that has each rank's parameters in turn."""

    def __init__(self, task, ranks, steps, seed, sort, device):
        make, side, batch, _, self.rate = TASKS[task]
        torch.manual_seed(seed)
        self.model, self.steps, self.batch = make().to(device), steps, batch // ranks
        self.named = dict(self.model.named_parameters())
        data = {part: [each.to(device) for each in both] for part, both in fashion(side).items()}
        self.test, (inputs, targets) = data["test"], data["train"]
        self.inputs, self.targets = (each[: self.batch].clone() for each in (inputs, targets))
        self.backward = backward_of(self.model, cross_entropy, self.inputs, self.targets)
        self.rng = np.random.default_rng(seed)
        order = torch.from_numpy(self.rng.permutation(len(targets))).to(device)
        if sort:
            order = order[torch.argsort(targets[order], stable=True)]
        self.parts = [(inputs[part], targets[part]) for part in order.chunk(ranks)]
        self.optimizers = [
            torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=0.9, weight_decay=1e-4)
            for _ in range(ranks)
        ]

    def start(self):
        return {name: param.detach().cpu().numpy().copy() for name, param in self.named.items()}

    @torch.no_grad()
    def show(self, parameters):
        for name, x in parameters.items():
            self.named[name].copy_(torch.from_numpy(x))

    def gradient(self, step, rank):
        inputs, targets = self.parts[rank]
        chosen = torch.from_numpy(self.rng.integers(len(targets), size=self.batch))
        chosen = chosen.to(targets.device)
        optimizer = self.optimizers[rank]
        for group in optimizer.param_groups:
            group["lr"] = self.rate * steps_down(step / self.steps)
        self.inputs.copy_(inputs[chosen])
        self.targets.copy_(targets[chosen])
        self.backward()
        return optimizer

    def local_step(self, step, rank, parameters):
        self.show(parameters)
        self.gradient(step, rank).step()
        for name, x in parameters.items():
            torch.from_numpy(x).copy_(self.named[name].detach())

    def allreduce(self):
        for step in range(self.steps):
            sums = [torch.zeros_like(param) for param in self.named.values()]
            for rank in range(len(self.parts)):
                self.gradient(step, rank)
                for total, param in zip(sums, self.named.values()):
                    total += param.grad / len(self.parts)
            for total, param in zip(sums, self.named.values()):
                param.grad.copy_(total)
            self.optimizers[0].step()
        return self.start()

    @torch.no_grad()
    def accuracy(self, parameters):
        """Of a model whose normalization, if it has any, has seen some of the data before."""
        self.show(parameters)
        if any(isinstance(each, nn.BatchNorm2d) for each in self.model.modules()):
            for each in self.model.modules():
                if isinstance(each, nn.BatchNorm2d):
                    each.reset_running_stats()
                    each.momentum = None
            self.model.train()
            for inputs, _ in self.parts:
                self.model(inputs[:512])
        self.model.eval()
        inputs, targets = self.test
        right = sum(
            (self.model(x).argmax(1) == y).sum().item()
            for x, y in zip(inputs.split(1000), targets.split(1000))
        )
        self.model.train()
        return 100 * right / len(targets)


def train(run, task, ranks, steps, seed, sort, device):
    began, its = time.time(), Ranks(task, ranks, steps, seed, sort, device)
    row = {"run": run, "task": task, "ranks": ranks, "steps": steps, "seed": seed, "sorted": sort}
    if run == "allreduce":
        mean = its.allreduce()
        sent = 2 * (ranks - 1) / ranks * 4 * sum(x.size for x in mean.values())
        found = {"consensus": 0.0, "megabytes": sent / 1e6, "alpha": None}
    else:
        algorithm, zeta, spec = parsed(run)
        try:
            done = hc.simulate_decentralized(
                spec,
                its.start(),
                its.local_step,
                ranks,
                steps,
                "ring",
                algorithm,
                zeta,
            )
        except FloatingPointError:
            return {**row, "accuracy": None, "seconds": time.time() - began}
        mean, stats = done.mean, done.stats[0]
        found = {
            "consensus": max(done.consensus),
            "megabytes": stats["bytes_sent"] / steps / 1e6,
            "alpha": stats["alpha"],
        }
    return {**row, "accuracy": its.accuracy(mean), **found, "seconds": time.time() - began}


def shown(values, digits):
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "diverges"
    spread = f" ± {np.std(known):.{digits}f}" if len(known) > 1 else ""
    return f"{np.mean(known):.{digits}f}{spread}"


def table(rows):
    groups = {}
    for row in rows:
        key = row["task"], row["ranks"], row["sorted"], row["steps"], row["run"]
        groups.setdefault(key, []).append(row)
    yield "| task | ranks | run | seeds | accuracy of the mean, % | apart | α | MB a step |"
    yield "|---|---|---|---|---|---|---|---|"
    for (task, ranks, sort, _, run), its in groups.items():
        last = its[-1]
        alpha = last.get("alpha")
        apart = f"{last['consensus']:.4f}" if "consensus" in last else "–"
        sent = f"{last['megabytes']:.3f}" if "megabytes" in last else "–"
        yield (
            f"| {task}{', sorted' if sort else ''} | {ranks} | `{run}` | {len(its)} | "
            f"{shown([row['accuracy'] for row in its], 2)} | {apart} | "
            f"{'–' if alpha is None else f'{alpha:.2f}'} | {sent} |"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", default=RUNS)
    parser.add_argument("--task", choices=TASKS, default="mlp")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="in place of the task's")
    parser.add_argument("--sorted", action="store_true", help="data sorted by class")
    parser.add_argument("--device", default="cpu", help="of the model")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("decentralized.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps = options.steps or TASKS[options.task][3]
    found = options.out.read_text().splitlines() if options.out.exists() else []
    rows = [json.loads(line) for line in found]
    for seed in options.seeds:
        for run in options.runs:
            wanted = (run, options.task, options.ranks, steps, seed, options.sorted)
            keys = ("run", "task", "ranks", "steps", "seed", "sorted")
            if any(tuple(row[key] for key in keys) == wanted for row in rows):
                continue
            rows.append(train(*wanted, options.device))
            with open(options.out, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
