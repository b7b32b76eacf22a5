#!/usr/bin/env python3
"""A long training with a fault every so often: a gradient of NaN, a step that is not used, one that is given up, saving and loading.

    .venv/bin/horovodrun -np 2 .venv/bin/python benchmarks/soak.py [--steps 10000] [--every 200] [SPEC ...]

Gradients are random numbers of a known seed, and the learning rate is 1, so what must come out is known: for every tensor, what parameters have
moved, and the mean of what ranks still keep, are the mean of all gradients that counted. Replicas are identical, and memory, which is looked at after
a tenth of the steps and at the end, has grown by less than 1 %. Exits with 1 where that is not so. Prints one line for each spec.
"""
import argparse
import contextlib
import gc
import io
import random
import sys

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvdc

DEFAULT = ["dgc:ratio=0.01", "topk:ratio=0.01", "adacomp", "powersgd:rank=2"]
RESIDUALS = ("residual", "v", "r")
LARGEST = {"moved": 1e-4, "memory": 0.01}  # relative: of float32 sums over all steps, and of the process


class Fault(Exception):
    pass


class Soak:
    """A model without a loss: the gradient of each parameter is a random array of this step and rank."""

    def __init__(self, spec, seed):
        self.spec, self.seed = spec, seed
        self.model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 64))
        self.params = list(self.model.parameters())
        with torch.no_grad():
            [p.zero_() for p in self.params]
        self.total = [torch.zeros(p.shape, dtype=torch.float64) for p in self.params]
        self.start()

    def start(self):
        """Optimizer and compression, as at the start of a process."""
        optimizer = torch.optim.SGD(self.params, lr=1.0)
        self.compression = hvdc.Compression.from_spec(self.spec, optimizer, self.model.named_parameters(), discardable=True)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters(), compression=self.compression)

    def gradients(self, step):
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + 2 * step + hvd.rank())
        return [torch.randn(p.shape, generator=generator) / 256 for p in self.params]

    def backward(self, gradients, fails=False):
        """The exception comes when half of the gradients have been handed over."""
        for i, (p, gradient) in enumerate(zip(self.params, gradients)):
            if fails and i == len(self.params) // 2:
                raise Fault
            (p * gradient).sum().backward()

    def step(self, step):
        gradients = self.gradients(step)
        self.backward(gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for total, gradient in zip(self.total, gradients):
            total += gradient

    # -- faults, which come before a step --

    def not_finite(self, step, rank):
        gradients = self.gradients(-step)
        if hvd.rank() == rank:
            gradients[2][3, 5] = float("nan")
        self.backward(gradients)
        self.optimizer.synchronize()
        assert any(not torch.isfinite(p.grad).all() for p in self.params), "a rank does not see the other's NaN"
        self.optimizer.zero_grad()

    def skipped(self, step, rank):
        self.backward(self.gradients(-step))
        self.optimizer.synchronize()
        self.optimizer.zero_grad()

    def abandoned(self, step, rank):
        with contextlib.suppress(Fault):
            self.backward(self.gradients(-step), fails=hvd.rank() == rank)
        self.optimizer.synchronize()
        self.optimizer.zero_grad()

    def given_up(self, step, rank):
        self.backward(self.gradients(-step))
        with contextlib.suppress(AssertionError):  # Horovod's: gradients were computed once more, before step()
            self.backward(self.gradients(-step))
        try:
            self.optimizer.synchronize()
        except RuntimeError as error:
            assert "given up" in str(error), error
        else:
            raise AssertionError("a step whose gradients were changed has not failed")

    def saved_and_loaded(self, step, rank):
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict(), self.compression.state_dict()], file)
        states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        with torch.no_grad():
            [p.fill_(7) for p in self.params]
        self.step_of_another_run()
        for each, state in zip((self.model, self.optimizer, self.compression), states):
            each.load_state_dict(state)

    def step_of_another_run(self):
        """What is loaded must overwrite something."""
        self.backward(self.gradients(0))
        self.optimizer.step()
        self.optimizer.zero_grad()

    FAULTS = (not_finite, skipped, abandoned, given_up, saved_and_loaded)

    # -- what must be so --

    def worst(self):
        """The largest difference of what has moved, and is kept, from the mean of all gradients, relative to the largest of those."""
        tensors, worst = self.compression.state_dict()["tensors"], 0.0
        for (name, p), total in zip(self.model.named_parameters(), self.total):
            kept = next((array for key, array in tensors[name].items() if key in RESIDUALS), torch.zeros(p.numel()))
            owed = hvd.allreduce(total.flatten() - kept.double().flatten(), name=f"owed {name}")
            worst = max(worst, ((-p.detach().double().flatten() - owed).abs().max() / owed.abs().max()).item())
        return worst

    def identical(self):
        mine = torch.cat([p.detach().flatten() for p in self.params])
        return bool((hvd.allgather(mine[None], name="replicas") == mine).all())


def memory():
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def soak(spec, steps, every, seed, tell):
    """(faults, worst difference, growth of memory, whether replicas are identical)"""
    run, drawn, faults, early = Soak(spec, seed), random.Random(seed), 0, 0
    for step in range(1, steps + 1):
        if step % every == 0:
            fault = Soak.FAULTS[faults % len(Soak.FAULTS)] if faults < len(Soak.FAULTS) else drawn.choice(Soak.FAULTS)
            fault(run, step, drawn.randrange(hvd.size()))
            faults += 1
        run.step(step)
        if step == max(steps // 10, len(Soak.FAULTS) * every):
            early = memory()
        tell(step)
    growth = memory() / early - 1 if early else 0.0
    return faults, run.worst(), growth, run.identical()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", default=DEFAULT, metavar="SPEC")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=200, help="steps from one fault to the next")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    good = True
    for spec in options.specs:
        with contextlib.ExitStack() as stack:
            tell = lambda step: None  # noqa: E731
            if hvd.rank() == 0 and sys.stderr.isatty():
                from rich.console import Console
                from rich.progress import Progress

                progress = stack.enter_context(Progress(console=Console(stderr=True)))
                task = progress.add_task(spec, total=options.steps)
                tell = lambda step: progress.update(task, completed=step)  # noqa: E731
            faults, worst, growth, identical = soak(spec, options.steps, options.every, options.seed, tell)
        fine = worst <= LARGEST["moved"] and growth <= LARGEST["memory"] and identical
        good = good and fine
        print(
            f"rank {hvd.rank()}: {spec}: {options.steps} steps, {faults} faults: off by {worst:.1e}, memory {growth:+.2%}, "
            f"replicas {'identical' if identical else 'differ'}{'' if fine else ': FAILED'}", flush=True,
        )
    sys.exit(not good)


if __name__ == "__main__":
    main()
