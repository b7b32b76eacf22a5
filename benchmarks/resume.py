#!/usr/bin/env python3
"""Test loss of a training that is saved at 2 ranks, goes on at 3 and ends at 2, beside one that is
not interrupted.

    .venv/bin/python benchmarks/resume.py [--ranks 2 3 2] [--epochs 2] [--images 12000] [SPEC ...]

The demo's network learns Fashion-MNIST, at a learning rate that falls to 0 with the last step. Each
stage is a job of its own, started by horovodrun, which takes so many epochs. It loads what the one
before has saved: model, optimizer, and a state of the compression for any number of ranks. A step
has the same images at every number of ranks. Prints the test loss after each epoch of both
trainings, and how much they differ; beside it how much an uninterrupted training at each other
number of ranks differs, which is what chance and the number of ranks do by themselves.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

DEFAULT = ["dgc:ratio=0.01", "adacomp"]
# Images in a step, of all ranks together.
BATCH = 96
# The learning rate of the first step.
RATE = 0.02


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "specs", nargs="*", default=DEFAULT, metavar="SPEC", help=f"default: {' '.join(DEFAULT)}"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=[2, 3, 2],
        metavar="N",
        help="of the stages (default: 2 3 2)",
    )
    parser.add_argument("--epochs", type=int, default=2, help="of each stage (default: 2)")
    parser.add_argument("--images", type=int, default=12000, help="to learn from (default: 12000)")
    # On ranks: what `run` has handed over.
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        return train(**json.loads(options.stage))
    if any(BATCH % ranks for ranks in options.ranks):
        parser.error(f"--ranks: each number must divide {BATCH}")
    for spec in options.specs:
        with tempfile.TemporaryDirectory() as folder:
            at = [options.epochs * stage for stage in range(len(options.ranks) + 1)]
            whole = {
                ranks: run(options, spec, ranks, 0, at[-1], folder, "whole")
                for ranks in dict.fromkeys(options.ranks)
            }
            first, *others = whole
            for stage, ranks in enumerate(options.ranks):
                found = run(options, spec, ranks, *at[stage : stage + 2], folder, "parts")
                for epoch, loss in enumerate(found, at[stage]):
                    expected = whole[first][epoch]
                    beside = "".join(
                        f"; uninterrupted at {other}: {percent(whole[other][epoch], expected)}"
                        for other in others
                    )
                    print(
                        f"{spec}: epoch {epoch + 1}, {ranks} ranks: test loss {loss:.4f}, "
                        f"uninterrupted at {first} {expected:.4f} "
                        f"({percent(loss, expected)}{beside})",
                        flush=True,
                    )


def percent(loss, expected):
    return f"{100 * (loss / expected - 1):+.2f} %"


def run(options, spec, ranks, first, end, folder, name):
    """The test losses after epochs `first` to `end`, of a job that goes on from the file of this
    name and writes it again."""
    counts = {
        "images": options.images,
        "first": first,
        "end": end,
        "epochs": options.epochs * len(options.ranks),
    }
    stage = {"spec": spec, **counts, "file": f"{folder}/{name}", "losses": f"{folder}/losses"}
    horovodrun = pathlib.Path(sys.executable).with_name("horovodrun")
    command = [
        horovodrun,
        "--gloo",
        "-np",
        str(ranks),
        sys.executable,
        __file__,
        "--stage",
        json.dumps(stage),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(pathlib.Path(f"{folder}/losses").read_text())


def train(spec, images, first, end, epochs, file, losses):
    import horovod.torch as hvd
    import torch
    from demo_network import load, network
    from torch import nn

    import horovod_compress.torch as hvdc

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = {
        part: [torch.from_numpy(array) for array in arrays]
        for part, arrays in load(None)[1].items()
    }
    (pictures, labels), (test_pictures, test_labels) = data["train"], data["test"]
    model = network(pictures.shape[-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=1e-4)
    compression = hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=model.named_parameters()
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    if first:
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        compression.load_state_dict(saved["compression"])
    found = []
    for epoch in range(first, end):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch))
        batches = order[: len(order) // BATCH * BATCH].view(-1, hvd.size(), BATCH // hvd.size())[
            :, hvd.rank()
        ]
        for step, mine in enumerate(batches, epoch * len(batches)):
            optimizer.param_groups[0]["lr"] = RATE * (1 - step / (epochs * len(batches)))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(pictures[mine]), labels[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            share = slice(hvd.rank(), None, hvd.size())
            loss = nn.functional.cross_entropy(
                model(test_pictures[share]), test_labels[share], reduction="sum"
            )
        found.append(hvd.allreduce(loss, op=hvd.Sum).item() / len(test_labels))
    state = compression.state_dict(portable=True)
    if hvd.rank() == 0:
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "compression": state,
            },
            file,
        )
        pathlib.Path(losses).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
