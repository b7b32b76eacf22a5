"""Tensors whose learning rate is 0: what is unsent of their gradients does not come later.

As long as it is 0, their steps work on residuals that begin as zeros and are dropped afterwards.
What was kept before waits. Messages are those of other steps, whatever rate a rank has. An
optimizer that learns of results at a rate of 0 too, as Adam does, gets what it always gets.
"""

from typing import Any, Dict, Sequence, Set

import numpy as np

from ..compressors.base import Step
from ..compressors.state import SHARED, zeros
from .debt import DEBT
from .feature import Feature
from .tensor import Tensor


class Frozen(Feature):
    """Keeps a tensor's residuals as they are while its learning rate is 0. Momentum goes on, as an
    optimizer's does."""

    def __init__(self) -> None:
        # By tensor: the arrays that are not in its state now, of those that are exchanged.
        self._apart: Dict[str, Dict[str, np.ndarray]] = {}
        # Tensors in whose step they are exchanged.
        self._open: Set[str] = set()

    def concerns(self, tensors: Sequence[Tensor], steps: Sequence[Step]) -> bool:
        return bool(self._apart) or any([step.lr is not None and step.frozen for step in steps])

    def begin(
        self, tensors: Sequence[Tensor], grads: Sequence[Any], steps: Sequence[Step]
    ) -> Sequence[Step]:
        for tensor, step in zip(tensors, steps):
            if step.frozen:
                self._exchange(tensor)
                self._open.add(tensor.name)
            else:
                self._apart.pop(tensor.name, None)
        return steps

    def ended(self, tensors: Sequence[Tensor], succeeded: bool) -> None:
        for tensor in tensors:
            if tensor.name in self._open:
                self._open.remove(tensor.name)
                self._exchange(tensor)

    def _exchange(self, tensor: Tensor) -> None:
        """Exchanges what the tensor keeps for what it keeps at a rate of 0, or back."""
        tensor.compressor.apply_pending(tensor.state)
        arrays, roles = tensor.state.arrays, tensor.compressor.roles
        own = [key for key in arrays if key != "u" and roles.get(key) is not SHARED]
        kept = {key: arrays.pop(key) for key in own}
        apart = self._apart.get(tensor.name)
        if apart is None:
            apart = {
                key: zeros(array.size).reshape(array.shape).astype(array.dtype, copy=False)
                for key, array in kept.items()
                if key != DEBT
            }
        arrays.update(apart)
        self._apart[tensor.name] = kept
