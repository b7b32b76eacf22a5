"""A model whose gradients are what it is told, and whether an exchange loses anything of them."""

import alike
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_compress import ddp, simulate

from .training import everywhere


class Holder(nn.Module):
    """Parameters whose gradients are what they are told to be; those of which nothing is told are
    not used."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.held = nn.ParameterDict(
            {
                name: nn.Parameter(torch.zeros(shape, dtype=dtype))
                for name, shape in alike.SHAPES.items()
            }
        )

    def forward(self, gradients):
        return sum((self.held[name] * gradient).sum() for name, gradient in gradients.items())


def told(rank, step, dtype=torch.float32):
    """The gradients of a step on a rank, known to all ranks."""
    return {n: torch.from_numpy(g).to(dtype) for n, g in alike.gradients(rank, step).items()}


def assert_simulated(spec, assert_same, state=True, **options):
    """That this rank has what `simulate` gives for what all ranks are told: gradients, bytes and,
    where asked, residuals. assert_same(found, expected, what) compares arrays."""
    rank, every = dist.get_rank(), range(dist.get_world_size())
    steps = [
        [{f"held.{n}": g for n, g in alike.gradients(r, step).items()} for r in every]
        for step in range(alike.STEPS)
    ]
    expected = simulate(spec, steps, **options)
    model = DDP(Holder(), bucket_cap_mb=0.01)
    # Takes nothing over: momentum would be DGC's.
    optimizer = torch.optim.Adam(model.parameters())
    compression = ddp.compress(model, optimizer, spec)
    for step, means in enumerate(expected.mean):
        optimizer.zero_grad()
        model(told(rank, step)).backward()
        for name, param in model.module.named_parameters():
            assert_same(param.grad.numpy(), means[name], f"{spec}: {name} in step {step}")
        optimizer.step()
    kept = compression.state_dict()["tensors"]
    for name, arrays in expected.state[rank].items() if state else ():
        assert kept[name].keys() == arrays.keys()
        for key, array in arrays.items():
            assert_same(kept[name][key], array, f"{spec}: {key} of {name}")
    found = alike.sent_of_tensors(compression)
    sent = sum(step[rank] for step in expected.bytes_sent)
    assert found == sent, f"{spec}: {found} bytes sent, not {sent}"


def held_back(compression):
    """{name: the mean over ranks of what is not sent yet}."""
    compression._session.exchange.arrays()
    residuals = {
        tensor.name: np.zeros(tensor.numel) if tensor.residual is None else tensor.residual
        for tensor in compression._session.exchange.tensors
    }
    return {
        name: everywhere(torch.from_numpy(residual)).double().mean(0)
        for name, residual in residuals.items()
    }


def assert_nothing_lost(model, compression, gradients, tolerance=1e-5):
    """After steps with a learning rate of 1 and without momentum, from zeros, what was applied and
    what is held back make up the mean over ranks of this rank's gradients, of all steps."""
    held = held_back(compression)
    for name, param in model.module.named_parameters():
        short = name.partition(".")[2]
        mine = sum(g[short].double() for g in gradients if short in g)
        mine = mine if torch.is_tensor(mine) else torch.zeros(param.shape, dtype=torch.float64)
        mean = everywhere(mine).mean(0)
        applied = -param.detach().double() + held[name].view(param.shape)
        error = (applied - mean).abs().max().item()
        assert error <= tolerance * dist.get_world_size() * max(mean.abs().max().item(), 1), (
            f"{name}: {error:.2e} of {mean.abs().max():.2e} is lost"
        )
