"""Operations of traced functions that call the exchange, and what is known of the variables that
they are for."""

import dataclasses
import functools
import math
import zlib
from typing import Any, Callable, Iterable, List, NamedTuple, Sequence, Tuple

import numpy as np
import tensorflow as tf

from .. import kernels
from ..protocol.requests import Collective


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

    @property
    def result(self) -> str:
        """The dtype of gradients in the exchange, and of its results."""
        return "float64" if self.carried == "float64" else "float32"


class Chain(NamedTuple):
    """Variables whose gradients go the same way in a call, and so through the same operations.
    names: theirs; halves: of each, whether its gradients are of float16; sends_number: whether the
    step's number travels behind its first message."""

    variables: Sequence[Variable]
    names: Tuple[str, ...]
    halves: Sequence[bool]
    sends_number: bool

    @property
    def inputs(self) -> int:
        """The number of arrays that a step takes: gradients, and their squares where needed."""
        return sum(1 + (variable.squares is not None) for variable in self.variables)


def copied(grad: Any, variable: Variable, flat: Any) -> Any:
    """The gradient, flat, in memory that nobody else reads, because it is worked in: a copy only
    where somebody holds it. Snapshot alone is not enough: TensorFlow computes it once for equal
    gradients, and for all steps where they are constant. The shape comes from an operation that it
    must run, and differs from those of other gradients to it. float64 stays what it is."""
    grad = grad if variable.is_float64 else tf.cast(grad, tf.float32)
    return tf.raw_ops.Snapshot(input=tf.reshape(grad, flat))


def failed_with(sparse: List[Any], grads: List[Any], variables: List[Variable]) -> List[Any]:
    """The gradients of variables, the smallest of them nan where a sparse one has elements that are
    not finite. Horovod gathers those by itself, and nobody will apply the step: a nan is how all
    ranks learn that it is to be undone."""
    values = [each.values for each in sparse if each.values.dtype.is_floating]
    sizes = {i: size for i, v in enumerate(variables) if (size := math.prod(v.shape))}
    if not values or not sizes:
        return grads
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in values])
    smallest, sent = min(sizes, key=lambda i: sizes[i]), list(grads)
    sent[smallest] = tf.where(finite, grads[smallest], tf.constant(np.nan, grads[smallest].dtype))
    return sent


def identified(i: int, grad: Any, source: Any) -> Tuple[Any, str, Tuple[int, ...]]:
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


def python_operation(
    function: Callable[..., Sequence[np.ndarray]], of: Any, inputs: List[Any], dtypes: List[str]
) -> List[Any]:
    """Adds an operation that calls function(of, arrays of the inputs…); returns its outputs, of
    these dtypes."""
    # It is not stateful: TensorFlow would run such operations one after the other, with a round
    # over the network in between.
    return tf.numpy_function(
        functools.partial(with_denormals, function, of),
        inputs,
        list(map(tf.as_dtype, dtypes)),
        stateful=False,
    )


def with_denormals(
    function: Callable[..., Sequence[np.ndarray]], *arguments: Any
) -> Sequence[np.ndarray]:
    """Calls a function with denormal numbers, which TensorFlow's threads treat as 0: results are
    other frameworks', bit for bit."""
    mode = kernels.cpu.flush_denormals(mode=0)
    try:
        return function(*arguments)
    finally:
        kernels.cpu.flush_denormals(mode=mode)


def first_values(variable: Any) -> Any:
    return tf.reshape(variable.read_value(), [-1])[:1000]


def checksum(variable: Any) -> int:
    """Of all its values."""
    return zlib.crc32(variable.numpy().tobytes())


def squared_norm_of(grads: Iterable[np.ndarray]) -> float:
    flat = [np.ascontiguousarray(grad, np.float32).reshape(-1) for grad in grads]
    return sum(kernels.cpu.squared_norm(flat))


def read_and_clear(squares: Any) -> List[Any]:
    if squares is None:
        return []
    read = squares.read_value()
    with tf.control_dependencies([read]):
        squares.assign(tf.zeros_like(read))
    return [read]
