"""Variables become known when their gradients are traced, on all ranks at once."""

import collections
import itertools
from typing import Any, Dict, Iterable, List, Set, Tuple

import horovod.tensorflow as hvd
import tensorflow as tf

from ..adapters.process_sets import HorovodBinding
from ..engine.handover import DEBT
from ..protocol.handshake import agree
from .eager import Eager
from .exchange import GraphExchange
from .horovod_internals import lasting_variable
from .operations import Variable, identified


class VariableCompression(HorovodBinding):
    """The variables of a compression."""

    def __init__(self, process_set: Any) -> None:
        self._join(process_set)
        self._variables: Dict[Any, Variable] = {}  # by key, see `identified`
        self._numbers: Dict[str, int] = {}  # of variables, by name
        # Whether variables that become known have to be in a state that was loaded.
        self._loaded = False

    def _join(self, process_set: Any) -> None:
        """Makes this a compression of that process set, which nothing was exchanged with yet."""
        hint = "variables need not be named in TensorFlow, and "
        super().__init__(hvd, process_set, hint=hint)
        self._transport = Eager(self._process_set)

    _exchange: GraphExchange

    def _register(self, pairs: List[Tuple[Any, Any]]) -> List[Variable]:
        """The Variable of each (gradient, source). New ones become known on all ranks at once."""
        self._refuse_unsynced("hvdc.elastic.TensorFlowKerasState(model, compression=compression)")
        self.handshake()
        keys, new = [], {}
        names = {variable.name for variable in self._variables.values()}
        for i, (grad, source) in enumerate(pairs):
            key, name, shape = identified(i, grad, source)
            keys.append(key)
            if key not in self._variables and key not in new:
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
            elif key in self._variables and self._variables[key].shape != shape:
                raise ValueError(
                    f"{name} has the shape {shape} and had {self._variables[key].shape} before: "
                    f"residuals are kept for variables, or tensors of one shape"
                )
        if new:
            self._make_known(new)
        for key, times in collections.Counter(keys).items():
            if times > 1 and not self._variables[key].plain:
                raise ValueError(
                    f"{self._variables[key].name} is twice among the variables of one call, and "
                    f"what is kept of its gradients would be used twice: give each variable once"
                )
        return [self._variables[key] for key in keys]

    def _make_known(self, new: Dict[Any, Tuple[str, Tuple[int, ...], bool]]) -> None:
        """Adds variables, {key: (name, shape, whether it is of float64)}, with the state that was
        loaded for them."""
        shapes = {name: list(shape) for name, shape, _ in new.values()}
        expected = self._expected()
        # Which this rank has from others, that know these variables already.
        if not (self._elastic and expected):
            agree(self._transport, f"{self._label()}.{len(self._variables)}", {"variables": shapes})
        missing = [name for name in shapes if self._loaded and name not in expected]
        if missing:
            raise ValueError(
                f"the state that was loaded does not fit: it has nothing for {', '.join(missing)}. "
                f"Was it this model? Keras numbers layers "
                "without a name throughout a process: name them, or call "
                "tf.keras.backend.clear_session() first"
            )
        for key, (name, shape, is_float64) in new.items():
            self._exchange.add(name, shape, self._compressor)
            number = self._numbers.setdefault(name, len(self._numbers))
            self._variables[key] = self._described(Variable(name, number, shape, is_float64))
        self._meet()
        if self._elastic and not self._expected():
            # What becomes known from now on does so on all ranks.
            self._loaded = False

    def _expected(self) -> Set[str]:
        """The names of variables that a state was loaded for, and that no trace has brought."""
        known = {variable.name for variable in self._variables.values()}
        return (self._exchange.shapes.keys() | self._exchange.loaded.keys()) - known

    def _described(self, variable: Variable) -> Variable:
        """The variable, which says what traces have to know of its compressor."""
        tensor = self._exchange.tensor(variable.name)
        first = tensor.declared[0]
        variable.carried, variable.moved = (
            (first.dtype, ()) if first.verb == "reducer" else ("float32", tensor.declared)
        )
        if variable.is_float64 and self._exchange.carries_float64(variable.name):
            variable.carried = "float64"
        clips = self._compressor.policy.clip_norm is not None
        dense = not variable.moved and variable.carried != "float16" and not clips
        # What is owed of earlier gradients is added to the next one.
        owes = DEBT in tensor.state.arrays
        variable.plain, variable.kin = dense and not owes, tensor.kin
        if tensor.compressor.policy.moments != "microbatch":
            variable.squares, variable.observed = None, False
        elif variable.squares is None:
            variable.squares = lasting_variable(variable.shape, tf.float32)
        return variable

    def _observe(self, grads_and_vars: Iterable[Tuple[Any, Any]]) -> List[Tuple[Any, Any]]:
        """Adds the squares of one backward pass."""
        grads_and_vars = list(grads_and_vars)
        if self._compressor.policy.moments != "microbatch":
            return grads_and_vars
        # Sparse gradients count where they become dense afterwards; the squares of the others are
        # not used.
        pairs = [
            (tf.convert_to_tensor(grad), source)
            for grad, source in grads_and_vars
            if grad is not None
        ]
        for (grad, _), variable in zip(pairs, self._register(pairs)):
            if variable.squares is not None:
                variable.squares.assign_add(tf.square(tf.cast(grad, tf.float32)))
                variable.observed = True
        return grads_and_vars
