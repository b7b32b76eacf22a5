"""Trains a small convolutional network on several ranks, with any compression:

    horovodrun -np 2 python examples/pytorch_images.py
        --compression dgc:ratio=0.001,warmup_steps=300

Compressions: none and fp16 are Horovod's own; everything else is a spec of horovod_compress.
Several are trained one after the other, from the same seed. The clock stands still while accuracy
is measured. --events writes what happens as lines of JSON (scripts/demo.py draws from them).
"""

import argparse
import contextlib
import json
import time

import horovod.torch as hvd
import torch
from images import load
from torch import nn

import horovod_compress.torch as hvdc

# Measurements of accuracy in an epoch.
POINTS = 8


def network(side, width=32, strided=False):
    """Two convolutions and two linear layers: 421 642 parameters for 28 × 28 images. strided: the
    convolutions move by two pixels instead of being pooled, which takes a quarter of the computing;
    340 586 parameters with a width of 26."""
    first, second = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, padding=1)
    pooled = [first, nn.MaxPool2d(2), nn.ReLU(), second, nn.MaxPool2d(2), nn.ReLU()]
    if strided:
        first, second = (
            nn.Conv2d(1, width, 5, stride=2, padding=2),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        )
        pooled = [first, nn.ReLU(), second, nn.ReLU()]
    return nn.Sequential(
        *pooled,
        nn.Flatten(),
        nn.Linear(2 * width * (side // 4) ** 2, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def accuracy(model, images, labels):
    """Share of all ranks' images that the model gets right; each rank looks at its own."""
    model.eval()
    with torch.no_grad():
        right = sum(
            (model(x).argmax(1) == y).sum() for x, y in zip(images.split(500), labels.split(500))
        )
    model.train()
    counts = hvd.allreduce(torch.tensor([float(right), float(len(labels))]), op=hvd.Sum)
    return (counts[0] / counts[1]).item()


def train(spec, data, options, report):
    torch.manual_seed(options.seed)
    images, labels = data["train"]
    model = network(images.shape[-1], options.width, options.strided)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-4)

    compression = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}.get(spec)
    if compression is None:
        compression = hvdc.Compression.from_spec(spec)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    batches = len(images) // (options.batch * hvd.size())
    steps = options.epochs * batches
    # The rate rises over the first twentieth of all steps, then falls to zero.
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.05 * steps), 1) * (1 - step / steps)
    )
    test = [part[hvd.rank() :: hvd.size()] for part in data["test"]]
    parameters = sum(p.numel() for p in model.parameters())

    def bytes_sent(step):
        own = {"none": 4, "fp16": 2}.get(spec)
        return own * parameters * step if own else compression.stats()["bytes_sent"]

    report(event="start", spec=spec, steps=steps, parameters=parameters)
    seconds, step = 0.0, 0
    for epoch in range(1, options.epochs + 1):
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(1000 * options.seed + epoch)
        )
        for mine in order[: batches * options.batch * hvd.size()].view(batches, hvd.size(), -1)[
            :, hvd.rank()
        ]:
            started = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[mine]), labels[mine]).backward()
            optimizer.step()
            rate.step()
            seconds += time.perf_counter() - started
            step += 1
            if step * POINTS // batches > (step - 1) * POINTS // batches:
                report(
                    event="point",
                    epoch=epoch,
                    ends_epoch=step % batches == 0,
                    step=step,
                    seconds=seconds,
                    accuracy=accuracy(model, *test),
                    bytes=bytes_sent(step),
                )
            elif step % 5 == 0:
                report(event="step", step=step)
    report(event="end")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compression", nargs="+", default=["none"], metavar="SPEC")
    parser.add_argument("--epochs", type=int, help="default: 3, or 60 where there are few images")
    parser.add_argument("--batch", type=int, default=64, help="images per rank and step")
    parser.add_argument(
        "--width", type=int, default=32, help="channels of the first convolution (default: 32)"
    )
    parser.add_argument(
        "--strided",
        action="store_true",
        help="convolutions of stride 2 instead of pooling: less computing",
    )
    parser.add_argument(
        "--lr", type=float, default=0.15, help="the highest learning rate (default: 0.15)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--data", help="folder of IDX files; default: Fashion-MNIST if installed, else the digits"
    )
    parser.add_argument("--images", type=int, help="train on the first so many images only")
    parser.add_argument("--events", help="file to write events to, as lines of JSON")
    options = parser.parse_args()

    hvd.init()
    torch.set_num_threads(1)
    name, arrays = load(options.data)
    data = {part: [torch.from_numpy(array) for array in arrays] for part, arrays in arrays.items()}
    data["train"] = [part[: options.images] for part in data["train"]]
    with (
        open(options.events, "w")
        if options.events and hvd.rank() == 0
        else contextlib.nullcontext() as file
    ):

        def report(**event):
            if hvd.rank() != 0:
                return
            if file:
                print(json.dumps(event), file=file, flush=True)
            elif event["event"] != "step":
                print(event, flush=True)

        options.epochs = options.epochs or (3 if len(data["train"][0]) > 10000 else 60)
        report(
            event="data",
            name=name,
            images=len(data["train"][0]),
            ranks=hvd.size(),
            epochs=options.epochs,
        )
        for spec in options.compression:
            train(spec, data, options, report)


if __name__ == "__main__":
    main()
