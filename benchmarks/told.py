"""A model whose backward pass only writes gradients: what a step of a network costs beside its
computing."""

import time

import torch


class _Told(torch.autograd.Function):
    """A scalar whose gradient is what it is told to be, after a pause."""

    @staticmethod
    def forward(ctx, param, gradient, pause):
        ctx.gradient, ctx.pause = gradient, pause
        return param.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        if ctx.pause:
            time.sleep(ctx.pause)
        return ctx.gradient, None, None


class Model(torch.nn.Module):
    """Parameters of {name: shape}. pause: seconds that backward waits at each of them."""

    def __init__(self, shapes, pause=0.0):
        super().__init__()
        self.names, self.pause = list(shapes), pause
        self.all = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes.values())
        for param in self.all:
            param.grad = torch.zeros_like(param)

    @property
    def named(self):
        """[(name, parameter)]"""
        return list(zip(self.names, self.all))

    def forward(self, gradients):
        """Makes gradients zero, and returns the loss that has those of {name: tensor}."""
        # Not None: new memory in every step would take longer than all the rest, and never equally
        # long.
        self.zero_grad(set_to_none=False)
        return sum(_Told.apply(param, gradients[name], self.pause) for name, param in self.named)


def tensors(steps, device="cpu"):
    """Gradients of steps, [{name: array}], as tensors on a device."""
    return [
        {name: torch.from_numpy(array).to(device) for name, array in step.items()} for step in steps
    ]
