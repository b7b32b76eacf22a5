"""Test accuracy and bytes of compressions on Fashion-MNIST: the demo's network, the same seeds and
epochs for all.

    horovodrun -np 2 .venv/bin/python benchmarks/accuracy.py
        [--seeds SEED ...] [--epochs N] [OPTIMIZER@RATE/SPEC ...]

Prints a line for each run and at the end a table in Markdown: the mean over seeds, the difference
from `none` under the same optimizer and rate, and ratios on the wire of all tensors, of the
convolutions and of the fully connected layers, every byte counted.
"""

import argparse
import statistics

import horovod.torch as hvd
import torch
from demo_network import accuracy, load, network
from torch import nn

import horovod_compress.torch as hvdc

OPTIMIZERS = {
    "sgd": lambda parameters, rate: torch.optim.SGD(
        parameters, lr=rate, momentum=0.9, weight_decay=1e-4
    ),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
}
DEFAULT = [
    *(
        f"sgd@0.05/{spec}"
        for spec in (
            "none",
            "dgc:ratio=0.001",
            "adacomp:min_numel=256",
            "maxnorm:bits=4",
            "multiscale:bits=2+6",
        )
    ),
    *(f"sgd@0.01/{spec}" for spec in ("none", "multiscale:bits=2+6", "maxnorm:bits=2")),
    *(f"sgd@0.01/{spec},norm=l2" for spec in ("multiscale:bits=2+6", "maxnorm:bits=2")),
    *(f"adam@0.001/{spec}" for spec in ("none", "variance:alpha=1.5", "variance:alpha=2")),
    *(
        f"adam@0.001/variance:alpha=1.5,moments={moments}"
        for moments in ("microbatch", "per_sample")
    ),
]
BATCH = 64  # images a rank and step
# Backward passes a step, where moments=microbatch.
PASSES = 4


def parts(choice):
    """((optimizer, learning rate), spec)"""
    trained, spec = choice.split("/", 1)
    return trained.split("@"), spec


def run(choice, seed, data, epochs):
    """(test accuracy, {group of layers: ratio on the wire}) of one training."""
    torch.manual_seed(seed)
    images, labels = data["train"]
    model = network(images.shape[-1])
    (kind, rate), spec = parts(choice)
    optimizer = OPTIMIZERS[kind](model.parameters(), float(rate))
    compression = hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=model.named_parameters()
    )
    passes = PASSES if compression.config.get("moments") == "microbatch" else 1
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        backward_passes_per_step=passes,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for epoch in range(epochs):
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch)
        )
        for mine in order[: len(order) // (BATCH * hvd.size()) * BATCH * hvd.size()].view(
            -1, hvd.size(), BATCH
        )[:, hvd.rank()]:
            optimizer.zero_grad()
            for its in mine.chunk(passes):
                (nn.functional.cross_entropy(model(images[its]), labels[its]) / passes).backward()
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
    parser.add_argument(
        "runs",
        nargs="*",
        default=DEFAULT,
        metavar="OPTIMIZER@RATE/SPEC",
        help=f"default: {' '.join(DEFAULT)}",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    name, arrays = load(None)
    data = {part: [torch.from_numpy(array) for array in arrays] for part, arrays in arrays.items()}
    found = {}
    for seed in options.seeds:
        for choice in options.runs:
            result = run(choice, seed, data, options.epochs)
            found.setdefault(choice, []).append(result)
            if hvd.rank() == 0:
                print(f"seed {seed}  {choice:30}  {100 * result[0]:.2f} %  {result[1]}", flush=True)
    if hvd.rank() != 0:
        return
    print(f"\n{name}, {hvd.size()} ranks, {options.epochs} epochs, seeds {options.seeds}\n")
    print(
        "| optimizer | rate | compression | accuracy | lowest … highest | against none | ratio | "
        "convolutions | fully connected |"
    )
    print("|" + "---|" * 9)
    for choice, results in found.items():
        trained, spec = parts(choice)
        scores = [100 * score for score, _ in results]
        none = [100 * score for score, _ in found.get(f"{'@'.join(trained)}/none", [])]
        against = f"{statistics.mean(scores) - statistics.mean(none):+.2f}" if none else "-"
        ratios = [f"{statistics.mean(r[group] for _, r in results):.1f}" for group in results[0][1]]
        print(
            f"| {' | '.join(trained)} | {spec} | {statistics.mean(scores):.2f} % | "
            f"{min(scores):.2f} … {max(scores):.2f} | {against} | " + " | ".join(ratios) + " |"
        )


if __name__ == "__main__":
    main()
