"""What a tensor's step asks of its driver: typed requests, of which each is answered once.

A compressor's `encode` may yield the collectives among them, and returns one as its payload.
`Collective` is what a request is before there is an array: compressors declare those, because a
graph is built before the first step.
"""

import dataclasses
from typing import Any, Generator, NamedTuple, Optional, Sequence, Union

import numpy as np

from .kernels import Encoded

# Compared with, many times a step: types by themselves take three times as long.
FLOAT32 = np.dtype(np.float32)


class Collective(NamedTuple):
    """verb: "host", "allreduce", "allgather" or "alltoall"; dtype: of what is handed in; op: of an
    allreduce, "sum" or "max"."""

    verb: str
    dtype: str
    op: str = ""


DECLARABLE = {
    *(Collective("host", dtype) for dtype in ("float32", "float16")),
    *(
        Collective("allreduce", dtype, op)
        for dtype in ("float32", "int32", "int64")
        for op in ("sum", "max")
    ),
    Collective("allgather", "uint8"),
    Collective("alltoall", "uint8"),
}


class Exchanged:
    """A request that hands an array in."""

    array: np.ndarray
    verb: str
    op = ""

    @property
    def collective(self) -> Collective:
        return Collective(self.verb, self.array.dtype.name, self.op)


@dataclasses.dataclass
class HostReduce(Exchanged):
    """Hands `array` to the host (Horovod's optimizer), which reduces it over ranks as its user
    asked. Answered at once, with None: what the host brings back comes with `Final`. As a payload:
    as many float32 or float16 as the tensor has elements; may be the gradient's own memory."""

    array: np.ndarray
    verb = "host"


@dataclasses.dataclass
class Allreduce(Exchanged):
    """The sum, or with op="max" the maximum, over ranks of float32, int32 or int64 numbers; maxima
    are of a few float32, not NaN, and all tensors' maxima of one round are one message. Answered
    with an array, which may be `array` itself."""

    array: np.ndarray
    op: str = "sum"
    verb = "allreduce"


@dataclasses.dataclass
class Allgather(Exchanged):
    """All ranks' arrays, uint8 of any length, one behind the other in rank order: one uint8
    array."""

    array: np.ndarray
    verb = "allgather"


@dataclasses.dataclass
class Alltoall(Exchanged):
    """Sends each rank a part of `array`, uint8: the first splits[0] bytes to rank 0, the next
    splits[1] to rank 1 …; what is beyond goes to nobody. Answered with the parts that came, a uint8
    array for each rank."""

    array: np.ndarray
    splits: Sequence[int]
    verb = "alltoall"


class Split(NamedTuple):
    """How a tensor's entries are split among ranks and selected again. k: entries that a rank sends
    at most; accept: how many times as many owners accept of all ranks; values: how theirs travel, a
    kind of `encode_sparse`."""

    k: int
    accept: float
    values: str


@dataclasses.dataclass
class SelectAgain:
    """Has a tensor's entries added by the owners of their places, and the largest sums sent to all
    ranks: all tensors of a step in one exchange, as `split.py` says. payload: this rank's, sparse;
    grad: the gradient's memory, which is zero; residual: where this rank keeps what was not sent;
    number, digest: as for a frame. Answered with `split.Selected`."""

    payload: Encoded
    split: Split
    grad: np.ndarray
    residual: np.ndarray
    number: int
    digest: int


@dataclasses.dataclass
class StepNorm:
    """The squared norm of the whole step's gradients on this rank, times the square of what the
    host makes of a 1 on each rank. A driver that has to wait for those hands `carrier` to the host
    meanwhile. Answered with (squared norm, whether it has done that)."""

    grad: np.ndarray
    carrier: HostReduce


@dataclasses.dataclass
class Final:
    """The last exchange of a step: starts `request`, if there is one, and is answered with (what
    the host brought back, the result of the request or None)."""

    request: Optional[Union[Allreduce, Allgather, SelectAgain]]


@dataclasses.dataclass
class Outcome:
    """The result of this tensor's step, flat float32, and whether it is finite. Answered, with
    None, where the step has succeeded as a whole; else the driver closes the generator, and the
    tensor's step is rolled back."""

    result: np.ndarray
    finite: bool


# Encoded: a body, which every rank gathers in a frame.
Payload = Union[HostReduce, Allreduce, Encoded]
# Yields Requests; what it is sent depends on each.
TensorStep = Generator[Any, Any, None]
