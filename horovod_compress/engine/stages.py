"""Where the tensors of a step are: what each waits for."""

import dataclasses
import enum
from typing import Any, Dict, Iterable, List

from ..protocol.requests import TensorStep
from .tensor import Tensor


class Stage(enum.IntEnum):
    """A tensor's place in its step: what it waits for."""

    # Other small tensors, with which it is encoded.
    ENCODE = 0
    # A kernel's call before the last exchange, made together with other tensors'.
    CALL = 1
    # The norm of the whole step.
    NORM = 2
    # An exchange that is not the last.
    ROUND = 3
    # The gather of all small tensors' payloads.
    SMALL = 4
    # The exchange of all tensors together.
    JOINT = 5
    # The last exchange, and the reducer.
    LAST = 6
    # A kernel's call after that.
    DECODE = 7
    # Nothing: it is at work, or has failed at that.
    AT_WORK = 8
    # The end of the step.
    DONE = 9


# Members of an enum are slow to look up in Python 3.11.
ENCODE, CALL, NORM, ROUND, SMALL, JOINT, LAST, DECODE, AT_WORK, DONE = Stage


@dataclasses.dataclass
class Pending:
    """A tensor's step that is under way."""

    tensor: Tensor
    step: TensorStep
    # Until it is done.
    grad: Any
    stage: Stage = AT_WORK
    # An array, from the first request on.
    carrier: Any = None
    request: Any = None  # the Request that it waits for
    # A function that waits for the collective of that request, where one was started.
    wait: Any = None


# Elements on a device that are worth launches of their own: passes over so many take some 100 µs,
# and as much to launch.
TOGETHER = 1 << 24


def first_of(pendings: Iterable[Pending]) -> List[Pending]:
    """As many as have calls worth making together, so that more take no more memory."""
    chosen, numel = [], 0
    for pending in pendings:
        chosen.append(pending)
        numel += pending.grad.size
        if numel >= TOGETHER:
            break
    return chosen


class Stages:
    """The tensors of one step on one rank.

    all: those submitted, by name; open: those of them that are neither finished nor have failed;
    at: how many are at each stage.
    """

    def __init__(self) -> None:
        self.all: Dict[str, Pending] = {}
        self.open: Dict[str, Pending] = {}
        self.at = [0] * len(Stage)

    def add(self, pending: Pending) -> None:
        self.all[pending.tensor.name] = self.open[pending.tensor.name] = pending
        self.at[pending.stage] += 1

    def move(self, pending: Pending, stage: Stage) -> None:
        self.at[pending.stage] -= 1
        self.at[stage] += 1
        pending.stage = stage

    def waiting(self, stage: Stage) -> List[Pending]:
        """Those at a stage, in the order in which they were submitted."""
        return [pending for pending in self.all.values() if pending.stage is stage]

    def take(self, pendings: Iterable[Pending]) -> None:
        """Puts tensors to work."""
        for pending in pendings:
            self.move(pending, AT_WORK)

    @property
    def brought(self) -> bool:
        """True if the reducer has brought all results that come."""
        return len(self.open) <= self.at[DECODE] + self.at[AT_WORK]

    def let_go(self, pending: Pending) -> None:
        """Nothing more comes of a tensor until the step ends. Until then its arrays would stay in
        memory."""
        self.open.pop(pending.tensor.name, None)
        self.move(pending, DONE)
        pending.grad = pending.carrier = pending.request = pending.wait = None
