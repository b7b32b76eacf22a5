#!/usr/bin/env python3
"""Where training ends with a compression, on several tasks, with any number of ranks in one
process.

    .venv/bin/python benchmarks/convergence.py TASK [RUN ...]
        [--ranks 4] [--seeds 0 1 2] [--out FILE] [--plot FILE] [--points FILE]
    .venv/bin/horovodrun -np 4 .venv/bin/python benchmarks/convergence.py TASK [RUN ...] --real

A RUN is a spec, such as dgc:ratio=0.001; sgd/SPEC or adam/SPEC names another optimizer than the
task's, adam:lr=0.004/SPEC its learning rate, too, and corrected/updates/SPEC is hvdc.AdamW, with
gradients clipped to √ranks times the task's norm; updates/SPEC compresses each rank's own updates
in place of gradients, and adam/updates/SPEC is both; updates:every=16/SPEC exchanges those of 16
steps, and updates:every=16,outer=0.7+0.9/SPEC has an outer Nesterov of that learning rate and
momentum. drop/SPEC forgets after each step what was not sent, which is what error feedback is
compared with, and alone/SPEC has one rank train on its part of each batch and exchange nothing;
both are for simulated ranks only. Ranks share the task's batch, so all numbers of ranks
compute as much. Without --real, the ranks are simulated: each computes its own part of the batch,
and the compressors, the exchange and every payload are the real ones. Each run is a line of FILE,
by default convergence.jsonl, with the measure over steps and bytes; those that are there already
are not run again. What is measured are the parameters that all ranks share, those after the last
exchange. Prints a table in Markdown of all runs of the task in FILE; --plot draws them, --points
writes where they end as docs/results/data/README.md describes it.
"""

import argparse
import contextlib
import itertools
import json
import math
import pathlib
import time

import horovod.torch as hvd
import points
import torch
from rich.progress import track
from runs import ends, figure_of, key, layers, parsed, plot, table
from tasks import TASKS

import horovod_compress.torch as hvdc
from horovod_compress.adapters.binding import requested_compressor
from horovod_compress.adapters.updates import compressor_for_updates
from horovod_compress.engine.lockstep import finish_step, make_ranks, start_step
from horovod_compress.pytorch.moments import moments_of
from horovod_compress.pytorch.sgd import SGDTakeover, is_plain_sgd
from horovod_compress.transport.loopback import Loopback

# Measurements of a run, the last at its end.
POINTS = 10
# Backward passes of a step and rank, where moments=microbatch.
PASSES = 4


class Simulated:
    """Ranks of one process. One model serves all of them: with updates it has each rank's own
    parameters in turn."""

    def __init__(self, task, run, model, ranks, local_size):
        self.task, self.run, self.model, self.named = (
            task,
            run,
            model,
            dict(model.named_parameters()),
        )
        self.optimizers = [
            task.optimizer(run.optimizer, model.parameters(), ranks)
            for _ in range(ranks if run.every else 1)
        ]
        optimizer = self.optimizers[0]
        compressor = (
            compressor_for_updates(run.spec, rank=0)
            if run.every
            else requested_compressor(run.spec, optimizer, is_plain_sgd(optimizer))
        )
        self.takeover = SGDTakeover(
            None if run.every else optimizer,
            compressor,
            {id(param): name for name, param in self.named.items()},
        )
        variant = next(
            iter(self.takeover.variants.values()),
            compressor.bound(0.0, False) if compressor.traits.corrects_momentum else compressor,
        )
        self.compressor = variant
        shapes = {name: tuple(param.shape) for name, param in self.named.items()}
        self.ranks = ranks
        transports = Loopback.group(1 if run.alone else ranks)
        self.exchanges = make_ranks(variant, shapes, transports, local_size=local_size)
        self.moments = moments_of(variant, self.named)
        self.passes = PASSES if getattr(variant, "moments", "") == "microbatch" else 1
        self.clips = variant.policy.clip_norm is None and math.isfinite(task.clip)
        self.clip = task.clip_by(run.optimizer, ranks)
        self.shared = self._parameters() if run.every else {}
        self.own = [self.shared] * ranks  # parameters, between exchanges
        self.outer_momentum = (
            {name: torch.zeros_like(param) for name, param in self.shared.items()}
            if run.outer
            else {}
        )
        self.local_steps = 0

    def step(self, inputs, targets):
        arrays, squares = [], []
        parts = zip(inputs.chunk(self.ranks), targets.chunk(self.ranks))
        for rank, (x, y) in enumerate(itertools.islice(parts, len(self.exchanges))):
            buffers = [buffer.clone() for buffer in self.model.buffers()]
            self._show(self.own[rank])
            self.model.zero_grad()
            for part, its in zip(x.chunk(self.passes), y.chunk(self.passes)):
                (self.task.loss(self.model, part, its) / self.passes).backward()
            # Whose running statistics nobody looks at.
            if rank > 0:
                for buffer, before in zip(self.model.buffers(), buffers):
                    buffer.copy_(before)
            taken = {name: self.moments.take(name) for name in self.named} if self.moments else {}
            squares.append({name: sums.copy() for name, sums in taken.items() if sums is not None})
            if self.run.every:
                self._step_of(rank)
            else:
                arrays.append({name: flat(param.grad).copy() for name, param in self.named.items()})
        if self.run.every:
            self.local_steps += 1
            if self.local_steps == self.run.every:
                self._exchange_updates()
            self._show(self.shared)
            return
        lr = self.optimizers[0].param_groups[0]["lr"] if self.compressor.policy.follow_lr else None
        results = finish_step(
            self.exchanges, start_step(self.exchanges, arrays, lr, squares), arrays
        )[0]
        if self.run.drops:
            for kept in (
                array
                for exchange in self.exchanges
                for state in exchange.arrays().values()
                for array in state.values()
            ):
                kept[:] = 0
        for name, param in self.named.items():
            param.grad.copy_(torch.from_numpy(results[name]).view_as(param))
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.takeover.before_step(self.optimizers[0])
        self.optimizers[0].step()
        self.takeover.restore()

    def _parameters(self):
        return {name: param.detach().clone() for name, param in self.named.items()}

    @torch.no_grad()
    def _show(self, parameters):
        for name, values in parameters.items():
            self.named[name].copy_(values)

    @torch.no_grad()
    def _step_of(self, rank):
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizers[rank].step()
        self.own[rank] = self._parameters()

    def _exchange_updates(self):
        """What hvdc.UpdateOptimizer does at the end of a round."""
        updates = [
            {name: flat(values - self.shared[name]) for name, values in own.items()}
            for own in self.own
        ]
        results = finish_step(self.exchanges, start_step(self.exchanges, updates), updates)[0]
        for name, shared in self.shared.items():
            update = torch.from_numpy(results[name]).view_as(shared)
            if self.run.outer:
                momentum = self.outer_momentum[name].mul_(self.run.outer.momentum).add_(update)
                update = update.add(momentum, alpha=self.run.outer.momentum).mul(self.run.outer.lr)
            shared.add_(update)
        self.own, self.local_steps = [self.shared] * len(self.own), 0

    def set_rate(self, rate):
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def measure(self, data):
        return self.task.measure(self.model, data)

    def totals(self):
        nothing = {"bytes_sent": 0, "bytes_received": 0} if self.run.alone else {}
        return {**self.exchanges[0].totals(), **nothing}, self.exchanges[0].stats_by_tensor()


class Real:
    """This process is one of Horovod's ranks."""

    def __init__(self, task, run, model):
        if run.drops or run.alone:
            raise ValueError(
                "drop/ and alone/ are for simulated ranks: no compression of real ones forgets "
                "what it has not sent, and none exchanges nothing"
            )
        self.task, self.run, self.model = task, run, model
        optimizer = task.optimizer(run.optimizer, model.parameters(), hvd.size())
        self.clip = task.clip_by(run.optimizer, hvd.size())
        if run.every:
            self.optimizer = hvdc.UpdateOptimizer(
                optimizer,
                named_parameters=model.named_parameters(),
                compression=run.spec,
                every=run.every,
                outer=run.outer,
            )
            self.compression, self.passes, self.clips = (
                self.optimizer.compression,
                1,
                math.isfinite(task.clip),
            )
            return
        self.compression = hvdc.Compression.from_spec(
            run.spec, optimizer, named_parameters=model.named_parameters()
        )
        self.passes = PASSES if self.compression.config.get("moments") == "microbatch" else 1
        self.clips = self.compression.config.get("clip_norm") is None and math.isfinite(task.clip)
        self.optimizer = hvd.DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            self.compression,
            backward_passes_per_step=self.passes,
        )

    def step(self, inputs, targets):
        x, y = inputs.chunk(hvd.size())[hvd.rank()], targets.chunk(hvd.size())[hvd.rank()]
        self.optimizer.zero_grad()
        for part, its in zip(x.chunk(self.passes), y.chunk(self.passes)):
            (self.task.loss(self.model, part, its) / self.passes).backward()
        if not self.run.every:
            self.optimizer.synchronize()
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        with contextlib.nullcontext() if self.run.every else self.optimizer.skip_synchronize():
            self.optimizer.step()

    def set_rate(self, rate):
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def measure(self, data):
        with self.optimizer.shared_parameters() if self.run.every else contextlib.nullcontext():
            return self.task.measure(self.model, data)

    def totals(self):
        return self.compression.stats(), self.compression.stats_by_tensor()


def flat(tensor):
    return tensor.detach().reshape(-1).numpy()


def train(name, run, seed, ranks, real, steps=None, local_size=1):
    """One run, as a line of the file."""
    task = TASKS[name]
    its = parsed(run, task)
    data, total = task.data(), steps or task.steps
    torch.manual_seed(seed)
    model = task.model()
    trainer = Real(task, its, model) if real else Simulated(task, its, model, ranks, local_size)
    measured, seconds = [], 0.0
    marks = {round(total * point / POINTS) for point in range(1, POINTS + 1)}
    batches = zip(range(1, total + 1), task.batches(data, seed))
    for step, (inputs, targets) in track(
        batches, f"{name} {run} × {ranks}, seed {seed}", total, disable=bool(real and hvd.rank())
    ):
        trainer.set_rate(its.rate * task.rate((step - 1) / total))
        started = time.perf_counter()
        trainer.step(inputs, targets)
        seconds += time.perf_counter() - started
        if step in marks:
            measured.append([step, trainer.measure(data), trainer.totals()[0]["bytes_sent"]])
    totals, by_tensor = trainer.totals()
    together, sent = max(its.every, 1), totals["bytes_sent"]
    return {
        "task": name,
        "run": run,
        "ranks": ranks,
        "local_size": local_size,
        "seed": seed,
        "steps": total,
        "real": real,
        "measured": measured,
        "parameters": sum(param.numel() for param in model.parameters()),
        "ratio": together * totals["dense_bytes"] / sent if sent else None,
        "ratios": {
            layer: together * stats["dense_bytes"] / max(stats["bytes_sent"], 1)
            for layer, stats in by_tensor.items()
        },
        "received": totals["bytes_received"] / total,
        "seconds": seconds,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("runs", nargs="*", metavar="RUN")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument(
        "--local-size",
        type=int,
        default=1,
        help="how many simulated ranks are a host, for hosts=true (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="in place of the task's")
    parser.add_argument(
        "--real", action="store_true", help="this process is one of horovodrun's ranks"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("convergence.jsonl"))
    parser.add_argument(
        "--layers",
        action="store_true",
        help="print how many times fewer bytes each tensor has sent, too",
    )
    parser.add_argument("--plot", type=pathlib.Path, help="a picture of all runs of the task")
    parser.add_argument("--points", type=pathlib.Path, metavar="FILE")
    parser.add_argument(
        "--rate",
        type=float,
        default=1e8,
        help="of the picture's link, bits a second (default: 100 Mbit/s)",
    )
    options = parser.parse_args()
    hvd.init()
    if options.real:
        torch.set_num_threads(1)
    first, local_size = hvd.rank() == 0, hvd.local_size() if options.real else options.local_size
    rows = (
        [json.loads(line) for line in options.out.read_text().splitlines()]
        if options.out.exists()
        else []
    )
    rows = [row for row in rows if row["task"] == options.task]
    for run in options.runs:
        for ranks in [hvd.size()] if options.real else options.ranks:
            for seed in options.seeds:
                wanted = (
                    run,
                    ranks,
                    options.steps or TASKS[options.task].steps,
                    options.real,
                    local_size,
                )
                if any(key(row) == wanted and row["seed"] == seed for row in rows):
                    continue
                rows.append(
                    train(options.task, run, seed, ranks, options.real, options.steps, local_size)
                )
                if first:
                    with options.out.open("a") as file:
                        file.write(json.dumps(rows[-1]) + "\n")
    if first:
        print(table(options.task, rows))
        if options.layers:
            print(f"\n{layers(options.task, rows)}")
        if options.points:
            task = TASKS[options.task]
            units = {
                figure_of(task): task.unit.split(", ")[-1],
                "fewer": "times fewer bytes than none",
            }
            points.write(options.points, units, ends(options.task, rows), machine=None)
        if options.plot:
            plot(options.task, rows, options.plot, options.rate)


if __name__ == "__main__":
    main()
