"""Trains a small convolutional network on ranks that have models of their own, and exchange
compressed messages with their neighbors on a ring:

    horovodrun -np 4 python examples/decentralized.py --algorithm dcd

Prints after each epoch the accuracy of the mean model, and how far ranks are from it.
"""

import argparse

import horovod.torch as hvd
import torch
from images import load
from pytorch_images import accuracy, network
from torch import nn

import horovod_compress.torch as hvdc


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--algorithm", default="dcd", help="dcd, choco, ecd or exact")
    parser.add_argument("--compression", metavar="SPEC", help="default: qsgd:bits=4,norm=max")
    parser.add_argument("--topology", default="ring", help="ring, torus or complete")
    parser.add_argument("--step", type=float, help="choco's, above 0, at most 1")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--images", type=int, help="train on the first so many images only")
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _, arrays = load()
    data = {part: [torch.from_numpy(each) for each in both] for part, both in arrays.items()}
    images, labels = (each[: options.images] for each in data["train"])
    model = network(images.shape[-1], width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4)
    optimizer = hvdc.DecentralizedOptimizer(
        optimizer,
        model.named_parameters(),
        compression=options.compression,
        topology=options.topology,
        algorithm=options.algorithm,
        step=options.step,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    # The same number of steps on all ranks.
    batches = len(images) // (options.batch * hvd.size())
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * batches)
    test = [part[hvd.rank() :: hvd.size()] for part in data["test"]]
    for epoch in range(1, options.epochs + 1):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        mine = order[: batches * options.batch * hvd.size()].view(hvd.size(), batches, -1)
        for batch in mine[hvd.rank()]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            rate.step()
        # The buffers too: batch normalization's statistics are each rank's own.
        with optimizer.mean_parameters(model.buffers()):
            right = accuracy(model, *test)
        apart, stats = optimizer.consensus(), optimizer.stats()
        if hvd.rank() == 0:
            print(
                f"epoch {epoch}: {100 * right:.2f} % of the test images; ranks are "
                f"{max(apart):.4f} apart; {stats['bytes_sent'] / stats['steps'] / 1e3:.0f} kB a "
                f"step, {stats['ratio']:.1f} times less than float32"
            )


if __name__ == "__main__":
    main()
