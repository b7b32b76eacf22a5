"""One of Horovod's ranks, as benchmarks/convergence.py trains it with --real."""

import contextlib
import math

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvdc


class Real:
    """This process is one of Horovod's ranks. passes: backward passes of a step, where
    moments=microbatch."""

    def __init__(self, task, run, model, passes):
        if run.drops or run.alone:
            raise ValueError(
                "drop/ and alone/ are for simulated ranks: no compression of real ones forgets "
                "what it has not sent, and none exchanges nothing"
            )
        self.task, self.run, self.model = task, run, model
        optimizer = task.optimizer(run.optimizer, model.named_parameters(), hvd.size())
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
        self.passes = passes if self.compression.config.get("moments") == "microbatch" else 1
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
