"""The contract between an algorithm and the exchange.

An algorithm knows arrays and kernels: nothing of frameworks or networks.
"""
import dataclasses
import threading
import zlib
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Dict, Generator, List, NamedTuple, Optional, Tuple, Union

import numpy as np

from .. import kernels
from ..requests import FLOAT32, Collective, HostReduce, Payload, Request

GATHER = Collective("allgather", "uint8")
HOST = Collective("host", "float32")
LARGEST = float(np.finfo(np.float32).max)
Encoding = Union[Payload, Generator[Request, Any, Payload]]


def zeros(numel: int) -> np.ndarray:
    """float32 zeros that begin on a cache line: unaligned state makes the pass over it up to half as long again."""
    memory = np.empty(numel + 16, np.float32)  # unlike np.zeros, on huge pages where it is large: scattered reads are faster
    memory.fill(0)
    return memory[-memory.ctypes.data % 64 // 4 :][:numel]


@dataclasses.dataclass(frozen=True)
class Step:
    """What an algorithm may know of the step it works in. index: its number, from 0; rank, size: this rank and the number of ranks;
    scale: what local clipping makes of this rank's gradient, a factor; squares: the sums over samples of their squared gradients, as
    many as the gradient has elements, where the framework's adapter took them; lr: the learning rate that the optimizer will apply
    to this tensor's result, None where nobody knows it; unit: what a gradient of 1 comes as (the loss scale); clip_norm: where the
    step is clipped, the limit of its norm."""

    index: int
    rank: int
    size: int
    scale: float = 1.0
    squares: Optional[np.ndarray] = None
    lr: Optional[float] = None
    unit: float = 1.0
    clip_norm: Optional[float] = None

    def replace(self, **changes: Any) -> "Step":
        """This step with other values."""
        return dataclasses.replace(self, **changes)


class Model:
    """The tensors that a compressor works on, one behind the other as one vector, in an order that is the same on all ranks."""

    def __init__(self) -> None:
        self.numel = 0
        self._starts: Dict[str, Tuple[int, int]] = {}
        self._drawn: Tuple[Any, Any] = None, None
        self._lock = threading.Lock()  # graphs bring tensors in several threads

    def add(self, name: str, numel: int) -> None:
        self._starts[name] = self.numel, self.numel + numel
        self.numel += numel

    def own(self, name: str, key: int, first: int, count: int) -> np.ndarray:
        """Of `count` coordinates of the whole model, those in this tensor, ascending: see `draw_coordinates`. A step's tensors draw
        them together."""
        with self._lock:
            if self._drawn[0] != (key, first, count, self.numel):
                drawn = kernels.host.draw_coordinates(key=key, numel=self.numel, first=first, count=count)
                self._drawn = (key, first, count, self.numel), np.sort(drawn)
            drawn = self._drawn[1]
        start, end = self._starts[name]
        low, high = np.searchsorted(drawn, [start, end])
        return drawn[low:high] - np.uint32(start)


class Kept(NamedTuple):
    """What an array of the state is. role: "local", this rank's own, what it has not sent yet; or "shared", alike on all ranks;
    degree: the power of gradients' size that it grows with."""

    role: str
    degree: int = 1


LOCAL, SHARED = Kept("local"), Kept("shared")


class Undo(NamedTuple):
    """What puts an array of the state back where a step found it: `values`, added to the elements `indices`, or with `replace` written
    there. indices None: values are a payload's body, which is decoded and added."""

    array: str
    indices: Optional[np.ndarray]
    values: np.ndarray
    replace: bool = False


@dataclasses.dataclass
class State:
    """One tensor's state on one rank. An algorithm that needs more has a State of its own.

    arrays: what lives between steps, is saved and is loaded, as `Compressor.kept` says; undo: what puts them back, until the open step
    has ended; sent: what `commit` needs of the open step; all_sent: whether that sent everything, densely; buffer: memory of
    the last payload, which the next may use; model: where it is one of several tensors, all of them; overflows: steps in which a
    finite element became infinite in a narrower type.
    """

    name: str
    arrays: Dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    undo: List[Undo] = dataclasses.field(default_factory=list)
    sent: Any = None
    all_sent: bool = False
    buffer: Optional[np.ndarray] = None
    model: Optional[Model] = None
    overflows: int = 0


@dataclasses.dataclass(frozen=True, repr=False)
class Compressor(ABC):
    """One algorithm with its options. Options are attributes, repr is a valid constructor call, equality compares options.

    A step works on the flat float32 gradient of one tensor: `encode` makes this rank's payload, the exchange moves it,
    `decode` or `add` leaves the result in the gradient's memory. Afterwards exactly one of `commit` and `rollback` is
    called: what encode took out of the state is only gone once the step has succeeded on all ranks.

    Raises ValueError for an option of the wrong type or out of range, with what is valid.
    """

    id: ClassVar[Optional[str]] = None  # the name in specs; None: not for users
    number: ClassVar[int] = -1  # the id on the wire: below 128 this package's own, which say theirs; above it follows from the id
    paper: ClassVar[Optional[str]] = None
    corrects_momentum = False  # takes over the optimizer's momentum: has options momentum, nesterov and a method bound
    clip_norm = None  # type: Optional[float]  # where set, the exchange clips this rank's gradient as a whole, and encodes when all of it is there
    same_kernels = False  # whether replicas agree only where all ranks have native kernels, or all the reference
    seed = None  # type: Optional[int]  # where set, what is drawn at random follows from it
    kept: ClassVar[Dict[str, Kept]] = {}  # what the arrays of the state are, by name
    follow_lr = False  # type: Optional[bool]  # whether the residual is rescaled where the learning rate changes; None: where that is known

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        id = vars(cls).get("id")
        if id and "number" not in vars(cls):
            cls.number = 128 + zlib.crc32(id.encode()) % 128

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            kind, value = field.metadata["kind"], getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, kind.check(value))
            except (ValueError, TypeError, OverflowError):
                raise ValueError(f"{self.id}: {field.name} must be {kind}, not {value!r}") from None

    def __repr__(self) -> str:
        changed = (f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default)
        return f"{type(self).__name__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in changed)})"

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        """What `encode` yields and returns on `size` ranks, in order, as Collectives. A step that goes dense takes none of them, or,
        where `encode` is a generator, the first. As it stands, one allgather."""
        return (GATHER,)

    @property
    def collective(self) -> str:
        """How its payloads travel: "allgather", or "allreduce" where they are summed, by us or by the host."""
        return "allgather" if self.collectives(2)[-1].verb == "allgather" else "allreduce"

    @property
    def config(self) -> Dict[str, Any]:
        """The id and all options: JSON-able, and a spec that get_compressor understands."""
        return {"id": self.id, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}}

    def init(self, name: str, shape: Tuple[int, ...]) -> State:
        """The State of one tensor."""
        return State(name)

    @abstractmethod
    def encode(self, grad: np.ndarray, state: State, step: Step) -> Encoding:
        """This rank's payload: HostReduce or Allreduce, of `horovod_compress.requests`, or Encoded. grad: float32, flat; it is this
        method's to change.

        A generator where ranks must agree on something first: it yields an Allreduce, Allgather or Alltoall, and is sent the
        result. All tensors of a step go through their rounds together.
        """

    def payload_bits(self, step: Step) -> Optional[float]:
        """Bits that this step's Encoded payload will take for each of the tensor's elements, where options and ranks tell that
        beforehand; None where gradients decide. The exchange compares them with those of a dense exchange."""
        return None

    def encode_dense(self, grad: np.ndarray, state: State, step: Step) -> HostReduce:
        """All that waits and the gradient, as a HostReduce payload: what the exchange asks for instead of `encode` where gathered
        payloads would move more."""
        state.all_sent = True
        self.apply_pending(state)
        residual = self.residual(state)
        if residual is not None:
            finite = self.accumulate(grad, state, step)
            np.copyto(grad, residual)
            if not finite:
                grad[0] = np.nan
        return HostReduce(grad)

    def accumulate(self, grad: np.ndarray, state: State, step: Step) -> bool:
        """Adds the gradient to what waits, but for elements that are not finite; leaves it zero; returns whether all of it was finite."""
        return kernels.of(grad).add_to_residual(grad, None, self.residual(state), scale=step.scale)[1]

    def forget_sent(self, state: State) -> None:
        """A dense step succeeded: nothing waits any more."""
        residual = self.residual(state)
        if residual is not None:
            residual.fill(0)

    def decode(self, summed: np.ndarray, out: np.ndarray, state: State, step: Step, scale: float) -> bool:
        """Leaves scale · (what the sum of the ranks' Allreduce payloads decodes to) in `out`, the gradient's memory, and returns
        whether that is finite."""
        raise NotImplementedError(f"{self.id} returns Allreduce payloads, so it needs a method decode")

    def decode_dense(self, reduced: np.ndarray, out: np.ndarray, state: State, scale: float) -> bool:
        """Leaves scale · (what the ranks' HostReduce payloads came to), which may be `out` itself, in `out`, and returns whether that is
        finite."""
        if reduced.dtype != FLOAT32:
            largest = kernels.of(out).decode_float16(reduced.view(np.uint16), out)
        else:
            if reduced is not out:
                np.copyto(out, reduced)
            largest = kernels.of(out).max_abs(out)
        if scale != 1:
            out *= np.float32(scale)
        return largest * abs(scale) <= LARGEST

    def add(self, body: np.ndarray, out: np.ndarray, scale: float) -> bool:
        """Adds scale · (what the body of one rank's Encoded payload decodes to) to `out`, which was zero before the first
        rank's, and returns whether that is finite. ValueError for a body that `encode` cannot have made. As it stands, of
        sparse bodies."""
        return kernels.of(out).decode_add_sparse(out, body, scale=scale)

    def residual(self, state: State) -> Optional[np.ndarray]:
        """The array of what was not sent yet, once it is settled; None where there is none."""
        return state.arrays.get("residual")

    def end_step(self, state: State, succeeded: bool) -> None:
        """Ends the open step, once, by what it was: `commit` or `rollback`, or what they are to a dense step."""
        if not state.all_sent:
            (self.commit if succeeded else self.rollback)(state)
        elif succeeded:
            self.forget_sent(state)
        state.undo, state.sent, state.all_sent = [], None, False

    def commit(self, state: State) -> None:
        """The step succeeded: what it changed stays."""

    def rollback(self, state: State) -> None:
        """The step failed or its result was not finite, on all ranks alike: puts back what it took out of the state."""
        for array, indices, values, replace in state.undo:
            if indices is None:
                self.add(values, state.arrays[array], 1.0)
            elif replace:
                state.arrays[array][indices] = values
            else:
                state.arrays[array][indices] += values

    def apply_pending(self, state: State) -> None:
        """Brings the arrays up to date, between steps, where commit left something to the next encode."""
