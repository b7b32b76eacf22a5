"""Gradients that are what they are told to be: a model for them, and what an exchange makes of
them."""

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvdc


class Holder(nn.Module):
    """Parameters whose gradients are what they are told to be."""

    def __init__(self):
        super().__init__()
        shapes = {"matrix": (40, 50), "kernel": (8, 6, 3, 3), "wide": (3, 900), "bias": (40,)}
        self.held = nn.ParameterDict(
            {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
        )

    def forward(self, gradients):
        return sum((self.held[name] * gradient).sum() for name, gradient in gradients.items())


def told(rank, step):
    """The gradients of a step on a rank, known to all ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {n: torch.randn(p.shape, generator=generator) for n, p in Holder().held.items()}


def reduced(spec, steps=4, process_set=hvd.global_process_set):
    """(the gradients of every step after the exchange, the compression) of a spec; hooks fire in
    another order on every rank."""
    model = Holder()
    optimizer = torch.optim.Adam(model.parameters())
    compression = hvdc.Compression.from_spec(
        spec, optimizer, named_parameters=model.named_parameters(), process_set=process_set
    )
    wrapped = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), compression, process_set=process_set
    )
    results = []
    for step in range(steps):
        named = list(told(hvd.rank(), step).items())
        model.zero_grad()
        model(dict(named[hvd.rank() :] + named[: hvd.rank()])).backward()
        wrapped.synchronize()
        results.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        with wrapped.skip_synchronize():
            wrapped.step()
    return torch.stack(results), compression
