"""What a compression's operations do while a graph runs."""

from abc import abstractmethod
from typing import Any, List, Sequence, Tuple

import numpy as np

from .. import kernels
from ..adapters.binding import warn_once
from ..protocol.handshake import REDUCES_ONLY, error_of_joined
from ..protocol.requests import Collective
from .applied import Unapplied
from .exchange import Message
from .operations import Variable, dtypes_of, first_values, split_message, squared_norm_of
from .variables import VariableCompression

# Numbers as large as this become infinite in float16.
_INFINITE_HALF = 65520


class RunningCompression(VariableCompression):
    """The steps of a compression, as operations of a graph take them."""

    # Horovod's optimizer, where gradients come from that.
    _served: Any = None
    # Which of the states of `_states` traces are for.
    _traces = 0

    @property
    @abstractmethod
    def _takes_over(self) -> bool:
        """Whether the optimizer's momentum is taken over."""

    def _begin(
        self,
        tensors: int,
        known: Any,
        unapplied: Unapplied,
        traces: int,
        scale: np.ndarray,
        values: Any = None,
    ) -> Tuple[np.int64, np.ndarray]:
        if traces != self._traces:
            raise ValueError(
                "a function was traced before compression.switch(), and holds on to that trace: "
                "make the function anew, by tf.function(step), or "
                "with Keras model.make_train_function(force=True)"
            )
        if known is not None and not np.array_equal(
            first_values(known).numpy(), values, equal_nan=True
        ):
            raise ValueError(
                f"gradients of other variables come to this compression than {known.name} and "
                f"those that it was traced with: make one for "
                "each model, and in eager code for each set of variables that is trained by itself"
            )
        unapplied.check()
        # It has a momentum where one was taken over.
        compressor: Any = self._compressor
        if (
            self._takes_over
            and self._served is not None
            and abs(float(self._served.momentum) - compressor.momentum) > 1e-6
        ):
            warn_once(
                f"SGD's momentum was changed to {float(self._served.momentum):g}: {compressor.id} "
                f"goes on with "
                f"{compressor.momentum:g}, which it took over. (Horovod's momentum_correction is "
                f"not needed: the learning rate is no part "
                "of this momentum)"
            )
        number = self._exchange.begin(
            tensors, self._process_set.rank(), self._process_set.size(), float(scale)
        )
        return np.int64(number), np.full((tensors, 1), -1, np.int32)

    def _check_count(self, number: np.int64, ranks: np.ndarray) -> np.int64:
        size = self._process_set.size()
        gone = size - int(ranks[0])
        if gone:
            raise error_of_joined(gone, size, [], REDUCES_ONLY)
        return number

    def _submit(
        self, variable: Variable, call: int, grad: np.ndarray, *options: np.ndarray
    ) -> List[np.ndarray]:
        given = iter(options)
        squared_norm = float(next(given)) if self._compressor.policy.clip_norm is not None else None
        lr = float(next(given)) if self._compressor.policy.follow_lr else None
        squares = next(given).reshape(-1) if variable.squares is not None else None
        grad = self._of_type(variable, grad)
        carrier, message, number = self._exchange.submit(
            variable.name, grad, call, squares, squared_norm, lr
        )
        numbers = (
            [np.empty(0, np.int64) if number is None else number]
            if variable.name == self._exchange.sends_number
            else []
        )
        return [carrier, *(message or self._nothing(variable.moved[:1])), *numbers]

    def _advance(self, variable: Variable, call: int, *brought: np.ndarray, stage: int) -> Message:
        arrived, numbers = split_message(brought, variable.moved[stage - 1])
        return self._exchange.advance(variable.name, call, arrived, numbers) or self._nothing(
            variable.moved[stage : stage + 1]
        )

    def _step_alone(self, variables: List[Variable], *arrays: np.ndarray) -> List[np.ndarray]:
        grads, given = arrays[: len(variables)], iter(arrays[len(variables) :])
        lr = float(next(given)) if self._compressor.policy.follow_lr else None
        squared_norm = (
            float(squared_norm_of(lambda: 1.0, *grads))
            if self._compressor.policy.clip_norm is not None
            else None
        )
        call = self._exchange.begin(
            len(variables), self._process_set.rank(), self._process_set.size()
        )
        results = []
        for variable, grad in zip(variables, grads):
            squares = next(given).reshape(-1) if variable.squares is not None else None
            flat = np.array(grad, np.float64 if variable.is_float64 else np.float32).reshape(-1)
            flat = self._of_type(variable, flat)
            result = self._exchange.step_alone(variable.name, flat, call, squares, squared_norm, lr)
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

    def _nothing(self, collectives: Sequence[Collective]) -> Message:
        """The message of these collectives, at most one, where a step has none for them."""
        splits = np.zeros(self._process_set.size(), np.int32)
        return [
            splits if dtype == "int32" and c.verb == "alltoall" else np.empty(0, dtype)
            for c in collectives
            for dtype in dtypes_of([c])
        ]

    def _finish(
        self, variable: Variable, call: int, reduced: np.ndarray, *brought: np.ndarray, half: bool
    ) -> List[np.ndarray]:
        if variable.direct:  # Horovod has reduced it already.
            self._exchange.submit(variable.name, reduced.reshape(-1), call)
        arrived, numbers = split_message(brought, variable.moved[-1]) if brought else (None, None)
        result = self._exchange.finish(variable.name, call, reduced.reshape(-1), arrived, numbers)
        return [self._checked(variable, result, half)]

    def _checked(self, variable: Variable, result: np.ndarray, half: bool) -> np.ndarray:
        if half and not kernels.of(result).max_abs(result) < _INFINITE_HALF:
            self._exchange.fail(variable.name)
        return result.reshape(variable.shape)
