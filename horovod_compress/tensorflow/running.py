"""The work of a compression's operations while a graph runs."""

from typing import Any, Callable, List, Optional, Tuple

import numpy as np

from .. import kernels
from ..adapters.binding import warn_once
from ..protocol.handshake import REDUCES_ONLY, error_of_joined
from .applied import Applied, Repetitions, Served
from .messages import Message
from .operations import Variable, first_values, squared_norm_of
from .variables import VariableCompression

# Numbers as large as this become infinite in float16.
_INFINITE_HALF = 65520


class RunningCompression(VariableCompression):
    """The steps of a compression, as operations of a graph take them."""

    # Horovod's optimizer, where gradients come from that.
    _served: Any = None
    # Which of the states of `_states` traces are for.
    _traces = 0

    # Whether the optimizer's momentum is taken over.
    _takes_over = False

    def __init__(self, process_set: Any) -> None:
        super().__init__(process_set)
        self._applied, self._repetitions = Applied(), Repetitions()
        # Once a variable is known.
        self._steps: Optional[Served] = None

    def _begin(
        self,
        names: List[str],
        known: Any,
        depending: List[Any],
        traces: int,
        factor: Callable[[], float],
        scale: np.ndarray,
        *arrays: np.ndarray,
    ) -> Tuple[np.int64, np.ndarray]:
        """depending: variables whose gradients depend on the bound optimizer; arrays: values of
        `known`, where there is one; the learning rate; the optimizer's steps, where its momentum is
        taken over; all gradients, where they are clipped."""
        if traces != self._traces:
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
        self._applied.check(depending, self._takes_over)
        if self._steps is not None:
            self._steps.step_begins()
        # It has a momentum where one was taken over.
        compressor: Any = self._compressor
        if (
            self._takes_over
            and self._served is not None
            and abs(float(self._served.momentum) - compressor.momentum) > 1e-6
        ):
            warn_once(
                f"SGD's momentum was changed: {compressor.id} goes on with "
                f"{compressor.momentum:g}, which it took over. (Horovod's momentum_correction is "
                f"not needed: the learning rate is no part of this momentum)"
            )
        lr = float(next(given))
        steps = int(next(given)) if self._takes_over else 0
        clips = compressor.policy.clip_norm is not None
        squared_norm = factor() ** 2 * squared_norm_of(given) if clips else None
        number = self._exchange.begin(
            self._process_set.rank(), self._process_set.size(), float(scale), lr, squared_norm
        )
        if self._takes_over:
            self._repetitions.check(names, number, steps, self._exchange.counts)
        return np.int64(number), np.full((len(names), 1), -1, np.int32)

    def _check_count(self, number: np.int64, ranks: np.ndarray) -> np.int64:
        self._exchange.count(ranks.nbytes)
        size = self._process_set.size()
        gone = size - int(ranks[0])
        if gone:
            raise error_of_joined(gone, size, [], REDUCES_ONLY)
        return number

    def _submit(
        self, variable: Variable, call: int, grad: np.ndarray, *squares: np.ndarray
    ) -> List[np.ndarray]:
        grad = self._of_type(variable, grad)
        return self._exchange.submit(variable.name, grad, call, *(a.reshape(-1) for a in squares))

    def _advance(self, variable: Variable, call: int, *brought: np.ndarray) -> Message:
        return self._exchange.advance(variable.name, call, brought)

    def _step_alone(self, variables: List[Variable], *arrays: np.ndarray) -> List[np.ndarray]:
        grads, given = arrays[: len(variables)], iter(arrays[len(variables) :])
        lr = float(next(given))
        clips = self._compressor.policy.clip_norm is not None
        call = self._exchange.begin(0, 1, 1.0, lr, squared_norm_of(grads) if clips else None)
        results = []
        for variable, grad in zip(variables, grads):
            squares = next(given).reshape(-1) if variable.squares is not None else None
            flat = np.array(grad, np.float64 if variable.is_float64 else np.float32).reshape(-1)
            result = self._exchange.step_alone(
                variable.name, self._of_type(variable, flat), call, squares
            )
            results.append(
                self._checked(variable, result, grad.dtype == np.float16).astype(
                    grad.dtype, copy=False
                )
            )
        return results

    def _of_type(self, variable: Variable, grad: np.ndarray) -> np.ndarray:
        """The gradient in the type in which the exchange takes it."""
        if grad.dtype == variable.result:
            return grad
        with np.errstate(over="ignore", under="ignore"):
            narrow = grad.astype(variable.result)
        lost = (narrow == 0) & (grad != 0) | np.isinf(narrow) & np.isfinite(grad)
        if lost.any():
            self._tell_of_float32(variable.name)
        return narrow

    def _finish(
        self, variable: Variable, call: int, reduced: np.ndarray, *brought: np.ndarray, half: bool
    ) -> List[np.ndarray]:
        if variable.direct:  # Horovod has reduced it already.
            self._exchange.submit(variable.name, reduced.reshape(-1), call)
        result = self._exchange.finish(variable.name, call, reduced.reshape(-1), brought)
        return [self._checked(variable, result, half)]

    def _checked(self, variable: Variable, result: np.ndarray, half: bool) -> np.ndarray:
        if half and not kernels.of(result).max_abs([result])[0] < _INFINITE_HALF:
            self._exchange.fail(variable.name)
        return result.reshape(variable.shape)
