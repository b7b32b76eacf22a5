"""Steps of groups that are under way in a driver that starts them while gradients come."""

import enum
from typing import Any, Callable, Dict, Iterable, List, Sequence, Set, Tuple

import numpy as np

from ..compressors.base import Step
from .contract import check_payloads
from .feature import Feature
from .group import Group
from .step import GroupStep, begin, end_step, end_steps, group_step, subtract_bases
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

    def begin(self, features: Callable[..., List[Feature]]) -> GroupStep:
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


class CarriedStep:
    """The open step of a group whose payloads are the reducer's carriers: tensors come one by one,
    and results that have come are decoded together."""

    stage = LAST

    def __init__(self, group: Group, features: Sequence[Feature]) -> None:
        self.group, self._features = group, features
        self.tensors: List[Tensor] = []
        # Numbers of the tensors that the reducer has, in the order in which they came.
        self.reducing: Dict[str, int] = {}
        # By number from here on. What the reducer made of carriers that are not decoded yet.
        self.arrived: Dict[int, np.ndarray] = {}
        # Memory of gradients, for results.
        self._outs: Dict[int, np.ndarray] = {}
        self._bases: Dict[int, np.ndarray] = {}
        self._gains: List[float] = []

    def carry(self, tensor: Tensor, grad: np.ndarray, step: Step) -> np.ndarray:
        """Begins a tensor's step. Returns the array for the reducer."""
        its, grads, compressor = [tensor], [grad], tensor.compressor
        steps: Sequence[Step] = [step]
        if self._features or step.dense:
            steps = begin(its, grads, steps, self._features)
        if step.base is not None:
            bases, steps = subtract_bases(compressor, grads, steps)
            self._bases.update((len(self.tensors), base) for _, base in bases)
        number = self.reducing[tensor.name] = len(self.tensors)
        self._outs[number] = grad
        self.tensors.append(tensor)
        if self.group.on_device or type(grad) is not np.ndarray:
            self.group.follow(its, grads)
        (step,) = steps
        self._gains.append(step.gain)
        encode = compressor.encode_dense if step.dense else compressor.encode
        payload: Any = encode(grad, tensor.state, step)
        for feature in self._features:
            feature.encoded(its, [payload])
        if not self.group.checked:
            check_payloads(self.group, [payload], grads, [step])
        array, counters = payload.array, tensor.counters
        nbytes = array.nbytes
        counters["dense_bytes"] += grad.nbytes
        counters["bytes_sent"] += nbytes
        counters["bytes_received"] += nbytes
        counters["elements_sent"] += tensor.numel
        return array

    def decode(self, note: Callable[[Sequence[bool]], None]) -> None:
        """Decodes the results that have come. note: is told of each whether it is finite."""
        arrived, self.arrived = self.arrived, {}
        for numbers in self._alike(arrived):
            tensors = [self.tensors[number] for number in numbers]
            reduced = [arrived[number] for number in numbers]
            outs = [self._outs.pop(number) for number in numbers]
            states, gain = [tensor.state for tensor in tensors], self._gains[numbers[0]]
            good: Sequence[bool] = tensors[0].compressor.decode_dense_all(
                reduced, outs, states, gain
            )
            for number, out in zip(numbers, outs) if self._bases else ():
                out += self._bases.pop(number)
            for feature in self._features:
                good = feature.decoded(tensors, outs, good)
            note(good)

    def end(self, succeeded: bool) -> None:
        """Commits the step of all that have come, or rolls it back."""
        end_steps(self.tensors, succeeded)
        for feature in self._features:
            feature.ended(self.tensors, succeeded)

    def _alike(self, arrived: Dict[int, Any]) -> Iterable[List[int]]:
        """Numbers of results that can be decoded together."""
        found: Dict[Any, List[int]] = {}
        for number, reduced in arrived.items():
            out: Any = self._outs[number]
            place = reduced.dtype, out.dtype, getattr(out, "device", None)
            # A scheduler may have changed the momentum of some.
            way = id(self.tensors[number].compressor), self._gains[number]
            found.setdefault((place, way), []).append(number)
        return found.values()
