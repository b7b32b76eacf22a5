"""Typed requests of a group's step to its driver, of which each is answered once.

A compressor's `encode` may yield the collectives among them, and returns one as its payload.
`Collective` is what a request is before there is an array: compressors declare those, because a
graph is built before the first step.
"""

import dataclasses
from typing import (
    Any,
    Callable,
    ClassVar,
    Generator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np

from ..kernels import Encoded

# Compared with, many times a step: types by themselves take three times as long.
FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, order=True)
class Collective:
    """verb: "reducer", "allreduce", "allgather" or "alltoall"; dtype: of what is handed in; op: of
    an allreduce, "sum" or "max"."""

    verb: str
    dtype: str
    op: str = ""


DECLARABLE = {
    *(Collective("reducer", dtype) for dtype in ("float32", "float16")),
    *(
        Collective("allreduce", dtype, op)
        for dtype in ("float32", "int32", "int64")
        for op in ("sum", "max")
    ),
    Collective("allgather", "uint8"),
    Collective("alltoall", "uint8"),
}


@dataclasses.dataclass
class Exchanged:
    """A request that hands an array in."""

    array: np.ndarray
    verb: ClassVar[str]
    op = ""

    @property
    def collective(self) -> Collective:
        return Collective(self.verb, self.array.dtype.name, self.op)


@dataclasses.dataclass
class ToReducer(Exchanged):
    """Hands `array` to the reducer (Horovod's optimizer, DDP or `simulate`), which reduces it over
    ranks as its user asked: as many float32 or float16 as the tensor has elements, which may be the
    gradient's own memory. Answered with what that has made of it."""

    verb = "reducer"


@dataclasses.dataclass
class Allreduce(Exchanged):
    """The sum, or with op="max" the maximum, over ranks of float32, int32 or int64 numbers; maxima
    are of float32, not NaN. Those of a group's tensors in one round are one message. Answered
    with an array, which may be `array` itself. elements: how many of the tensor's a payload is of,
    where that is not all."""

    op: str = "sum"
    elements: Optional[int] = None
    verb = "allreduce"


@dataclasses.dataclass
class Allgather(Exchanged):
    """All ranks' arrays, uint8 of any length, one behind the other in rank order: one uint8
    array."""

    verb = "allgather"


@dataclasses.dataclass
class Alltoall(Exchanged):
    """Sends each rank a part of `array`, uint8: the first splits[0] bytes to rank 0, the next
    splits[1] to rank 1 …; what is beyond goes to nobody. Answered with the parts that came, a uint8
    array for each rank."""

    splits: Sequence[int]
    verb = "alltoall"


Lengths = Tuple[Callable[[int], int], Callable[[int], int]]


class Arrived(NamedTuple):
    """A tensor's part of an exchange of all. result: for `Compressor.decode`; sent,
    received: the tensor's share of this rank's bytes."""

    result: Any
    sent: int
    received: int


class Joint:
    """A payload that travels together with those of a step's other tensors: the exchange of its
    class is of all of them at once. Decoded by `Compressor.decode`; a graph has no operation for
    it.

    collective: the last one of that exchange; label: part of its collectives' names; elements: how
    many this rank sends; finite: whether this rank's gradient is; digest: the tensor's, which
    `group_step` sets.
    """

    collective: ClassVar[Collective]
    label: ClassVar[str]
    digest: int = 0
    elements: int
    finite: bool

    @classmethod
    def exchange(
        cls, joints: Sequence[Any], step: Any, lengths: Lengths
    ) -> Generator[Any, Any, List[Arrived]]:
        """The exchange of one step, on one rank.

        Args:
            joints: those of all tensors that have one, in the order of their names, alike on all
                ranks.
            step: the `Step`; its gain is the factor that results will get, as far as that is known.
            lengths: what the memory of the first two messages is padded to, of all steps.

        Yields:
            Collectives, which are started and answered one after the other.

        Returns:
            What arrives for each of the tensors, in their order.
        """
        raise TypeError(f"{cls.__name__} has no exchange: give it one")


@dataclasses.dataclass
class StepNorm:
    """The squared norm of the whole step's gradients on this rank, times the square of what the
    reducer makes of a 1 on each rank. Answered with that number."""

    grads: Sequence[np.ndarray]


@dataclasses.dataclass
class Final:
    """The last exchange of a group's step: starts `request`, and is answered with (what the reducer
    made of a 1, the result of the request). A list is of Joint payloads, one for each tensor, and
    so is its result."""

    request: Union[Allreduce, Allgather, List[Any]]


@dataclasses.dataclass
class Outcome:
    """The results of a group's step are in the gradients' memory; finite: of each whether it is.
    Answered, with None, where the step has succeeded as a whole; else the driver closes the
    generator, and the group's step is rolled back."""

    finite: Sequence[bool]


# Encoded: a body, which every rank gathers in a frame.
Payload = Union[ToReducer, Allreduce, Encoded, Joint]
