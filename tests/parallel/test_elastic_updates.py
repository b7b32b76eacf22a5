"""Elastic jobs whose ranks exchange updates: parameters are those of the same history in one
process, without Horovod."""

import copy

import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

import elastic_updates as updates
import torch
from elastic_jobs import history, replay
from elastic_training import STEPS, loss_of, model_of

from horovod_compress.compressors import get_compressor
from horovod_compress.engine.debt import DEBT
from horovod_compress.engine.lockstep import run_step

pytestmark = pytest.mark.extended


class Replay:
    """Ranks in one process, each with a model and an optimizer of its own, which begins as rank 0's
    where the rank has joined."""

    def __init__(self, spec, every, history):
        self.model, self.every, self.local_steps = model_of(spec), every, 0
        self.left, self.ends = history[0]["rank"], {each["step"] for each in history}
        self.names = [name for name, _ in self.model.named_parameters()]
        self.shared = [param.detach().clone() for param in self.model.parameters()]
        self.momenta = [torch.zeros_like(param) for param in self.shared]
        self.ranks = []

    def step(self, exchanges, step):
        if len(exchanges) == 1 < len(self.ranks):
            self.ranks = [self.ranks[self.left]]  # the other one has died
        del self.ranks[len(exchanges) :]
        while len(self.ranks) < len(exchanges):
            self.ranks.append(self._joined())
        for rank, (model, optimizer) in enumerate(self.ranks):
            optimizer.zero_grad()
            loss_of(model, step, rank).backward()
            optimizer.step()
        self.local_steps += 1
        if self.local_steps == self.every:
            self._exchange(exchanges)
        elif step + 1 in self.ends:
            # What was added goes, densely, with the next exchange.
            for exchange, added in zip(exchanges, self._added()):
                for name, arrays in exchange.arrays().items():
                    arrays[DEBT] = added[name]
            self._share()

    def _exchange(self, exchanges):
        results = run_step(exchanges, self._added())[0]
        for name, shared, momentum in zip(self.names, self.shared, self.momenta):
            mean = torch.from_numpy(results[name].reshape(shared.shape))
            if self.every > 1:
                lr, rate = updates.OUTER
                momentum.mul_(rate).add_(mean)
                mean = lr * (mean + rate * momentum)
            shared += mean
        self._share()

    def _added(self):
        """By local steps, on each rank."""
        return [
            {
                name: (param.detach() - shared).numpy().flatten()
                for name, param, shared in zip(self.names, model.parameters(), self.shared)
            }
            for model, _ in self.ranks
        ]

    def _share(self):
        self.local_steps = 0
        for model, _ in self.ranks:
            for param, shared in zip(model.parameters(), self.shared):
                param.data.copy_(shared)

    def _joined(self):
        model = copy.deepcopy(self.ranks[0][0] if self.ranks else self.model)
        optimizer = updates.optimizer_of(model)
        if self.ranks:
            optimizer.load_state_dict(copy.deepcopy(self.ranks[0][1].state_dict()))
        return model, optimizer


@pytest.mark.parametrize("i", range(len(updates.EVERY)), ids=updates.EVERY)
def test_parameters_are_those_of_the_same_history_in_one_process(elastic_job, i):
    """PowerSGD's only while there are at most two ranks, as test_elastic.py says."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have
    spec, every = list(updates.EVERY.items())[i]
    last = 80 if "powersgd" in spec else STEPS
    replayed, compressor = Replay(spec, every, history(elastic_job)), get_compressor(spec)
    shapes = {name: param.shape for name, param in replayed.model.named_parameters()}
    replay(history(elastic_job), last, compressor, shapes, replayed.step)
    torch.set_num_threads(threads)
    model = torch.load(elastic_job / f"{last}.0.pt")["elastic_updates"][i]
    for name, values in zip(replayed.names, replayed.shared):
        error = (model[name] - values).abs().max() / values.abs().max()
        assert error <= 1e-6, f"{name} differs by {error:.1e}"
