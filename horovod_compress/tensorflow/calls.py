"""The calls of a compression's operations while a graph runs."""

import itertools
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf

from .. import kernels
from ..session.join_error import REDUCES_ONLY, error_of_joined
from ..session.notices import warn_once
from ..session.session import Session
from .applied_checks import Applied, Repetitions, Served
from .horovod_internals import Traces
from .optimizer import Serving
from .variables import Variable

# Numbers as large as this become infinite in float16.
_INFINITE_HALF = 65520


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


class Calls:
    """The work of a compression's operations.

    Attributes:
        applied: the variables that the bound optimizer was seen to apply gradients to.
        steps: those that were noted, once a variable is known.
    """

    def __init__(self, session: Session, serving: Serving, traces: Traces) -> None:
        self._session, self._serving, self._traces = session, serving, traces
        self.applied, self._repetitions = Applied(), Repetitions()
        self.steps: Optional[Served] = None

    def begin(
        self,
        names: List[str],
        known: Any,
        depending: List[Any],
        generation: int,
        factor: Callable[[], float],
        divisor: int,
        scale: np.ndarray,
        *arrays: np.ndarray,
    ) -> Tuple[np.int64, np.ndarray]:
        """Begins a call of a function. Returns its number, and for each gradient the shape [-1].

        depending: variables whose gradients depend on the bound optimizer; factor: returns what
        Horovod makes of a 1 on each rank, which is divided by `divisor` afterwards; arrays: values
        of `known`, where there is one; the learning rate; the optimizer's steps, where its momentum
        is taken over; all gradients, where they are clipped."""
        if generation != self._traces.generation:
            raise ValueError(
                "a function was traced before compression.switch(), and holds on to that trace: "
                "make the function anew, by tf.function(step), or "
                "with Keras model.make_train_function(force=True)"
            )
        given = iter(arrays)
        if known is not None and not np.array_equal(
            first_values(known).numpy(), next(given), equal_nan=True
        ):
            raise ValueError(
                f"gradients of other variables come to this compression than {known.name} and "
                f"those that it was traced with: make one for "
                "each model, and in eager code for each set of variables that is trained by itself"
            )
        session, serving = self._session, self._serving
        self.applied.check(depending, serving.takes_over)
        if self.steps is not None:
            self.steps.step_begins()
        # It has a momentum where one was taken over.
        compressor, takes_over = session.compressor, serving.takes_over
        if (
            takes_over
            and serving.horovods is not None
            and abs(float(serving.horovods.momentum) - compressor.momentum) > 1e-6
        ):
            warn_once(
                f"SGD's momentum was changed: {compressor.id} goes on with "
                f"{compressor.momentum:g}, which it took over. (Horovod's momentum_correction is "
                f"not needed: the learning rate is no part of this momentum)"
            )
        lr = float(next(given))
        steps = int(next(given)) if takes_over else 0
        clips = compressor.policy.clip_norm is not None
        squared_norm = (factor() / divisor) ** 2 * _squared_norm_of(given) if clips else None
        rank, size = session.ranks.rank_and_size()
        exchange = session.exchange
        number = exchange.begin(rank, size, float(scale), lr, factor(), squared_norm)
        if takes_over:
            self._repetitions.check(names, number, steps, exchange.counts)
        return np.int64(number), np.full((len(names), 1), -1, np.int32)

    def check_count(self, number: np.int64, ranks: np.ndarray) -> np.int64:
        """The number of a call, of which this many ranks take part. RuntimeError where some have
        joined."""
        self._session.exchange.count(ranks.nbytes)
        _, size = self._session.ranks.rank_and_size()
        gone = size - int(ranks[0])
        if gone:
            raise error_of_joined(gone, size, [], REDUCES_ONLY)
        return number

    def submit(self, chain: Chain, call: int, *arrays: np.ndarray) -> List[np.ndarray]:
        """As of `GraphExchange`. arrays: gradients, and their squares where needed."""
        squares = [each.reshape(-1) for each in arrays[len(chain.names) :]]
        grads, exchange = list(map(self._of_type, chain.variables, arrays)), self._session.exchange
        return exchange.submit(chain.names, call, grads, squares, chain.sends_number)

    def finish(
        self, chain: Chain, call: int, reduced: np.ndarray, *brought: np.ndarray
    ) -> List[np.ndarray]:
        """As of `GraphExchange`. Returns results in the shapes of variables."""
        exchange = self._session.exchange
        results = exchange.finish(chain.names, call, reduced, brought)
        for name, result, half in zip(chain.names, results, chain.halves):
            # Those that are too large for float16 fail.
            if half and not kernels.of(result).max_abs([result])[0] < _INFINITE_HALF:
                exchange.fail(name)
        return [its.reshape(each.shape) for each, its in zip(chain.variables, results)]

    def step_alone(self, chains: List[Chain], lr: float, *arrays: np.ndarray) -> List[np.ndarray]:
        """A whole step of all chains on a rank that is alone. arrays: as of `submit`, chain by
        chain. Returns results as of `finish`."""
        exchange, compressor = self._session.exchange, self._session.compressor
        given, grads = iter(arrays), []
        parts = [list(itertools.islice(given, chain.inputs)) for chain in chains]
        for chain, its in zip(chains, parts):
            for i, variable in enumerate(chain.variables):
                wide = np.float64 if variable.is_float64 else np.float32
                its[i] = np.array(its[i], wide).reshape(-1)
                grads.append(its[i])
        clips = compressor.policy.clip_norm is not None
        norm = _squared_norm_of(grads) if clips else None
        call = exchange.begin(0, 1, lr=float(lr), squared_norm=norm)
        results: List[np.ndarray] = []
        for chain, its in zip(chains, parts):
            # All that the rank sends comes back to it.
            array, *message = self.submit(chain, call, *its)
            for _ in chain.variables[0].moved[1:]:
                message = exchange.advance(chain.names, call, *message)
            results += self.finish(chain, call, array, *message)
        return results

    def _of_type(self, variable: Variable, grad: np.ndarray) -> np.ndarray:
        """The gradient in the type in which the exchange takes it."""
        if grad.dtype == variable.result:
            return grad
        with np.errstate(over="ignore", under="ignore"):
            narrow = grad.astype(variable.result)
        lost = (narrow == 0) & (grad != 0) | np.isinf(narrow) & np.isfinite(grad)
        if lost.any():
            self._session.tell_of_float32(variable.name)
        return narrow


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


def _squared_norm_of(grads: Iterable[np.ndarray]) -> float:
    flat = [np.ascontiguousarray(grad, np.float32).reshape(-1) for grad in grads]
    return sum(kernels.cpu.squared_norm(flat))
