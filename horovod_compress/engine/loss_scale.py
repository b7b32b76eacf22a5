"""Loss scales end here: algorithms and their state see gradients in true units.

Drivers give each step the factor that brings its gradients to true units, as `Step.scale`. What is
kept of gradients needs them in those; payloads that leave nothing behind travel as they come, and
so do those whose state is of results, because half precision has more digits for them.
"""

from typing import Any, Dict, Sequence

import numpy as np

from .. import kernels
from ..compressors.base import Step, multiply, with_fields
from .feature import Feature
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


class LossScale(Feature):
    """Takes the loss scale off gradients, and puts it on results."""

    def __init__(self) -> None:
        # By tensor: what its result is multiplied by.
        self._to_come: Dict[str, float] = {}

    def concerns(self, tensors: Sequence[Tensor], steps: Sequence[Step]) -> bool:
        return steps[0].scale != 1

    def begin(
        self, tensors: Sequence[Tensor], grads: Sequence[Any], steps: Sequence[Step]
    ) -> Sequence[Step]:
        compressor, step = tensors[0].compressor, steps[0]
        loss_scale = 1 / step.scale
        # On hosts, some tensors of a group may owe a debt.
        if any(tensor.keeps_gradients for tensor in tensors):
            if compressor.traits.takes_scale:
                return with_fields(steps, gain=loss_scale)
            for grad, each in zip(grads, steps):
                grad *= np.float32(step.scale)
                if each.squares is not None:
                    np.multiply(each.squares, np.float32(step.scale**2), out=each.squares)
            return with_fields(steps, gain=loss_scale, scale=1.0)
        gain = loss_scale if compressor.traits.ignores_size else 1.0
        # Momentum that begins later may have begun for some.
        if any(compressor.roles.keys() & tensor.state.arrays.keys() for tensor in tensors):
            # The state is of results.
            gain = step.scale
            self._to_come.update((tensor.name, loss_scale) for tensor in tensors)
        limit = step.clip_norm and step.clip_norm * loss_scale
        return with_fields(steps, scale=1.0, gain=gain, clip_norm=limit)

    def decoded(
        self, tensors: Sequence[Tensor], results: Sequence[Any], finite: Sequence[bool]
    ) -> Sequence[bool]:
        if tensors[0].name not in self._to_come:
            return finite
        largest = kernels.of(results[0]).max_abs(results)
        scales = [self._to_come.pop(tensor.name) for tensor in tensors]
        scaled = multiply(results, scales, largest)
        return [before and after for before, after in zip(finite, scaled)]
