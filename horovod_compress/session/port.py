"""The part that a host has in a session."""

import contextlib
from abc import ABC, abstractmethod
from typing import Any, Dict, Iterator, Optional

from ..engine.exchange import Exchange
from .choice import Choice


class Port(ABC):
    """The part that a host has in a session. Other methods than `choose` and `make` change nothing
    unless a host overrides them."""

    @abstractmethod
    def choose(self, spec: Any) -> Choice:
        """The choice that a spec comes to, without transport and machine. ValueError for what
        cannot be served."""

    def make(self, choice: Choice) -> Any:
        """Makes the driver of steps of a choice: where a host's arrays are there when steps are
        taken, an `Exchange`. It allocates the state."""
        exchange = Exchange(
            choice.compressor, choice.transport, choice.tensors, choice.elastic, choice.machine
        )
        exchange.follows_momentum = choice.follows_momentum
        return exchange

    def gains(self, choice: Choice) -> Dict[str, float]:
        """By name, what the optimizer's own momentum makes of a result of 1 under a choice, where
        that is another factor."""
        return {}

    def use(self, choice: Choice) -> None:
        """Makes the host's own part of a choice the one in force."""

    def look_for_optimizer(self) -> None:
        """Finds the optimizer, where it is needed and not known."""

    def before_switch(self) -> None:
        """Brings the last step to its end."""

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change of the choice, or of the state."""
        yield

    def factor(self) -> Optional[float]:
        """The host's result where every rank gives a 1: 1 for a mean, for a sum the number of
        ranks. None: not known yet."""
        return 1.0

    def kept(self) -> Dict[str, Any]:
        """The host's own part of a state: plain values by name."""
        return {}

    def take(self, state: Any) -> None:
        """Goes on with `kept` of a state that has been loaded."""

    def as_here(self, state: Any) -> Any:
        """A state, or a list of them, with the names that tensors have here."""
        return state

    def as_saved(self, state: Dict[str, Any]) -> Dict[str, Any]:
        """A state whose arrays are of the host's framework."""
        return state
