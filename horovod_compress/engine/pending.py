"""Steps of groups that are under way in a driver that starts them while gradients come."""

import enum
from typing import Any, Callable, Dict, List, Sequence, Set, Tuple

from ..compressors.base import Step
from .extension import Extension
from .group import Group
from .step import GroupStep, end_step, group_step
from .tensor import Tensor


class Stage(enum.IntEnum):
    """A group's place in its step: what it waits for."""

    # The rest of its tensors.
    FILLING = 0
    # The norm of the whole step.
    NORM = 1
    # Payloads, which a device has still to bring.
    LANDING = 2
    # An exchange that is not the last.
    ROUND = 3
    # The exchange of all groups together.
    JOINT = 4
    # The last exchange, and the reducer.
    LAST = 5
    # The end of the step.
    DONE = 6
    # Nothing: its step has failed.
    FAILED = 7


# Members of an enum are slow to look up in Python 3.11.
FILLING, NORM, LANDING, ROUND, JOINT, LAST, DONE, FAILED = Stage


class Pending:
    """A group's step. left: how many of its tensors are still to come."""

    def __init__(self, group: Group, left: int) -> None:
        self.group, self.left = group, left
        # What has come, until the step begins: place, tensor, gradient and Step of each.
        self.come: List[Tuple[int, Tensor, Any, Step]] = []
        # Of GPU streams on which gradients are made: their numbers, by kernels and device.
        self._streams: Dict[Any, Set[Any]] = {}
        self.stage = FILLING if left else DONE
        # Once the step has begun.
        self.tensors: Sequence[Tensor] = ()
        self.step: Any = None  # a GroupStep
        # The Request that it waits for, and functions that wait for what that asks for.
        self.request: Any = None
        self.waits: List[Callable[[], Any]] = []

    def follow(self, grad: Any) -> None:
        """Has the step wait for what makes a gradient on a device."""
        self._streams.setdefault((grad.kernels, grad.device), set()).add(grad.stream())

    def begin(self, features: Callable[..., List[Extension]]) -> GroupStep:
        """Begins the step of what has come, in the group's order. features: returns those that
        tensors and their steps have to do with."""
        _, self.tensors, grads, steps = map(list, zip(*sorted(self.come)))
        self.come = []
        for (its, device), streams in self._streams.items():
            its.wait_for(streams, device)
        concerned = features(self.tensors, steps)
        self.step = group_step(self.group, self.tensors, grads, steps, concerned)
        return self.step

    def end(self, succeeded: bool) -> None:
        """Ends the step, if it has begun."""
        if self.step is not None:
            end_step(self.step, succeeded)
