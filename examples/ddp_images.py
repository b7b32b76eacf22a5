"""Trains a small convolutional network under DistributedDataParallel, with any compression:

    torchrun --nproc_per_node 2 examples/ddp_images.py
        --compression dgc:ratio=0.001,warmup_steps=300

Several are trained one after the other, from the same seed; plain is DDP without a compression.
--state saves what a rank needs to go on with, after each epoch, and goes on from what is there.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from images import load
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from horovod_compress import ddp


def network(side):
    """Two convolutions and two linear layers: 421 642 parameters for 28 × 28 images."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(64 * (side // 4) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


@torch.no_grad()
def accuracy(model, images, labels):
    """Share of all ranks' images that the model gets right; each rank looks at its own."""
    model.eval()
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = images[rank::size], labels[rank::size]
    right = sum(
        (model(x).argmax(1) == y).sum() for x, y in zip(images.split(500), labels.split(500))
    )
    model.train()
    counts = torch.tensor([float(right), float(len(labels))])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def train(spec, data, options):
    torch.manual_seed(options.seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = data["train"]
    model = DistributedDataParallel(network(images.shape[-1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4)
    compression = None if spec == "plain" else ddp.compress(model, optimizer, spec)

    batches = len(images) // (options.batch * size)
    steps = options.epochs * batches
    # The rate rises over the first twentieth of all steps, then falls to zero.
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.05 * steps), 1) * (1 - step / steps)
    )
    kept = [each for each in (model, optimizer, rate, compression) if each is not None]
    # What ranks have not sent yet is each rank's own: one file a rank.
    file = f"{options.state}-{spec.replace(':', '-')}-{rank}.pt" if options.state else None
    first, seconds = 1, 0.0
    if file and os.path.exists(file):
        first, seconds, states = torch.load(file)
        for each, state in zip(kept, states):
            each.load_state_dict(state)
    for epoch in range(first, options.epochs + 1):
        generator = torch.Generator().manual_seed(1000 * options.seed + epoch)
        order = torch.randperm(len(images), generator=generator)[: batches * options.batch * size]
        started = time.perf_counter()
        for mine in order.view(batches, size, -1)[:, rank]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
            rate.step()
        seconds += time.perf_counter() - started
        found = accuracy(model.module, *data["test"])
        if rank == 0:
            sent = compression.stats()["bytes_sent"] / 1e6 if compression else None
            megabytes = "" if sent is None else f", {sent:.1f} MB sent"
            print(
                f"{spec}: epoch {epoch}, {100 * found:.2f} %, {seconds:.1f} s{megabytes}",
                flush=True,
            )
        if file:
            torch.save((epoch + 1, seconds, [each.state_dict() for each in kept]), file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compression", nargs="+", default=["plain"], metavar="SPEC")
    parser.add_argument("--epochs", type=int, help="default: 3, or 60 where there are few images")
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.15, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, help="train on the first so many images only")
    parser.add_argument("--data", help="folder of IDX files; default: as pytorch_images.py")
    parser.add_argument("--state", help="what names of files with the state begin with")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _, arrays = load(options.data)
    data = {part: [torch.from_numpy(array) for array in arrays] for part, arrays in arrays.items()}
    data["train"] = [part[: options.images] for part in data["train"]]
    options.epochs = options.epochs or (3 if len(data["train"][0]) > 10000 else 60)
    for spec in options.compression:
        train(spec, data, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
