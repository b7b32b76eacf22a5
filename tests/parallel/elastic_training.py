"""What an elastic job trains, and when its ranks die, join and leave."""

import torch
from torch import nn

STEPS, COMMITTED_EVERY, KILLED_AT = 100, 4, 50
RANKS = {66: (1, 0, 1), 80: (1, 0, 2), 92: (1, 0, 1)}  # by step, on each host


def model_of(spec):
    torch.manual_seed(len(spec))
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 6))


def loss_of(model, step, rank):
    """Of the batch of one rank, which is known to all."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 24, generator=generator), torch.randint(0, 6, (8,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)
