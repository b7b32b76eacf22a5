"""What tests of sums over samples share: a loop over samples, by autograd, and a model that makes
them hard."""

import torch
from torch import nn

from horovod_compress.torch_common.moments import Moments

B = 5


def collector(module, moments="per_sample"):
    return Moments(moments, dict(module.named_parameters()))


def loss_of(output):
    """A mean over samples, in which every element of the output has a weight of its own."""
    weights = torch.linspace(0.1, 1, output[0].numel()).reshape(output.shape[1:]).to(output.dtype)
    return (output.sin() * weights).flatten(1).sum(1).mean()


def loop(module, *inputs, loss=loss_of):
    """{name: Σ_z (g_z / B)²}, by autograd on each sample alone."""
    named, batch = dict(module.named_parameters()), len(inputs[0])
    sums = {name: torch.zeros(param.shape) for name, param in named.items()}
    for z in range(batch):
        gradients = torch.autograd.grad(
            loss(module(*(x[z : z + 1] for x in inputs))) / batch, list(named.values())
        )
        for name, gradient in zip(named, gradients):
            sums[name] += gradient.float() ** 2
    return sums


def assert_taken(collector, sums, rtol=1e-4):
    for name, expected in sums.items():
        taken = collector.take(name)
        assert (
            taken is not None and taken.dtype == "float32" and taken.shape == (expected.numel(),)
        ), name
        # Of the largest, because what is squared are sums that may cancel.
        atol = rtol * expected.max().item()
        torch.testing.assert_close(
            torch.from_numpy(taken),
            expected.flatten(),
            rtol=rtol,
            atol=atol,
            msg=lambda m: f"{name}: {m}",
        )
        assert collector.take(name) is None, "the sums are handed over once"


def tokens(*shape, high=7):
    return torch.randint(0, high, shape)


class Net(nn.Module):
    """What makes models hard: in-place activations, a layer used twice, a residual, keyword
    arguments."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.shared = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu_(self.norm(self.conv(input=x))).mean(3).view(len(x), 2, 8)
        for _ in range(2):
            y = self.shared(x)
            y += x
            x = torch.relu_(y)
        return self.out(x)
