"""From one compressor of a tensor to another: what results are still to bring is not lost.

The debt of a state is what its later results would bring of earlier gradients. The same algorithm
goes on with its arrays. Another one gets the debt into its residual, or where it has none the debt
stays beside its state, as an array of its own, until a step that succeeds has brought it densely.
"""

from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from ..compressors.base import Compressor, Step, with_fields
from ..compressors.state import State
from ..compressors.wrapper import Wrapper, unwrapped
from ..kernels import beside
from . import checkpoint
from .feature import Feature
from .tensor import Tensor

# The array of a debt, as long as the tensor and this rank's own. Saved states have it by this name.
DEBT = "owed"
checkpoint.BESIDE.add(DEBT)


def debt_of(compressor: Compressor, state: State) -> Optional[np.ndarray]:
    """The debt of an algorithm's own arrays, up to date only after `apply_pending`; None where
    there is none."""
    debt, u = compressor.residual(state), state.arrays.get("u")
    # What later steps bring of a u of 1 where no gradients follow: m + m² + …
    m, nesterov = compressor.policy.m, compressor.policy.nesterov
    to_come = 0.0 if m == 1 else m / (1 - m)
    if u is not None and m:
        # Without a residual, u is of results, as SGD's buffer is.
        of_buffer = m if debt is None and nesterov else 1
        later = np.float32(to_come * of_buffer) * u
        debt = later if debt is None else debt + later
    if isinstance(compressor, Wrapper) and debt is not None:
        return compressor.whole(debt)
    return debt


def late(compressor: Compressor, debt: np.ndarray) -> np.ndarray:
    """The gradient of which the algorithm's momentum makes a debt: g + m·g + m²·g + …"""
    # An algorithm of another package may have an option m that is no momentum.
    m = compressor.policy.m if "u" in compressor.roles else 0
    return debt if m in (0, 1) else np.float32(1 - m) * debt


def _accepts(compressor: Compressor, state: State, debt: np.ndarray) -> bool:
    """Adds a debt to a state that has a place for it; returns whether it has, alike on all
    ranks."""
    residual, u, policy = compressor.residual(state), state.arrays.get("u"), compressor.policy
    # A residual that follows the learning rate would have to say for which one the debt is meant.
    if residual is None or policy.follow_lr or _pays(compressor):
        return False
    if u is None or policy.m == 1:
        residual += debt
        return True
    gradient = late(compressor, debt)
    u += np.float32(policy.m if policy.nesterov else 1) * gradient
    residual += np.float32(1 + policy.m if policy.nesterov else 1) * gradient
    return True


class Handover(Feature):
    """Hands debts over, and brings those that have no other place."""

    def __init__(self) -> None:
        # Whether it was taken for granted that the reducer averages.
        self.takes_average = False
        # By tensor, in its step: the debt that is added to its payload; None where that has it.
        self._paying: Dict[str, Optional[np.ndarray]] = {}

    def concerns(self, tensors: Sequence[Tensor], steps: Sequence[Step]) -> bool:
        return any([DEBT in tensor.state.arrays for tensor in tensors])

    def hand_over(
        self, earlier: Tensor, tensor: Tensor, gain: float, factor: Optional[float]
    ) -> None:
        """Has a tensor go on from what it kept under another compressor.

        Args:
            earlier: the tensor as it was, with arrays that are up to date.
            tensor: the same tensor under its new compressor.
            gain: what the optimizer's own momentum makes of a result now, over the same before.
            factor: what the reducer makes of a 1 on each rank; None: not known yet, taken for 1.
        """
        tensor.counters, state, old = earlier.counters, tensor.state, earlier.compressor
        state.overflows, arrays = earlier.state.overflows, dict(earlier.state.arrays)
        left = arrays.pop(DEBT, None)
        if gain == 1 and _kind(old, arrays) == _kind(tensor.compressor, state.arrays):
            state.arrays.update(arrays if left is None else {**arrays, DEBT: left})
            state.factor = earlier.state.factor
            return
        debt = debt_of(old, earlier.state)
        # Of results, and so alike on all ranks, which will all bring it.
        if debt is not None and old.residual(earlier.state) is None and debt.any():
            debt = debt / np.float32(factor or 1)
            self.takes_average |= factor is None
        found = [each for each in (debt, left) if each is not None]
        if found:
            debt = np.float32(1 / gain) * np.sum(found, axis=0)
            if not _accepts(tensor.compressor, state, debt):
                state.arrays[DEBT] = debt

    def check_host(self, factor: float) -> None:
        """Raises RuntimeError where `hand_over` has taken the reducer's factor for another one."""
        if self.takes_average and abs(factor - 1) > 1e-6:  # which predivision may round
            raise RuntimeError(
                "a loaded state was switched to another algorithm before the first gradient, when "
                "it was not known that the host does not average: what small tensors' "
                "momentum is still to bring would come times the number of ranks. Load the states "
                "again, and call switch() after the first step, or have it average"
            )
        # Ranks that come later change nothing of what was handed over.
        self.takes_average = False

    @staticmethod
    def owing(tensors: Sequence[Tensor]) -> List[str]:
        """Returns the names of tensors that owe a debt, and go dense to bring it."""
        owing = [tensor for tensor in tensors if DEBT in tensor.state.arrays]
        return [tensor.name for tensor in owing if not _pays(tensor.compressor)]

    def begin(
        self, tensors: Sequence[Tensor], grads: Sequence[Any], steps: Sequence[Step]
    ) -> Sequence[Step]:
        for tensor, step in zip(tensors, steps):
            debt = tensor.state.arrays.get(DEBT)
            if debt is None:
                continue
            if _pays(tensor.compressor):
                self._paying[tensor.name] = None
                continue
            # It is alone in its group.
            debt = late(tensor.compressor, debt)
            if not tensor.keeps_gradients:
                # Its payload travels as the gradient comes.
                debt = np.float32(1 / step.scale) * debt
            self._paying[tensor.name] = debt
            # A graph has an operation for the type that `encode` makes, which may be float16.
            steps = with_fields(steps, dense=tensor.declared[0].verb != "reducer")
        return steps

    def encoded(self, tensors: Sequence[Tensor], payloads: Sequence[Any]) -> None:
        # In a residual, where it would stay after a failed step, it never is.
        for tensor, payload in zip(tensors, payloads):
            debt = self._paying.get(tensor.name)
            if debt is not None:
                payload.array += beside(debt, payload.array)

    def ended(self, tensors: Sequence[Tensor], succeeded: bool) -> None:
        for tensor in tensors:
            if tensor.name in self._paying:
                del self._paying[tensor.name]
                if succeeded:
                    tensor.state.arrays.pop(DEBT, None)


def _pays(compressor: Compressor) -> bool:
    return isinstance(compressor, Wrapper) and compressor.pays_debts


def _kind(compressor: Compressor, arrays: Dict[str, np.ndarray]) -> Any:
    """Where this is alike, arrays mean the same."""
    shapes = {key: array.shape for key, array in arrays.items()}
    return type(unwrapped(compressor)), compressor.id, shapes
