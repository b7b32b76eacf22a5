"""The life of a step, from its first gradient to the optimizer's use of the results: a
state machine, and the errors for what users do in an order that cannot be right."""

import contextlib
import enum
from typing import Dict, Iterator, Optional, Tuple

SYNCHRONIZE_FIRST = (
    "call optimizer.synchronize() before anything that reads or changes gradients (a GradScaler's "
    "unscale_() and step(), clipping), and step "
    "inside `with optimizer.skip_synchronize():`"
)
CLOSURE = (
    "gradients came inside optimizer.step(closure), and {what}: end the closure with "
    "optimizer.synchronize(), and step inside `with optimizer.skip_synchronize():`; or give the "
    "optimizer to hvdc.UpdateOptimizer in place of hvd.DistributedOptimizer, which takes closures "
    "as they are"
)
_ROLLED_BACK = (
    "{why}. The step was given up. Where other ranks may have used it, load the last saved states "
    "of model, optimizer and compression on all ranks, else go on"
)


class State(enum.Enum):
    """Where a step is."""

    # There are no results that an optimizer could use.
    IDLE = "idle"
    # Gradients are with Horovod, and not all results are there.
    EXCHANGING = "exchanging"
    # All results are there, and no optimizer.step() has begun to use them.
    UNUSED = "unused"
    # The same, while a step's closure is under way, which may bring other gradients.
    BEFORE_CLOSURE = "before closure"
    # optimizer.step() uses the results.
    APPLYING = "applying"
    # A result cannot be used. The step is brought to its end, because the other ranks wait.
    FAILED = "failed"


class Event(enum.Enum):
    """An event in a step's life."""

    # The first gradient comes.
    BEGIN = "begin"
    # The last result comes.
    ARRIVE = "arrive"
    # optimizer.step() begins. Where results are not there yet, Horovod brings them within it.
    STEP = "step"
    # The same, inside of a GradScaler's step.
    SCALED_STEP = "scaled step"
    STEP_ENDED = "step ended"
    # What was sent counts, though no optimizer has used it.
    COMMIT = "commit"
    # Nobody can use its results: it has failed, was discarded, or another state was loaded.
    ROLLBACK = "rollback"
    FAIL = "fail"


_S, _E = State, Event
TRANSITIONS: Dict[State, Dict[Event, State]] = {
    _S.IDLE: {
        _E.BEGIN: _S.EXCHANGING,
        _E.STEP: _S.IDLE,
        _E.STEP_ENDED: _S.IDLE,
        _E.COMMIT: _S.IDLE,
        _E.ROLLBACK: _S.IDLE,
        _E.FAIL: _S.FAILED,
    },
    _S.EXCHANGING: {
        # Where the step's first gradient was refused before it was sent.
        _E.BEGIN: _S.EXCHANGING,
        _E.ARRIVE: _S.UNUSED,
        _E.STEP: _S.EXCHANGING,
        _E.STEP_ENDED: _S.EXCHANGING,
        _E.COMMIT: _S.IDLE,
        _E.ROLLBACK: _S.IDLE,
        _E.FAIL: _S.FAILED,
    },
    _S.UNUSED: {
        _E.STEP: _S.APPLYING,
        _E.SCALED_STEP: _S.APPLYING,
        # An optimizer has ignored its closure, after which results are used.
        _E.STEP_ENDED: _S.IDLE,
        _E.COMMIT: _S.IDLE,
        _E.ROLLBACK: _S.IDLE,
        _E.FAIL: _S.FAILED,
    },
    _S.BEFORE_CLOSURE: {
        _E.STEP: _S.APPLYING,
        _E.SCALED_STEP: _S.APPLYING,
        _E.STEP_ENDED: _S.IDLE,
        _E.ROLLBACK: _S.IDLE,
        _E.FAIL: _S.FAILED,
    },
    _S.APPLYING: {
        # Gradients of a closure's next call, or after an optimizer.step() that has raised.
        _E.BEGIN: _S.EXCHANGING,
        # Horovod's step contains the step of the optimizer that it extends.
        _E.STEP: _S.APPLYING,
        _E.SCALED_STEP: _S.APPLYING,
        _E.STEP_ENDED: _S.IDLE,
        _E.COMMIT: _S.IDLE,
        _E.ROLLBACK: _S.IDLE,
        _E.FAIL: _S.FAILED,
    },
    _S.FAILED: {
        _E.BEGIN: _S.FAILED,
        _E.STEP: _S.FAILED,
        _E.STEP_ENDED: _S.FAILED,
        _E.ROLLBACK: _S.IDLE,
        _E.FAIL: _S.FAILED,
    },
}
_SCALER_FIRST = f"GradScaler.step() came before optimizer.synchronize(): {SYNCHRONIZE_FIRST}"
REFUSALS: Dict[Tuple[State, Event], str] = {
    (_S.IDLE, _E.SCALED_STEP): _SCALER_FIRST,
    (_S.EXCHANGING, _E.SCALED_STEP): _SCALER_FIRST,
    (_S.FAILED, _E.SCALED_STEP): _SCALER_FIRST,
    (_S.BEFORE_CLOSURE, _E.COMMIT): CLOSURE.format(
        what="Horovod had exchanged others at the step's beginning, which nothing uses"
    ),
}


class Lifecycle:
    """Where the last step of a compression is."""

    def __init__(self) -> None:
        self.state = State.IDLE
        self._why: Optional[str] = None

    @property
    def is_unused(self) -> bool:
        """True where results are there that no optimizer.step() has begun to use."""
        return self.state in (State.UNUSED, State.BEFORE_CLOSURE)

    def take(self, event: Event) -> bool:
        """Goes on to the next state.

        Returns:
            True if the state has changed.

        Raises:
            RuntimeError: as of `expect`; nothing is changed then.
        """
        self.expect(event)
        before, self.state = self.state, TRANSITIONS[self.state][event]
        return self.state is not before

    def expect(self, event: Event) -> None:
        """Looks whether an event may come now.

        Raises:
            RuntimeError: where it may not, with what the user has to do.
        """
        if event not in TRANSITIONS[self.state]:
            unexpected = f"{event.value!r} cannot come where a step is {self.state.value!r}"
            raise RuntimeError(REFUSALS.get((self.state, event), unexpected))

    def fail(self, why: Optional[str]) -> None:
        """Marks the step as one whose results cannot be used.

        Args:
            why: the reason, for the error at the step's end; None where one is raised now. The
                first one counts.
        """
        if self.take(Event.FAIL):
            self._why = why

    def failure(self) -> Optional[RuntimeError]:
        """Rolls back a step that has failed.

        Returns:
            The error to raise; None where one was raised before.
        """
        self.take(Event.ROLLBACK)
        return None if self._why is None else RuntimeError(_ROLLED_BACK.format(why=self._why))

    @contextlib.contextmanager
    def closure(self) -> Iterator[None]:
        """Around a step's closure."""
        if self.state is State.UNUSED:
            self.state = State.BEFORE_CLOSURE
        try:
            yield
        finally:
            if self.state is State.BEFORE_CLOSURE:
                self.state = State.UNUSED
