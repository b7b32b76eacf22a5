#!/usr/bin/env python3
"""A long elastic job with a fault every so often: a gradient of NaN, a step that is not used, one
that is given up, saving and loading, other hosts.

    .venv/bin/python benchmarks/soak.py [--steps 10000] [--every 200] [SPEC ...]

It begins on 2 ranks and goes on with 1 to 3, as hosts come and go. Gradients are random numbers of
a known seed, and the learning rate is 1, so what must come out is known: for every tensor, what
parameters have moved, and the mean of what ranks still keep, are the mean of all gradients that
counted. Replicas are identical, and memory of the rank that is there all the time, which is looked
at after a tenth of the steps and each fault, and at the end, has grown by less than 1 %. Exits with
1 where that is not so. Each spec is a job of its own.
"""

import argparse
import contextlib
import gc
import io
import math
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvdc
from horovod_compress.compressors import get_compressor

DEFAULT = ["dgc:ratio=0.01", "topk:ratio=0.01", "adacomp", "powersgd:rank=2"]
# Of hosts, a rank on each, in turn.
SETS = (
    ("localhost", "127.0.0.1"),
    ("localhost",),
    ("localhost", "127.0.0.1", "127.1"),
    ("localhost", "127.1"),
)
LAUNCHER = "--gloo -np 2 --min-np 1 --max-np 3 --network-interfaces lo --host-discovery-script"
# Relative: of float32 sums over all steps, and of the process.
LARGEST = {"moved": 1e-4, "memory": 0.01}


class Fault(Exception):
    pass


class Soak:
    """A model without a loss: the gradient of each parameter is a random array of this step and
    rank."""

    def __init__(self, spec, seed, hosts):
        self.spec, self.seed, self.hosts = spec, seed, hosts
        self.model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 64))
        self.params = list(self.model.parameters())
        with torch.no_grad():
            [p.zero_() for p in self.params]
        optimizer = torch.optim.SGD(self.params, lr=1.0)
        self.compression = hvdc.Compression.from_spec(
            spec, optimizer, named_parameters=self.model.named_parameters(), discardable=True
        )
        self.optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=self.model.named_parameters(), compression=self.compression
        )
        # Of the means of gradients over ranks.
        total = [torch.zeros(p.shape, dtype=torch.float64) for p in self.params]
        trained = {
            "model": self.model,
            "optimizer": self.optimizer,
            "compression": self.compression,
        }
        self.state = hvd.elastic.TorchState(**trained, total=total, step=0, faults=0)

    def gradients(self, step, rank=None):
        """Of this rank, or of another one."""
        rank = hvd.rank() if rank is None else rank
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + 3 * step + rank)
        return [torch.randn(p.shape, generator=generator) / 256 for p in self.params]

    def backward(self, gradients, fails=False):
        """The exception comes when half of the gradients have been handed over."""
        for i, (p, gradient) in enumerate(zip(self.params, gradients)):
            if fails and i == len(self.params) // 2:
                raise Fault
            (p * gradient).sum().backward()

    def step(self, step):
        self.backward(self.gradients(step))
        self.optimizer.step()
        self.optimizer.zero_grad()
        for rank in range(hvd.size()):
            self.state.total = [
                total + gradient / hvd.size()
                for total, gradient in zip(self.state.total, self.gradients(step, rank))
            ]

    # -- faults, which come before a step; drawn: random numbers, the same on all ranks --

    def not_finite(self, step, drawn):
        rank = drawn.randrange(hvd.size())
        gradients = self.gradients(-step)
        if hvd.rank() == rank:
            gradients[2][3, 5] = float("nan")
        self.backward(gradients)
        self.optimizer.synchronize()
        assert any(not torch.isfinite(p.grad).all() for p in self.params), (
            "a rank does not see the other's NaN"
        )
        self.optimizer.zero_grad()

    def skipped(self, step, drawn):
        self.backward(self.gradients(-step))
        self.optimizer.synchronize()
        self.optimizer.zero_grad()

    def abandoned(self, step, drawn):
        rank = drawn.randrange(hvd.size())
        with contextlib.suppress(Fault):
            self.backward(self.gradients(-step), fails=hvd.rank() == rank)
        self.optimizer.synchronize()
        self.optimizer.zero_grad()

    def given_up(self, step, drawn):
        self.backward(self.gradients(-step))
        # Horovod's: gradients were computed once more, before step().
        with contextlib.suppress(AssertionError):
            self.backward(self.gradients(-step))
        try:
            self.optimizer.synchronize()
        except RuntimeError as error:
            assert "given up" in str(error), error
        else:
            raise AssertionError("a step whose gradients were changed has not failed")

    def saved_and_loaded(self, step, drawn):
        file = io.BytesIO()
        torch.save(
            [self.model.state_dict(), self.optimizer.state_dict(), self.compression.state_dict()],
            file,
        )
        states = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        with torch.no_grad():
            [p.fill_(7) for p in self.params]
        self.step_of_another_run()
        for each, state in zip((self.model, self.optimizer, self.compression), states):
            each.load_state_dict(state)

    def step_of_another_run(self):
        """Takes a step that loading a state must overwrite."""
        self.backward(self.gradients(0))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def other_hosts(self, step, drawn):
        """The next ones. Ends when Horovod interrupts training."""
        if hvd.rank() == 0:
            write_hosts(self.hosts, SETS[(SETS.index(read_hosts(self.hosts)) + 1) % len(SETS)])
        while True:
            self.state.commit()
            time.sleep(0.05)

    # First in this order.
    FAULTS = (
        not_finite,
        other_hosts,
        skipped,
        other_hosts,
        abandoned,
        other_hosts,
        given_up,
        other_hosts,
        saved_and_loaded,
    )

    # -- what must be so --

    def worst(self):
        """The largest difference of what has moved, and is kept, from the mean of all gradients,
        relative to the largest of those."""
        tensors, worst, accumulator = (
            self.compression.state_dict()["tensors"],
            0.0,
            get_compressor(self.spec).traits.accumulator,
        )
        for (name, p), total in zip(self.model.named_parameters(), self.state.total):
            kept = tensors[name].get(accumulator, torch.zeros(p.numel()))
            owed = total.flatten() - hvd.allreduce(kept.double(), name=f"kept {name}")
            off = ((-p.detach().double().flatten() - owed).abs().max() / owed.abs().max()).item()
            # Python's `max` forgets NaN.
            worst = max(worst, math.inf if math.isnan(off) else off)
        return worst

    def identical(self):
        mine = torch.cat([p.detach().flatten() for p in self.params])
        return bool((hvd.allgather(mine[None], name="replicas") == mine).all())


def read_hosts(file):
    return tuple(line.split(":")[0] for line in file.read_text().splitlines())


def write_hosts(file, hosts):
    new = file.with_suffix(".new")
    new.write_text("".join(f"{host}:1\n" for host in hosts))
    os.replace(new, file)


def memory():
    """Bytes of this process in memory."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def soak(spec, steps, every, seed, hosts):
    """One rank's part. Whether all is as it must be, where this rank has seen the whole job."""
    hvd.init()
    torch.set_num_threads(1)
    run, measured = Soak(spec, seed, hosts), {}
    # When ranks come or go for the first times, Horovod takes more memory.
    early = looked_at_first(steps, every)

    @hvdc.elastic.run
    def train(state):
        expected = len(read_hosts(hosts))
        assert hvd.size() == expected, f"{hvd.size()} ranks, and {expected} hosts: a rank has died"
        while state.step < steps:
            number = state.step // every
            if state.faults < number:
                # Before the fault, which may interrupt training.
                state.faults = number
                # The same on ranks that have just come.
                drawn = random.Random(f"{seed} {number}")
                fault = (
                    Soak.FAULTS[number - 1]
                    if number <= len(Soak.FAULTS)
                    else drawn.choice(Soak.FAULTS)
                )
                fault(run, state.step, drawn)
            run.step(state.step)
            state.step += 1
            if state.step == early:
                measured["early"] = memory()
        measured["growth"] = memory() / measured["early"] - 1 if "early" in measured else 0.0

    train(run.state)
    worst, identical, growth = run.worst(), run.identical(), measured["growth"]
    fine = worst <= LARGEST["moved"] and growth <= LARGEST["memory"] and identical
    if hvd.rank() == 0:
        print(
            f"{spec}: {steps} steps, {run.state.faults} faults: off by {worst:.1e}, memory "
            f"{growth:+.2%}, "
            f"replicas {'identical' if identical else 'differ'}{'' if fine else ': FAILED'}",
            flush=True,
        )
    return fine


def looked_at_first(steps, every):
    """The step after which memory is looked at for the first time."""
    return max(steps // 10, (len(Soak.FAULTS) + 1) * every)


def start(spec, arguments):
    """Runs the job of one spec, and returns whether all was as it must be."""
    with tempfile.TemporaryDirectory() as folder:
        hosts, discover = pathlib.Path(folder, "hosts"), pathlib.Path(folder, "discover")
        write_hosts(hosts, SETS[0])
        discover.write_text(f"#!/bin/sh\ncat {hosts}\n")
        discover.chmod(0o755)
        launcher = [
            pathlib.Path(sys.executable).with_name("horovodrun"),
            *LAUNCHER.split(),
            discover,
        ]
        return not subprocess.run(
            [*launcher, sys.executable, __file__, *arguments, "--hosts", hosts, spec]
        ).returncode


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", nargs="*", default=DEFAULT, metavar="SPEC")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=200, help="steps from one fault to the next")
    parser.add_argument("--seed", type=int, default=0)
    # On ranks: the file of the hosts that are there.
    parser.add_argument("--hosts", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hosts:
        sys.exit(
            not soak(*options.specs, options.steps, options.every, options.seed, options.hosts)
        )
    if options.every < 1 or looked_at_first(options.steps, options.every) >= options.steps:
        parser.error(
            f"--steps {options.steps} --every {options.every}: there would not be each fault, and "
            f"then another look at memory: --every must be at least 1, and --steps more than "
            f"{len(Soak.FAULTS) + 1} times that"
        )
    numbers = {"--steps": options.steps, "--every": options.every, "--seed": options.seed}
    arguments = [str(each) for pair in numbers.items() for each in pair]
    sys.exit(not all([start(spec, arguments) for spec in options.specs]))


if __name__ == "__main__":
    main()
