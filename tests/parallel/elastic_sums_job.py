"""One rank of an elastic job whose gradients are known: ranks come and go in good order.
test_elastic.py starts it and adds up what it left.

A model for each compression, whose parameters begin at 0 and move by the mean of what ranks send:
the learning rate is 1, without momentum.
"""

import pathlib
import sys

import horovod.torch as hvd
import numpy as np
import torch
from elastic_jobs import tell, wait_for_hosts
from torch import nn

SPECS = ("topk:ratio=0.01", "adacomp", "dgc:ratio=0.01,momentum=0", "powersgd:rank=1")
STEPS = 100
# By step, on each host: from 2 to 4, 3, 1 and 2.
RANKS = {20: (1, 1, 2), 40: (1, 0, 2), 60: (1, 0, 0), 80: (1, 1, 0)}


def model_of():
    model = nn.Linear(90, 70)
    for param in model.parameters():
        nn.init.zeros_(param)
    return model


def gradient(spec, step, rank):
    """Of the parameters of that spec's model, one after the other."""
    return np.random.default_rng([SPECS.index(spec), step, rank]).standard_normal(
        90 * 70 + 70, np.float32
    )


def main(folder):
    import horovod_compress.torch as hvdc

    torch.set_num_threads(1)
    hvd.init()
    parts = {}
    for i, spec in enumerate(SPECS):
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        compression = hvdc.Compression.from_spec(
            spec, optimizer, named_parameters=model.named_parameters()
        )
        named = [(f"{i}.{name}", param) for name, param in model.named_parameters()]
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=named, compression=compression
        )
        parts.update(
            {f"model_{i}": model, f"optimizer_{i}": wrapped, f"compression_{i}": compression}
        )
    state = hvd.elastic.TorchState(**parts, step=0)

    @hvdc.elastic.run
    def train(state):
        tell(folder, hvd, state.step)
        while state.step < STEPS:
            train_step(state)
            state.step += 1
            if state.step in RANKS:
                save(state, folder)
                wait_for_hosts(state, folder, hvd, RANKS[state.step])

    train(state)
    save(state, folder)


def train_step(state):
    for i, spec in enumerate(SPECS):
        model, optimizer = state.__dict__[f"model_{i}"], state.__dict__[f"optimizer_{i}"]
        optimizer.zero_grad()
        whole = torch.from_numpy(gradient(spec, state.step, hvd.rank()))
        for param, part in zip(
            model.parameters(), whole.split([param.numel() for param in model.parameters()])
        ):
            (param * part.view_as(param)).sum().backward()
        optimizer.step()


def save(state, folder):
    """{spec: (parameters, what is kept of their gradients)}"""
    saved = {}
    for i, spec in enumerate(SPECS):
        kept = state.__dict__[f"compression_{i}"].state_dict()["tensors"]
        saved[spec] = (
            {
                name: param.detach()
                for name, param in state.__dict__[f"model_{i}"].named_parameters()
            },
            kept,
        )
    torch.save(saved, folder / f"{state.step}.{hvd.rank()}.pt")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
