"""A model whose gradients are what it is told, and whether an exchange loses anything of them."""

import alike
import numpy as np
import torch
import torch.distributed as dist
from torch import nn

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


def held_back(compression):
    """{name: the mean over ranks of what is not sent yet}."""
    compression._exchange.arrays()
    residuals = {
        tensor.name: np.zeros(tensor.numel) if tensor.residual is None else tensor.residual
        for tensor in compression._exchange.tensors
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
