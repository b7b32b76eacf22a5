"""Records gradients of a network that trains: each rank's own, before they are averaged, of
consecutive steps.

    horovodrun -np 2 .venv/bin/python benchmarks/record_gradients.py recorded
        [--steps N] [--after N]

Trains the demo's network on real images with plain Horovod and writes recorded.RANK.npz, entries
step/name: for `hvdcompress bench --gradients` and for step_time.py, which tiles them to other
shapes.
"""

import argparse

import horovod.torch as hvd
import numpy as np
import torch
from demo_network import load, network
from torch import nn

BATCH = 64  # images a rank and step


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", help="where to write: FILE.RANK.npz")
    parser.add_argument("--steps", type=int, default=24, help="how many to record (default: 24)")
    parser.add_argument(
        "--after", type=int, default=300, help="steps before the first (default: 300)"
    )
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(array) for array in load(None)[1]["train"])
    model = network(images.shape[-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    order = torch.Generator().manual_seed(hvd.rank())
    recorded = {}
    for step in range(options.after + options.steps):
        mine = torch.randint(len(images), (BATCH,), generator=order)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
        for name, param in model.named_parameters():
            if step >= options.after:
                recorded[f"{step - options.after}/{name}"] = param.grad.numpy().copy()
            hvd.allreduce_(param.grad, name=name)
        optimizer.step()
    np.savez(f"{options.file}.{hvd.rank()}.npz", **recorded)


if __name__ == "__main__":
    main()
