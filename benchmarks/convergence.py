#!/usr/bin/env python3
"""Where training ends with a compression, on several tasks, with any number of ranks in one
process.

    .venv/bin/python benchmarks/convergence.py TASK [RUN ...]
        [--ranks 4] [--seeds 0 1 2] [--device cuda] [--out FILE] [--plot FILE] [--points FILE]
    .venv/bin/horovodrun -np 4 .venv/bin/python benchmarks/convergence.py TASK [RUN ...] --real

A RUN is a spec, such as dgc:ratio=0.001; sgd/SPEC or adam/SPEC names another optimizer than the
task's, adam:lr=0.004/SPEC its learning rate, too; muon/SPEC is Muon for matrices of hidden layers
and AdamW for the others, signs/SPEC steps by the signs of what was exchanged, as DeMo does, and
corrected/updates/SPEC is hvdc.AdamW, with gradients clipped to √ranks times the task's norm;
updates/SPEC compresses each rank's own updates
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
import functools
import itertools
import json
import math
import pathlib
import time

import numpy as np
import points
import torch
from graphs import backward_of
from runs import ends, figure_of, key, layers, parsed, plot, table
from tasks import TASKS

from horovod_compress.engine.lockstep import finish_step, make_ranks, start_step
from horovod_compress.session.choice import requested_compressor
from horovod_compress.session.updates import compressor_for_updates
from horovod_compress.torch_common.moments import moments_of
from horovod_compress.torch_common.takeover import SGDTakeover, is_plain_sgd
from horovod_compress.transport.loopback import Loopback

# Measurements of a run, the last at its end.
POINTS = 10
# Backward passes of a step and rank, where moments=microbatch.
PASSES = 4


class Simulated:
    """Ranks of one process. One model serves all of them: with updates it has each rank's own
    parameters in turn. What compressors work on comes to the CPU, and goes back."""

    def __init__(self, task, run, model, ranks, local_size):
        self.task, self.run, self.model, self.named = (
            task,
            run,
            model,
            dict(model.named_parameters()),
        )
        self.optimizers = [
            task.optimizer(run.optimizer, model.named_parameters(), ranks)
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
        self.parameters = list(model.parameters())
        # Between exchanges: what all ranks share, and each rank's own.
        self.shared = copies(self.parameters) if run.every else []
        self.own = [copies(self.parameters) for _ in range(ranks if run.every else 0)]
        self.outer_momentum = [torch.zeros_like(param) for param in self.shared if run.outer]
        self.local_steps = 0
        # The first parts' memory, and what makes their gradients from a recorded graph.
        self.recorded = None

    def step(self, inputs, targets):
        arrays, squares = [], []
        parts = zip(inputs.chunk(self.ranks), targets.chunk(self.ranks))
        for rank, part in enumerate(itertools.islice(parts, len(self.exchanges))):
            buffers = [buffer.clone() for buffer in self.model.buffers()]
            if self.run.every:
                self._show(self.own[rank])
            self._backward(*part)
            # Whose running statistics nobody looks at.
            if rank > 0:
                for buffer, before in zip(self.model.buffers(), buffers):
                    buffer.copy_(before)
            taken = {name: self.moments.take(name) for name in self.named} if self.moments else {}
            squares.append({name: sums.copy() for name, sums in taken.items() if sums is not None})
            if self.run.every:
                self._step_of(rank)
            else:
                arrays.append(self._flat([param.grad for param in self.parameters]))
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
        torch._foreach_copy_([param.grad for param in self.parameters], self._tensors(results))
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.takeover.before_step(self.optimizers[0])
        self.optimizers[0].step()
        self.takeover.restore()

    def _backward(self, inputs, targets):
        """Makes the gradients of a rank's part of the batch."""
        if inputs.is_cuda and self.passes == 1 and not self.moments:
            if self.recorded is None:
                memory = [inputs.clone(), targets.clone()]
                self.recorded = *memory, backward_of(self.model, self.task.loss, *memory)
            recorded_inputs, recorded_targets, backward = self.recorded
            recorded_inputs.copy_(inputs)
            recorded_targets.copy_(targets)
            backward()
            return
        self.model.zero_grad()
        for part, its in zip(inputs.chunk(self.passes), targets.chunk(self.passes)):
            (self.task.loss(self.model, part, its) / self.passes).backward()

    def _flat(self, tensors):
        """{name: a flat copy in NumPy's memory}, of a tensor for each parameter."""
        together = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu().numpy()
        ends = np.cumsum([tensor.numel() for tensor in tensors])
        return dict(zip(self.named, np.split(together, ends[:-1])))

    def _tensors(self, arrays):
        """A tensor for each parameter, where that is, of flat arrays by name."""
        together = torch.from_numpy(np.concatenate([arrays[name] for name in self.named]))
        parts = together.to(self.parameters[0].device).split([p.numel() for p in self.parameters])
        return [part.view_as(param) for part, param in zip(parts, self.parameters)]

    @torch.no_grad()
    def _show(self, values):
        torch._foreach_copy_(self.parameters, values)

    @torch.no_grad()
    def _step_of(self, rank):
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizers[rank].step()
        torch._foreach_copy_(self.own[rank], self.parameters)

    @torch.no_grad()
    def _exchange_updates(self):
        """Exchanges updates, as hvdc.UpdateOptimizer does at the end of a round."""
        updates = [self._flat(torch._foreach_sub(own, self.shared)) for own in self.own]
        results = finish_step(self.exchanges, start_step(self.exchanges, updates), updates)[0]
        for i, update in enumerate(self._tensors(results)):
            if self.run.outer:
                momentum = self.outer_momentum[i].mul_(self.run.outer.momentum).add_(update)
                update = update.add(momentum, alpha=self.run.outer.momentum).mul(self.run.outer.lr)
            self.shared[i].add_(update)
        for own in self.own:
            torch._foreach_copy_(own, self.shared)
        self.local_steps = 0

    def set_rate(self, rate):
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

    def measure(self, data):
        return self.task.measure(self.model, data)

    def totals(self):
        nothing = {"bytes_sent": 0, "bytes_received": 0} if self.run.alone else {}
        return {**self.exchanges[0].totals(), **nothing}, self.exchanges[0].tensors.stats_by_name()


def copies(tensors):
    return [tensor.detach().clone() for tensor in tensors]


def made(task, run, model, real, ranks, local_size):
    """The ranks of a training: real ones, or simulated."""
    if not real:
        return Simulated(task, run, model, ranks, local_size)
    from horovod_ranks import Real

    return Real(task, run, model, PASSES)


def train(
    name,
    run,
    seed,
    ranks,
    real,
    steps=None,
    local_size=1,
    device="cpu",
    shown=lambda each, *_: each,
):
    """One run, as a line of the file. shown: goes through steps, as rich's track does."""
    task = TASKS[name]
    its = parsed(run, task)
    data = {part: [each.to(device) for each in both] for part, both in task.data().items()}
    total = steps or task.steps
    torch.manual_seed(seed)
    model = task.model().to(device)
    trainer = made(task, its, model, real, ranks, local_size)
    measured, seconds = [], 0.0
    marks = {round(total * point / POINTS) for point in range(1, POINTS + 1)}
    batches = zip(range(1, total + 1), task.batches(data, seed))
    for step, (inputs, targets) in shown(batches, f"{name} {run} × {ranks}, seed {seed}", total):
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
    # Not where others import this, who have no rich.
    from rich.progress import track

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
    parser.add_argument("--device", default="cpu", help="of the model of simulated ranks")
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
    first, size, local_size = True, None, options.local_size
    if options.real:
        import horovod.torch as hvd

        hvd.init()
        torch.set_num_threads(1)
        first, size, local_size = hvd.rank() == 0, hvd.size(), hvd.local_size()
    shown = functools.partial(track, disable=not first)
    rows = (
        [json.loads(line) for line in options.out.read_text().splitlines()]
        if options.out.exists()
        else []
    )
    rows = [row for row in rows if row["task"] == options.task]
    for run in options.runs:
        for ranks in [size] if options.real else options.ranks:
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
                about = options.real, options.steps, local_size, options.device, shown
                rows.append(train(options.task, run, seed, ranks, *about))
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
