"""The contract between an algorithm and the exchange.

An algorithm knows arrays and kernels: nothing of frameworks or networks.
"""
import dataclasses
import fnmatch
import math
from abc import ABC, abstractmethod

import numpy as np

from .options import Choice, Count, Patterns, option


def zeros(numel):
    """float32 zeros that begin on a cache line: unaligned state makes the pass over it up to half as long again."""
    memory = np.zeros(numel + 16, np.float32)
    return memory[-memory.ctypes.data % 64 // 4 :][:numel]


@dataclasses.dataclass(frozen=True)
class Step:
    """What an algorithm may know of the step it works in: its number from 0, the number of ranks, and what local
    clipping makes of this rank's gradient (a factor, 1 without clipping)."""

    index: int
    size: int
    scale: float = 1.0


@dataclasses.dataclass
class Dense:
    """A payload of as many floats as the tensor has, summed over ranks by allreduce; `array` may be the gradient's memory."""

    array: np.ndarray


@dataclasses.dataclass
class Sparse:
    """A payload of entries: ascending uint32 indices, float32 values exact in `kind` ("fp32", "fp16", "bf16"). Gathered from
    all ranks. `finite` False says that this rank's gradient was not finite; then there are no entries."""

    indices: np.ndarray
    values: np.ndarray
    kind: str
    finite: bool = True


@dataclasses.dataclass
class State:
    """One tensor's state on one rank: arrays that live between steps, what the open step took, and memory to reuse."""

    name: str
    arrays: dict = dataclasses.field(default_factory=dict)
    taken: object = None
    spare: object = None


@dataclasses.dataclass(frozen=True, repr=False)
class Compressor(ABC):
    """One algorithm with its options. Options are attributes, repr is a valid constructor call, equality compares options.

    A step works on the flat float32 gradient of one tensor: `encode` makes this rank's payload, the exchange moves it,
    `decode` leaves the result in the gradient's memory. Afterwards exactly one of `commit` and `rollback` is called:
    what encode took out of the state is only gone once the step has succeeded on all ranks.

    Raises ValueError for an option of the wrong type or out of range, with what is valid.
    """

    id = None  # the name in specs; None: not for users
    number = None  # the id on the wire
    road = None  # "allreduce" or "allgather"
    paper = None
    corrects_momentum = False  # takes over the optimizer's momentum: has options momentum, nesterov and a method bound
    clip_norm = None  # where set, the exchange clips this rank's gradient as a whole, and encodes when all of it is there

    def __post_init__(self):
        for field in dataclasses.fields(self):
            kind, value = field.metadata["kind"], getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, kind.check(value))
            except (ValueError, TypeError):
                raise ValueError(f"{self.id}: {field.name} must be {kind}, not {value!r}") from None

    def __repr__(self):
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    @property
    def config(self):
        """The id and all options: JSON-able, and a spec that get_compressor understands."""
        return {"id": self.id, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}}

    def for_tensor(self, name, shape):
        """The compressor of one tensor: this one, or another that it leaves the tensor to."""
        return self

    @abstractmethod
    def init(self, name, shape):
        """The State of one tensor."""

    @abstractmethod
    def encode(self, grad, state, step):
        """This rank's payload, Dense or Sparse. grad: float32, flat; afterwards it is zero, or the Dense payload itself."""

    @abstractmethod
    def decode(self, payload, out, state, scale):
        """Leaves scale · (sum over ranks) in `out`, the gradient's memory, and returns whether that is finite.

        payload: the Dense one, for which `out` already holds the result, or the list of all ranks' Sparse ones, to be added
        to the zeros that `encode` left.
        """

    def residual(self, state):
        """The array of what was not sent yet; None where there is none."""
        return None

    def commit(self, state):
        """The step succeeded: forgets what would be needed to undo it."""
        state.taken = None

    def rollback(self, state):
        """The step failed or its result was not finite, on all ranks alike: puts back what encode and decode took."""
        state.taken = None


@dataclasses.dataclass(frozen=True, repr=False)
class SelectiveCompressor(Compressor):
    """A compressor that leaves small, one-dimensional and excluded tensors to `dense()`."""

    transport: str = option(Choice("horovod"), "horovod", "what moves gathered payloads")
    seed: int = option(Count(), 0, "of everything that is drawn at random")
    min_numel: int = option(
        Count(), 1024, "tensors with fewer elements, and one-dimensional ones, go dense; 0: every tensor is compressed"
    )
    exclude: tuple = option(Patterns(), (), "names of tensors that go dense, as shell patterns")

    def for_tensor(self, name, shape):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude):
            return self.dense()
        if self.min_numel and (len(shape) < 2 or math.prod(shape) < self.min_numel):
            return self.dense()
        return self

    @abstractmethod
    def dense(self):
        """The compressor of the tensors that this one leaves alone."""
