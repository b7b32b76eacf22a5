"""Steps that can be discarded: each begins with a copy of the state, and goes back to it."""

from typing import Any, Dict, Sequence

import numpy as np

from ..compressors.base import Step
from .checkpoint import copies
from .driver import Driver
from .feature import Feature
from .tensor import Tensor


class Snapshots(Feature):
    """Copies each tensor's state before its step. A step that fails leaves no trace in the state
    then; without a copy its gradients stay in residuals."""

    def __init__(self) -> None:
        # By tensor and array, of the last step. The memory is used again.
        self._before: Dict[str, Dict[str, np.ndarray]] = {}

    def begin(
        self, tensors: Sequence[Tensor], grads: Sequence[Any], steps: Sequence[Step]
    ) -> Sequence[Step]:
        for tensor, grad in zip(tensors, grads):
            if type(grad) is not np.ndarray:
                # Else each step's copy would come to the CPU.
                tensor.state.follow(grad)
            tensor.compressor.apply_pending(tensor.state)
            earlier = self._before.get(tensor.name, {})
            self._before[tensor.name] = copies(tensor.state.arrays, earlier)
        return steps

    def ended(self, tensors: Sequence[Tensor], succeeded: bool) -> None:
        if not succeeded:
            for tensor in tensors:
                self.restore(tensor)

    def restore(self, tensor: Tensor) -> None:
        """Makes a tensor's state what it was before its last step."""
        tensor.compressor.apply_pending(tensor.state)
        arrays = tensor.state.arrays
        for key, array in self._before[tensor.name].items():
            np.copyto(arrays.setdefault(key, np.empty_like(array)), array)
        tensor.state.replaced()


def discard(driver: Driver) -> None:
    """Forgets a driver's last step, on all ranks alike: its result is not used.

    Raises:
        RuntimeError: steps are not discardable, or one is under way.
    """
    snapshots = driver.features.get("discard")
    if not isinstance(snapshots, Snapshots):
        raise RuntimeError(
            "only a compression that was made with discardable=True can forget a step"
        )
    for tensor in driver.fail_last():
        snapshots.restore(tensor)
