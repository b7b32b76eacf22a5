"""Features beside the algorithms, which stand around the steps of a driver's tensors."""

from typing import Any, Callable

import numpy as np

from ..compressors.base import Asking, Result, Step, result_of
from ..protocol.requests import TensorStep
from .tensor import Tensor

Begin = Callable[[Tensor, np.ndarray, Step], TensorStep]


class Extension:
    """A feature beside the algorithm: watches the steps of a driver's tensors, or changes them.

    A driver holds one for each feature, by the feature's name. Later ones are around earlier ones.
    The methods change nothing unless a subclass overrides them.
    """

    def around(self, begin: Begin, tensor: Tensor, grad: np.ndarray, step: Step) -> TensorStep:
        """Begins a tensor's step.

        Args:
            begin: makes the generator of the step that this one is around.
            tensor: whose step it is.
            grad: its flat gradient of this rank, which may be changed in place.
            step: what is known of the step.

        Returns:
            The step's generator. One of its own must not hold on to arrays while it is suspended.
        """
        return begin(tensor, grad, step)

    def step_ended(self) -> None:
        """Called after a step of all tensors, where the driver knows of its end."""


def with_each(step: Asking[Result], look: Callable[[Any], Any]) -> Asking[Result]:
    """A tensor's step, of which a feature sees each request before the driver does.

    Args:
        step: the generator of the step, or of what comes before its payload.
        look: is called with each request, which it may change. It may call kernels, by
            `yield from`.

    Returns:
        What the step does.
    """
    answer = None
    try:
        while True:
            request = [step.send(answer)]
            yield from result_of(look(request[0]))
            # Nothing of it, or of what came before, stays here while the step waits.
            answer = None
            answer = yield request.pop()
    except StopIteration as stop:
        return stop.value
    finally:
        step.close()
