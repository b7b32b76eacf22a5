"""Loss scales end here: algorithms and their state see gradients in true units.

Drivers give each step the factor that brings its gradients to true units, as `Step.scale`. What is
kept of gradients needs them in those; payloads that leave nothing behind travel as they come, and
so do those whose state is of results, because half precision has more digits for them.
"""

import dataclasses
from typing import Any

import numpy as np

from .. import kernels
from ..compressors.base import Asking, Step, multiply
from ..protocol.requests import Outcome, TensorStep
from .extension import Begin, Extension, with_each
from .tensor import Tensor


def to_true_units(loss_scale: float) -> float:
    """The `Step.scale` of gradients that come times a loss scale.

    Raises:
        RuntimeError: float32 may have no room for such gradients.
    """
    if not 2.0**-60 <= loss_scale <= 2.0**60:
        raise RuntimeError(
            f"the loss scale has come to {loss_scale}: were gradients not finite in every step?"
        )
    return 1 / loss_scale


class LossScale(Extension):
    """Takes the loss scale off gradients, and puts it on results."""

    def around(self, begin: Begin, tensor: Tensor, grad: np.ndarray, step: Step) -> TensorStep:
        if step.scale == 1:
            return begin(tensor, grad, step)
        loss_scale = 1 / step.scale
        if tensor.keeps_gradients:
            step = dataclasses.replace(step, gain=loss_scale)
            if tensor.compressor.traits.takes_scale:
                return begin(tensor, grad, step)
            grad *= np.float32(step.scale)
            if step.squares is not None:
                np.multiply(step.squares, np.float32(step.scale**2), out=step.squares)
            return begin(tensor, grad, dataclasses.replace(step, scale=1.0))
        of_results = bool(tensor.compressor.roles.keys() & tensor.state.arrays.keys())
        gain = loss_scale if tensor.compressor.traits.ignores_size else 1.0
        if of_results:
            gain = step.scale
        limit = step.clip_norm and step.clip_norm * loss_scale
        step = dataclasses.replace(step, scale=1.0, gain=gain, clip_norm=limit)

        def put_on(request: Any) -> Asking[None]:
            if isinstance(request, Outcome):
                largest = yield from kernels.max_abs(request.result)
                request.finite &= multiply(request.result, loss_scale, largest)

        inner = begin(tensor, grad, step)
        return with_each(inner, put_on) if of_results else inner
