"""Test accuracy and bytes of compressions on Fashion-MNIST: the demo's network, the same seeds, epochs and learning rate for all.

    horovodrun -np 2 .venv/bin/python benchmarks/accuracy.py [--seeds N] [--epochs N] [OPTIMIZER/SPEC ...]

Prints a line for each run and at the end a table in Markdown: the mean over seeds, the difference from `none` under the same
optimizer, and ratios on the wire of all tensors, of the convolutions and of the fully connected layers, every byte counted.
"""
import argparse
import pathlib
import statistics
import sys

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvdc

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
from images import load  # noqa: E402
from pytorch_images import accuracy, network  # noqa: E402

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.001),
}
DEFAULT = [
    "sgd/none", "sgd/dgc:ratio=0.001", "sgd/adacomp:min_numel=256", "sgd/maxnorm:bits=4", "sgd/multiscale:bits=2+6", "sgd/maxnorm:bits=2",
    "adam/none", "adam/variance:alpha=1.5", "adam/variance:alpha=2",
]
BATCH = 64  # images a rank and step


def run(choice, seed, data, epochs):
    """(test accuracy, {group of layers: ratio on the wire}) of one training."""
    torch.manual_seed(seed)
    images, labels = data["train"]
    model = network(images.shape[-1])
    kind, spec = choice.split("/", 1)
    optimizer = OPTIMIZERS[kind](model.parameters())
    compression = hvdc.Compression.from_spec(spec, optimizer, model.named_parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for mine in order[: len(order) // (BATCH * hvd.size()) * BATCH * hvd.size()].view(-1, hvd.size(), BATCH)[:, hvd.rank()]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
    shapes = {name: param.dim() for name, param in model.named_parameters()}
    groups = {"all": (1, 2, 4), "convolutions": (4,), "fully connected": (2,)}
    sent = compression.stats_by_tensor()
    ratios = {}
    for group, dims in groups.items():
        of_it = [counts for name, counts in sent.items() if shapes[name] in dims]
        ratios[group] = sum(c["dense_bytes"] for c in of_it) / sum(c["bytes_sent"] for c in of_it)
    return accuracy(model, *(part[hvd.rank() :: hvd.size()] for part in data["test"])), ratios


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", default=DEFAULT, metavar="OPTIMIZER/SPEC", help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    name, arrays = load(None)
    data = {part: [torch.from_numpy(array) for array in arrays] for part, arrays in arrays.items()}
    found = {}
    for seed in range(options.seeds):
        for choice in options.runs:
            result = run(choice, seed, data, options.epochs)
            found.setdefault(choice, []).append(result)
            if hvd.rank() == 0:
                print(f"seed {seed}  {choice:30}  {100 * result[0]:.2f} %  {result[1]}", flush=True)
    if hvd.rank() != 0:
        return
    print(f"\n{name}, {hvd.size()} ranks, {options.epochs} epochs, {options.seeds} seeds\n")
    print("| optimizer | compression | accuracy | lowest … highest | against none | ratio | convolutions | fully connected |")
    print("|---|---|---|---|---|---|---|---|")
    for choice, results in found.items():
        kind, spec = choice.split("/", 1)
        scores = [100 * score for score, _ in results]
        none = [100 * score for score, _ in found.get(f"{kind}/none", [])]
        against = f"{statistics.mean(scores) - statistics.mean(none):+.2f}" if none else "-"
        ratios = [f"{statistics.mean(r[group] for _, r in results):.1f}" for group in results[0][1]]
        print(
            f"| {kind} | {spec} | {statistics.mean(scores):.2f} % | {min(scores):.2f} … {max(scores):.2f} | {against} | "
            + " | ".join(ratios) + " |"
        )


if __name__ == "__main__":
    main()
