"""`Compression.auto` in TensorFlow: steps are seen from one call of a traced function to the next,
and another candidate begins between two."""

import time
from typing import Any, Dict, Optional, Sequence, Union

import tensorflow as tf

from ..adapters.auto import (
    Automatic,
    Controller,
    Trying,
    auto_of,
    default_candidates,
    refuse_elastic,
)
from ..adapters.binding import DECAYED, LOOK, warn_once
from ..compressors import get_compressor
from .checks import check_options
from .compression import BoundCompression
from .optimizer import SGD, can_take_over, largest_momentum, unwrapped
from .unbound import UnboundCompression

# Calls in a row that trace, after which users are told that nothing comes of it.
_NEVER = 100
# Calls after a switch in which a debt may still go out by operations of its own.
_SETTLING = 2


class CompressionOnTrial(Trying, BoundCompression):
    """A bound AutoCompression: a compression with a controller, which it tells of steps.

    The function that the user or Keras calls, around the operations of the compression, says when a
    call of it begins. Times of calls in which a function is traced do not count.
    """

    def __init__(
        self,
        auto: Dict[str, Any],
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> None:
        refuse_elastic()
        super().__init__(
            "none", process_set=process_set, grad_scaler=grad_scaler, discardable=discardable
        )
        self._auto = auto
        # Of a state that was loaded before the optimizer is known.
        self._resumed: Optional[Dict[str, Any]] = None
        # Of the call that began last: when, after how many steps, whether it traced.
        self._began, self._taken, self._tracing = 0.0, 0, False
        self._uncounted = 0  # calls in a row that traced
        # Of what SGD's own momentum still holds, where that lives on.
        self._until_look, self._largest = LOOK, 0.0
        # Calls until operations of a debt can be left out.
        self._settling = 0

    def bind(self, optimizer: Any) -> None:
        is_sgd = isinstance(unwrapped(optimizer), SGD)
        candidates = list(
            self._auto["candidates"]
            or default_candidates(is_sgd=is_sgd, takes_over=can_take_over(optimizer))
        )
        for spec in candidates:
            self._choose(get_compressor(spec), optimizer)
        controller = Controller(self, self._go_on_with, {**self._auto, "candidates": candidates})
        if self._resumed:
            controller.resume(**self._resumed)
        self._compressor = get_compressor(controller.in_force)
        super().bind(optimizer)
        self._controller = controller

    def _go_on_with(self, spec: str) -> None:
        self._settling = _SETTLING
        self._switch(get_compressor(spec).config)

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """As of BoundCompression. The choice that was made when the state was saved is taken
        over."""
        if self._controller:
            with self._controller.resuming(state):
                super().load_state_dict(state)
        else:
            auto, before = auto_of(state), self._compressor
            if auto:
                self._compressor = self._exchange.compressor = get_compressor(auto["spec"])
            try:
                super().load_state_dict(state)
            except ValueError:
                self._compressor = self._exchange.compressor = before
                raise
            self._resumed = auto
        # What was between two calls is no step's time.
        self._taken, self._tracing = self._steps_taken(), True

    def _note_traces(self) -> None:
        super()._note_traces()
        self._tracing = self._tracing or not tf.executing_eagerly()

    def _before_call(self) -> None:
        """Decides with what the call that begins takes its step, or several; those of the last one
        take its time in equal parts."""
        now, taken = time.perf_counter(), self._steps_taken()
        if taken <= self._taken:
            # The last call, one of several backward passes, exchanged nothing, and its time is part
            # of the step's.
            return
        self._uncounted = self._uncounted + 1 if self._tracing else 0
        if self._uncounted == _NEVER:
            warn_once(
                f"auto() has chosen nothing: {_NEVER} calls in a row were traced, whose times say "
                f"nothing. Give them inputs of one shape"
            )
        controller = self._controller
        controller.step_ended((now - self._began) / (taken - self._taken), counts=not self._tracing)
        if self._settling and controller.trials.current == controller.in_force:
            self._settling -= 1
            with self._tracing_again():
                pass
        controller.follow()
        if self._lives_on and self._takes_over:
            self._let_momentum_go()
        self._began, self._taken, self._tracing = time.perf_counter(), taken, False

    def _steps_taken(self) -> int:
        return max(self._exchange.steps_taken().values(), default=0)

    def _let_momentum_go(self) -> None:
        """Drops SGD's own momentum, gathered in steps that were tried without a takeover, once it
        has decayed: it needs no operations any more then."""
        self._until_look = (self._until_look or LOOK) - 1
        if self._until_look == 0:
            now = largest_momentum(self._served or self._optimizer)
            self._largest = max(self._largest, now)
            if now <= DECAYED * self._largest:
                with self._tracing_again():
                    self._lives_on = False


class AutoCompression(Automatic, UnboundCompression):
    __doc__ = Automatic.__doc__

    _bound_class = CompressionOnTrial

    _check = staticmethod(check_options)
    _tries = True
