"""What the sums of squares that variance needs cost: a forward and backward pass with and without,
as a Markdown table.

    .venv/bin/python benchmarks/per_sample.py

minibatch collects nothing. The passes are made by turns in one process, and medians of processor
time are compared, which other processes disturb least. microbatch of 4 makes four passes of a
quarter of the batch. CIFAR's ResNet-20 has GroupNorm for BatchNorm, which mixes samples.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from demo_network import network
from torch import nn

from horovod_compress.pytorch.moments import Moments


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        stride = outputs // inputs
        self.conv1, self.norm1 = (
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(8, outputs),
        )
        self.conv2, self.norm2 = (
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(8, outputs),
        )
        self.shortcut = (
            nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        )

    def forward(self, x):
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


def resnet20():
    widths = [16] * 4 + [32] * 3 + [64] * 3
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.GroupNorm(8, 16),
        nn.ReLU(),
        *(Block(*pair) for pair in zip(widths, widths[1:])),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class Recurrent(nn.Module):
    """A language model's two layers: 35 words of 1000, 256 wide."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 256)
        self.lstm = nn.LSTM(256, 256, 2, batch_first=True)
        self.out = nn.Linear(256, 10)

    def forward(self, x):
        return self.out(self.lstm(self.embedding(x))[0][:, -1])


NETWORKS = {
    "demo's network": (lambda: network(28), lambda n: torch.randn(n, 1, 28, 28)),
    "ResNet-20": (resnet20, lambda n: torch.randn(n, 3, 32, 32)),
    "LSTM, two layers": (Recurrent, lambda n: torch.randint(0, 1000, (n, 35))),
}


def seconds_of_pass(model, x, y, parts):
    model.zero_grad()
    started = time.process_time()
    for its_x, its_y in zip(x.chunk(parts), y.chunk(parts)):
        (F.cross_entropy(model(its_x), its_y) / parts).backward()
    return time.process_time() - started


def measured(make, inputs, batch, rounds):
    """{kind: median CPU seconds of a pass}, by turns; a collector is there only in its kind's
    passes."""
    model, x, y = make(), inputs(batch), torch.randint(0, 10, (batch,))
    params = dict(model.named_parameters())
    seconds = {"minibatch": [], "microbatch": [], "per_sample": []}
    for _ in range(rounds + 1):
        for kind, its in seconds.items():
            moments = Moments(kind, params) if kind != "minibatch" else None
            parts = 4 if kind == "microbatch" else 1
            for _ in range(2):  # the first one allocates
                last = seconds_of_pass(model, x, y, parts)
                for name in params if moments else ():
                    moments.take(name)
            its.append(last)
            del moments
    return {kind: statistics.median(its[1:]) for kind, its in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[16, 64], help="samples a rank and step"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(
        "| network | samples | minibatch, CPU ms | microbatch of 4 | per_sample "
        "|\n|---|---|---|---|---|"
    )
    for name, (make, inputs) in NETWORKS.items():
        for batch in options.batch:
            its = measured(make, inputs, batch, options.rounds)
            more = [
                f"{its[kind] / its['minibatch'] - 1:+.0%}" for kind in ("microbatch", "per_sample")
            ]
            print(
                f"| {name} | {batch} | {1e3 * its['minibatch']:.1f} | {' | '.join(more)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
