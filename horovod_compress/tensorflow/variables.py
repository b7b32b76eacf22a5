"""Variables become known when their gradients are traced, on all ranks at once."""

import collections
import dataclasses
import itertools
import zlib
from typing import Any, Dict, Iterable, List, Sequence, Set, Tuple

import tensorflow as tf

from ..engine.debt import DEBT
from ..protocol.handshake import agree
from ..protocol.requests import Collective
from ..session.session import Session
from .horovod_internals import lasting_variable


@dataclasses.dataclass(eq=False)
class Variable:
    """A variable whose gradients are compressed."""

    name: str
    # In the order in which they became known: alike on all ranks, as names need not be.
    number: int
    shape: Tuple[int, ...]
    # Whether its gradients are.
    is_float64: bool = False
    carried: str = "float32"  # dtype of what the reducer reduces
    result: str = "float32"  # dtype of gradients in the exchange, and of its results
    # Those of the messages that travel beside it.
    moved: Sequence[Collective] = ()
    # Whether nothing is done to its gradients, so that Horovod may reduce them by itself.
    plain: bool = False
    # Alike for variables whose gradients go the same way.
    kin: int = 0
    # A tf.Variable, the sum of its passes' squared gradients, where moments=microbatch.
    squares: Any = None
    # Whether one of its passes was traced.
    observed: bool = False


class Variables(Dict[Any, Variable]):
    """The variables of a compression, by the keys of `_identified`.

    Attributes:
        loaded: True where variables that become known have to be in a state that was loaded.
    """

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._numbers: Dict[str, int] = {}  # of variables, by name
        self.loaded = False

    def register(self, pairs: List[Tuple[Any, Any]]) -> List[Variable]:
        """The Variable of each (gradient, source). New ones become known on all ranks at once."""
        self._session.ranks.refuse_unsynced(
            "hvdc.elastic.TensorFlowKerasState(model, compression=compression)"
        )
        self._session.handshake()
        keys, new = [], {}
        names = {variable.name for variable in self.values()}
        for i, (grad, source) in enumerate(pairs):
            key, name, shape = _identified(i, grad, source)
            keys.append(key)
            if key not in self and key not in new:
                if not grad.dtype.is_floating:
                    raise TypeError(
                        f"{name}: gradients of {grad.dtype.name} cannot be compressed; real "
                        f"floating point is needed"
                    )
                name = next(
                    n
                    for n in itertools.chain([name], (f"{name}_{k}" for k in itertools.count(1)))
                    if n not in names
                )
                names.add(name)
                new[key] = name, shape, grad.dtype == tf.float64
            elif key in self and self[key].shape != shape:
                raise ValueError(
                    f"{name} has the shape {shape} and had {self[key].shape} before: "
                    f"residuals are kept for variables, or tensors of one shape"
                )
        if new:
            self._make_known(new)
        for key, times in collections.Counter(keys).items():
            if times > 1 and not self[key].plain:
                raise ValueError(
                    f"{self[key].name} is twice among the variables of one call, and "
                    f"what is kept of its gradients would be used twice: give each variable once"
                )
        return [self[key] for key in keys]

    def _make_known(self, new: Dict[Any, Tuple[str, Tuple[int, ...], bool]]) -> None:
        """Adds variables, {key: (name, shape, whether it is of float64)}, with the state that was
        loaded for them."""
        session, ranks = self._session, self._session.ranks
        shapes = {name: list(shape) for name, shape, _ in new.values()}
        expected = self.expected()
        # Which this rank has from others, that know these variables already.
        if not (ranks.elastic and expected):
            agree(ranks.transport, f"{ranks.label()}.{len(self)}", {"variables": shapes})
        missing = [name for name in shapes if self.loaded and name not in expected]
        if missing:
            raise ValueError(
                f"the state that was loaded does not fit: it has nothing for {', '.join(missing)}. "
                f"Was it this model? Keras numbers layers "
                "without a name throughout a process: name them, or call "
                "tf.keras.backend.clear_session() first"
            )
        try:
            for key, (name, shape, is_float64) in new.items():
                session.exchange.add(name, shape, session.compressor)
                number = self._numbers.setdefault(name, len(self._numbers))
                self[key] = Variable(name, number, shape, is_float64)
        finally:
            # Those that a state fits are known, also where it does not fit a later one.
            self.describe()
        session.meet()
        if ranks.elastic and not self.expected():
            # What becomes known from now on does so on all ranks.
            self.loaded = False

    def expected(self) -> Set[str]:
        """The names of variables that a state was loaded for, and that no trace has brought."""
        exchange = self._session.exchange
        return (exchange.shapes.keys() | exchange.loaded.keys()) - {
            each.name for each in self.values()
        }

    def describe(self) -> None:
        """Has all say what traces have to know of their compressors now."""
        exchange, policy = self._session.exchange, self._session.compressor.policy
        for variable in self.values():
            tensor = exchange.tensors[variable.name]
            first = tensor.declared[0]
            variable.carried, variable.moved = (
                (first.dtype, ()) if first.verb == "reducer" else ("float32", tensor.declared)
            )
            variable.result = "float32"
            if variable.is_float64 and exchange.tensors.carries_float64(variable.name):
                variable.carried = variable.result = "float64"
            clips = policy.clip_norm is not None
            dense = not variable.moved and variable.carried != "float16" and not clips
            # What is owed of earlier gradients is added to the next one.
            owes = DEBT in tensor.state.arrays
            variable.plain, variable.kin = dense and not owes, tensor.kin
            if tensor.compressor.policy.moments != "microbatch":
                variable.squares, variable.observed = None, False
            elif variable.squares is None:
                variable.squares = lasting_variable(variable.shape, tf.float32)

    def begin_anew(self, names: Iterable[str]) -> None:
        """After the exchange has gone back to a state. names: in the order in which rank 0 came to
        know them, which numbers its operations."""
        self.loaded = bool(self.expected())
        for name in names:
            self._numbers.setdefault(name, len(self._numbers))
        for variable in self.values():
            if variable.squares is not None:
                variable.squares.assign(tf.zeros(variable.shape))

    def observe(self, grads_and_vars: Iterable[Tuple[Any, Any]]) -> List[Tuple[Any, Any]]:
        """Adds the squares of one backward pass."""
        grads_and_vars = list(grads_and_vars)
        if self._session.compressor.policy.moments != "microbatch":
            return grads_and_vars
        # Sparse gradients count where they become dense afterwards; the squares of the others are
        # not used.
        pairs = [
            (tf.convert_to_tensor(grad), source)
            for grad, source in grads_and_vars
            if grad is not None
        ]
        for (grad, _), variable in zip(pairs, self.register(pairs)):
            if variable.squares is not None:
                variable.squares.assign_add(tf.square(tf.cast(grad, tf.float32)))
                variable.observed = True
        return grads_and_vars


def _identified(i: int, grad: Any, source: Any) -> Tuple[Any, str, Tuple[int, ...]]:
    """(key, name, shape) of the source, at position i, of a gradient: variables are known by
    themselves, other tensors by position."""
    is_variable = isinstance(source, tf.Variable)
    name = source.name.split(":")[0] if is_variable else f"source_{i}"
    shape = (source if is_variable else grad).shape
    if not shape.is_fully_defined():
        raise ValueError(
            f"{name}: its shape, {shape}, must be known when it is traced: what it holds is kept "
            f"from step to step"
        )
    return source.ref() if is_variable else i, name, tuple(shape)


def checksum(variable: Any) -> int:
    """Of all its values."""
    return zlib.crc32(variable.numpy().tobytes())
