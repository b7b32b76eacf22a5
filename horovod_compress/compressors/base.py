"""The contract between an algorithm and the exchange. An algorithm knows arrays and kernels:
nothing of frameworks or networks."""

import dataclasses
import functools
import math
import zlib
from abc import ABC
from typing import (
    Any,
    Callable,
    ClassVar,
    Dict,
    Generator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
)

import numpy as np

from .. import kernels
from ..protocol.requests import FLOAT32, Collective, Payload, ToReducer
from .pairs import Encodings, complete, in_lockstep
from .policy import Policy

# All of them, because other packages' algorithms import them from here.
from .state import LOCAL as LOCAL
from .state import SHARED as SHARED
from .state import Role
from .state import Rollback as Rollback
from .state import State as State
from .state import spares as spares
from .state import zeros as zeros

GATHER = Collective("allgather", "uint8")
REDUCER = Collective("reducer", "float32")
LARGEST = float(np.finfo(np.float32).max)
# A learning rate below counts as 0.
NO_RATE = 1e-30
Result = TypeVar("Result")
# A method that needs collectives first: yields them, and is sent what comes of each.
Asking = Generator[Any, Any, Result]
Encoding = Union[Payload, Asking[Payload]]
# The State that an algorithm's own `init` makes. Its methods may say of which class that is.
OwnState = Any
# Of the tensors of a group, one each.
Arrays = Sequence[np.ndarray]
States = Sequence[State]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step, as far as an algorithm may know it.

    index is the number of the step, from 0. rank and size are this rank and the number of ranks.
    scale is the factor by which this rank's gradient is to be multiplied, by local clipping for
    one; gain is that of the result, where it is not 1. dense says whether all that waits is sent,
    by `encode_dense`. squares are sums over samples of squared gradients, one for each element,
    where the framework's adapter collected them. lr is the learning rate that the optimizer will
    apply to this tensor's result, None or NaN where it is unknown. clip_norm is the limit of the
    step's norm, where the step is clipped. base, as long as the gradient, is where that counts
    from: gradient − base is compressed, and the result is added to base. Only compressors that take
    one see it.
    """

    index: int
    rank: int
    size: int
    scale: float = 1.0
    squares: Optional[np.ndarray] = None
    lr: Optional[float] = None
    gain: float = 1.0
    dense: bool = False
    clip_norm: Optional[float] = None
    base: Optional[np.ndarray] = None

    @property
    def frozen(self) -> bool:
        """True where the learning rate is known to be 0."""
        return self.lr is not None and self.lr < NO_RATE


Steps = Sequence[Step]


def with_fields(steps: Steps, **fields: Any) -> List[Step]:
    """Steps with other values of these fields."""
    changed: Dict[int, Step] = {}
    for step in steps:
        if id(step) not in changed:
            changed[id(step)] = dataclasses.replace(step, **fields)
    return [changed[id(step)] for step in steps]


class Traits(NamedTuple):
    """Traits of an algorithm that others have to know, whatever its options are.

    number: the id on the wire: below 128 this package's own, which state it; above, it follows from
    the id; paper: what it implements; on_device: whether the kernels on a device are all that it
    needs; state_type: the class of its state; takes_base: True if `encode` compresses the gradient
    minus `Step.base`, and then leaves `Step.base`, not zeros, in the gradient's memory;
    takes_scale: True if `encode` multiplies by `Step.scale` itself, as it must where `clip_norm` is
    set; accumulator: the name of the residual among the state's arrays; same_kernels: True if
    replicas agree only where all ranks have native kernels, or all the reference; ignores_size:
    True if results have the same size whatever that of gradients is, as signs have;
    corrects_momentum: True if it takes over the optimizer's momentum: it has options momentum,
    nesterov and a method bound; carries_float64: True if gradients of float64 stay that, and do not
    become float32 before `encode`; prefers_updates: True if with Adam it trains worse on gradients
    than on updates; element_bits: bits of an Encoded payload for each element, where those are
    always the same.
    """

    number: int = -1
    paper: Optional[str] = None
    on_device: bool = False
    state_type: Type[State] = State
    takes_base: bool = False
    takes_scale: bool = False
    accumulator: str = "residual"
    same_kernels: bool = False
    ignores_size: bool = False
    corrects_momentum: bool = False
    carries_float64: bool = False
    prefers_updates: bool = False
    element_bits: Optional[float] = None


@dataclasses.dataclass(frozen=True, repr=False)
class Compressor(ABC):
    """One algorithm with its options. Options are attributes, repr is a valid constructor call, and
    equality compares options.

    A step works on the flat float32 gradient of one tensor. `encode` makes this rank's payload, the
    exchange moves it, and `decode` or `add` leaves the result in the gradient's memory. Afterwards
    exactly one of `commit` and `rollback` is called: a payload is gone from the residual for good
    only once the step has succeeded on all ranks.

    Raises ValueError for an option of the wrong type or out of range, and says what is valid.
    """

    # The name in specs; None: not for users.
    id: ClassVar[Optional[str]] = None
    traits: ClassVar[Traits] = Traits()
    # What the arrays of the state are, by name.
    roles: ClassVar[Dict[str, Role]] = {}
    # Of one tensor, beside those of a group: a class overrides one of each pair.
    encode_dense: ClassVar[Callable[..., Any]]
    accumulate: ClassVar[Callable[..., Any]]
    decode_dense: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = vars(cls)
        if not isinstance(cls.traits, Traits) or "policy" in own:
            raise TypeError(
                f"{cls.__name__} has an attribute or option named traits or policy, which say "
                f"what others have to know of it: call it something else"
            )
        if "traits" not in own:
            # That kernels and types suit it, each class says for itself.
            cls.traits = cls.traits._replace(on_device=False, carries_float64=False)
        parent = next(each for each in cls.__mro__[1:] if issubclass(each, Compressor))
        if cls.traits.element_bits is None:
            # As a method would be, of whoever says other traits.
            cls.traits = cls.traits._replace(element_bits=parent.traits.element_bits)
        if own.get("id") and cls.traits.number == parent.traits.number:
            # That of the algorithm it derives from.
            cls.traits = cls.traits._replace(number=-1)
        if own.get("id") and cls.traits.number < 0:
            number = 128 + zlib.crc32(own["id"].encode()) % 128
            cls.traits = cls.traits._replace(number=number)
        complete(cls)

    @functools.cached_property
    def policy(self) -> Policy:
        """The options that others than the algorithm need."""
        its = (name for name in Policy._fields if hasattr(self, name))
        return Policy(**{name: getattr(self, name) for name in its})

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            kind, value = field.metadata["kind"], getattr(self, field.name)
            try:
                object.__setattr__(self, field.name, kind.check(value))
            except (ValueError, TypeError, OverflowError):
                raise ValueError(f"{self.id}: {field.name} must be {kind}, not {value!r}") from None

    def __repr__(self) -> str:
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        changed = [f"{field.name}={value!r}" for field, value in values if value != field.default]
        return f"{type(self).__name__}({', '.join(changed)})"

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        """The Collectives that `encode` yields and returns on `size` ranks, in order: one allgather
        unless a subclass says otherwise. A dense step uses none of them, or, where `encode` is a
        generator, the first."""
        return (GATHER,)

    @property
    def config(self) -> Dict[str, Any]:
        """The id and all options: JSON-able, and a spec that get_compressor understands."""
        return {"id": self.id, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}}

    def init(self, name: str, shape: Tuple[int, ...]) -> State:
        """The State of one tensor. Unless a subclass says otherwise, each of the arrays in `roles`
        is as long as the tensor, and zero."""
        return self.traits.state_type(
            name, {array: zeros(math.prod(shape)) for array in self.roles}
        )

    def encode(self, grad: np.ndarray, state: OwnState, step: Step) -> Encoding:
        """Encodes one tensor; `encode_all` does so for tensors that come together. A class
        overrides one of them.

        grad is flat float32, and may be changed. Where Encoded is returned it is zero afterwards,
        because payloads are added there. A generator where ranks must agree first: it yields an
        Allreduce, Allgather or Alltoall, and is sent the result. All tensors of a group go through
        these rounds together.

        Returns:
            This rank's payload: ToReducer or Allreduce, of `horovod_compress.protocol.requests`, or
            Encoded. A ToReducer after a request is summed as an Allreduce is.
        """
        raise NotImplementedError(f"{self.id} needs a method encode")

    def encode_all(self, grads: Arrays, states: Sequence[OwnState], steps: Steps) -> Encodings:
        """Encodes tensors as `encode` does each of them. Their steps differ in squares, lr and base
        alone. A generator yields a list of requests, one for each tensor, or None for one that asks
        no more, and is sent a list of results."""
        return in_lockstep([self.encode(*each) for each in zip(grads, states, steps)])

    def after_warmup(self) -> "Compressor":
        """This compressor as it is in the last stage of a schedule, in all steps."""
        return self

    def payload_bits(self, numel: int, step: Step) -> Optional[float]:
        """Bits of this step's Encoded payload for each element of the tensor; None where they
        depend on the gradients. The exchange compares them with those of a dense exchange."""
        return self.traits.element_bits

    def stage(self, index: int) -> Any:
        """Stands for what `payload_bits` depends on beside the number of elements: alike for steps
        in which payloads have equal sizes."""
        return index if type(self).payload_bits is not Compressor.payload_bits else None

    def encode_dense_all(
        self, grads: Arrays, states: Sequence[OwnState], steps: Steps
    ) -> Encodings:
        """The residuals plus the gradients, as ToReducer payloads. The exchange calls this instead
        of `encode_all` where gathered payloads would move more bytes."""
        for state in states:
            state.all_sent = True
            self.apply_pending(state)
        residuals: Any = [self.residual(state) for state in states]
        if residuals[0] is None:
            return [ToReducer(grad) for grad in grads]
        finite = self.accumulate_all(grads, states, steps)
        there = finite.there if isinstance(finite, kernels.Late) else None
        leave = functools.partial(_leave_residuals, grads, residuals)
        return kernels.then(finite, leave) if there is None else leave(there)

    def accumulate_all(
        self, grads: Arrays, states: Sequence[State], steps: Steps
    ) -> Sequence[bool]:
        """Adds the finite elements of gradients to the residuals and leaves the gradients zero.
        Returns of each whether all were finite."""
        residuals = [self.residual(state) for state in states]
        return kernels.of(grads[0]).add_to_residual(grads, None, residuals, scale=steps[0].scale)

    def forget_sent(self, state: OwnState) -> None:
        """Clears the residual, after a dense step that succeeded."""
        residual = self.residual(state)
        if residual is not None:
            residual.fill(0)

    def decode(
        self, summed: np.ndarray, out: np.ndarray, state: OwnState, step: Step, scale: float
    ) -> bool:
        """Decodes the sum of the ranks' Allreduce payloads, times scale, into `out`, the gradient's
        memory. Returns whether that is finite."""
        raise NotImplementedError(
            f"{self.id} returns Allreduce payloads, so it needs a method decode"
        )

    def decode_all(
        self, summed: Arrays, outs: Arrays, states: Sequence[OwnState], steps: Steps, scale: float
    ) -> List[bool]:
        """Decodes sums of tensors as `decode` does each of them."""
        return [self.decode(*each, scale) for each in zip(summed, outs, states, steps)]

    def decode_dense_all(
        self, reduced: Arrays, outs: Arrays, states: Sequence[OwnState], scale: float
    ) -> List[bool]:
        """Writes reduced ToReducer payloads, of one type, times scale, into `outs`, which may be
        the same arrays. Returns of each whether that is finite."""
        kernel = kernels.of(outs[0])
        if reduced[0].dtype != FLOAT32:
            largest = kernel.decode_float16([each.view(np.uint16) for each in reduced], outs)
        else:
            for each, out in zip(reduced, outs):
                if each is not out:
                    np.copyto(out, each)
            largest = kernel.max_abs(outs)
        return multiply(outs, [scale] * len(outs), largest)

    def add(self, body: np.ndarray, out: np.ndarray, scale: float) -> bool:
        """Decodes the body of one rank's Encoded payload and adds it, times scale, to `out`, which
        is zero before the first rank's; `add_all` does so for tensors that come together. A class
        overrides one of them, unless bodies are sparse. Returns whether the sum is finite. Raises
        ValueError for a body that `encode` cannot have made."""
        return Compressor.add_all(self, [body], [out], scale)[0]

    def add_all(self, bodies: Arrays, outs: Arrays, scale: float) -> List[bool]:
        """Adds one rank's bodies as `add` does each of them."""
        return kernels.of(outs[0]).decode_add_sparse(outs, bodies, scale=scale)

    def residual(self, state: State) -> Optional[np.ndarray]:
        """The residual, up to date only after `apply_pending`; None where the algorithm keeps
        none."""
        return state.arrays.get(self.traits.accumulator)

    def commit(self, state: OwnState) -> None:
        """Keeps the changes of a step that succeeded."""

    def rollback(self, state: OwnState) -> None:
        """Undoes the changes of a step that failed or whose result was not finite, on all ranks
        alike."""
        for array, indices, values, replace in state.rollbacks:
            if indices is None:
                self.add(values, state.arrays[array], 1.0)
            elif replace:
                state.arrays[array][indices] = values
            else:
                state.arrays[array][indices] += values

    def apply_pending(self, state: OwnState) -> None:
        """Brings the arrays up to date between steps, where `commit` left a pending change to the
        next `encode`."""


complete(Compressor)


def _leave_residuals(grads: Arrays, residuals: Arrays, finite: Any) -> List[ToReducer]:
    """Payloads of residuals, in the gradients' memory, with a NaN in each that says that a gradient
    was not finite. finite: of each whether it was, or an array on a device, of NaN or -0, which
    changes no number."""
    marks = finite
    if isinstance(finite, list):
        marks = np.where(finite, np.float32(-0.0), np.float32(np.nan))
    for i, (grad, residual) in enumerate(zip(grads, residuals)):
        np.copyto(grad, residual)
        np.add(grad[:1], marks[i : i + 1], out=grad[:1])
    return [ToReducer(grad) for grad in grads]


def multiply(outs: Arrays, scales: Sequence[float], largest: Sequence[float]) -> List[bool]:
    """Multiplies arrays that have these largest magnitudes. Returns of each whether it is
    finite."""
    for out, scale in zip(outs, scales):
        if scale != 1:
            with np.errstate(over="ignore"):
                out *= np.float32(scale)
    return kernels.then(
        largest, lambda found: [its * abs(s) <= LARGEST for its, s in zip(found, scales)]
    )
