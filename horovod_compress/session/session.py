"""Choices, agreements, switches and states of a compression's ranks. No framework is known here,
and no optimizer."""

import contextlib
import functools
import warnings
import weakref
from typing import Any, ContextManager, Dict, List, Optional, Tuple

from ..engine import checkpoint
from ..engine.discard import Snapshots, discard
from ..engine.recording import Destination, Recorder
from ..protocol.handshake import agree
from .auto import Controller
from .choice import Choice, description_of
from .port import Port
from .ranks import Ranks
from .step_lifecycle import Event, Lifecycle


class Session:
    """The choice of a rank that all ranks agree on. Construction exchanges nothing: ranks compare
    their configurations at the first gradient, or in `handshake`.

    Args:
        ranks: those that share it.
        port: the host's part, which has this session.
        spec: as for `horovod_compress.get_compressor`.
        discardable: True where steps can be forgotten.
    """

    def __init__(self, ranks: Ranks, port: Port, spec: Any, discardable: bool = False) -> None:
        # Weak, so that a compression goes when its user drops it.
        self.ranks, self.port = ranks, weakref.proxy(port)
        self.discardable = discardable
        # The life of the last step, where the host tells of it.
        self.lifecycle = Lifecycle()
        # True since the ranks that are together have compared their configurations.
        self.agreed = False
        # To come: the step from which on, and a spec.
        self.switches: List[Tuple[int, Any]] = []
        # Where candidates are tried.
        self.trial: Optional[Controller] = None
        self.has_told_of_float32 = False
        self.use(self.choose(spec))

    @functools.cached_property
    def exchange(self) -> Any:
        """The driver of steps, made when it is first needed."""
        self.port.look_for_optimizer()
        exchange = self.port.make(self.choice)
        if self.discardable:
            exchange.features["discard"] = Snapshots()
        return exchange

    @property
    def is_begun(self) -> bool:
        """True once `exchange` was made."""
        return "exchange" in vars(self)

    @property
    def compressor(self) -> Any:
        """The compressor in force."""
        return self.choice.compressor

    # -- what is chosen and agreed on

    def choose(self, spec: Any) -> Choice:
        """As of `Port`, with what ranks say of it."""
        choice = self.port.choose(spec)
        compressor, ranks = choice.compressor, self.ranks
        return choice._replace(
            transport=ranks.transport_of(compressor),
            machine=ranks.machine_of(compressor),
            elastic=ranks.elastic,
        )

    def use(self, choice: Choice) -> None:
        """Puts a choice in force. Tensors that are known already must fit it."""
        self.choice = choice
        self.ranks.transport, self.ranks.machine = choice.transport, choice.machine
        if self.is_begun:
            tensors = self.exchange.tensors
            tensors.compressor, tensors.machine = choice.compressor, choice.machine
        self.port.use(choice)

    def _description(self, choice: Choice) -> Dict[str, Any]:
        """The configuration, which must be the same on all ranks: nested JSON-able values."""
        auto = {} if self.trial is None else {"auto": self.trial.arguments}
        return {**description_of(choice.compressor), **choice.alike, **auto}

    def handshake(self, more: Optional[Dict[str, Any]] = None, *words: str) -> None:
        """Compares the ranks' options, tensors, versions and kernels, once, and `more`, in
        `words` of `agree`. All ranks must call it. MismatchError, on all ranks alike, names the
        first rank that differs and the difference."""
        if self.ranks.active and not self.agreed:
            description = {**self._description(self.choice), **(more or {})}
            agree(self.ranks.transport, self.ranks.label(), description, *words)
        self.agreed = True

    def meet(self) -> None:
        """Names collectives, and where `hosts=true` needs it sets up the ranks of each machine. All
        ranks call it, before a step."""
        self.exchange.label = self.ranks.label()
        machine = self.ranks.machine
        if machine is not None and machine.due:
            place = self.ranks.placement().machine
            machine.arrange(self.ranks.transport, self.ranks.label(), place)

    def switch(self, spec: Any, compare: bool = True) -> None:
        """Compresses as a spec says from the next step on.

        Args:
            spec: as for `get_compressor`.
            compare: whether all ranks do it, here, and say so to each other. Where they are not
                together yet they go on from rank 0's.

        Raises:
            ValueError: for what cannot be served; nothing is changed then.
            MismatchError: where ranks differ.
        """
        self.port.before_switch()
        exchange = self.exchange
        exchange.end_step()
        with self.port.changing():
            choice = self.choose(spec)
            compared = self.ranks.active and compare and self.ranks.synced
            if compared:
                agree(
                    self.ranks.transport,
                    f"{self.ranks.label()}.switch",
                    self._description(choice),
                    "called compression.switch()",
                    "Call it on all ranks, between the same two steps, with the same spec",
                )
            before, after = self.port.gains(self.choice), self.port.gains(choice)
            gains = {
                name: after.get(name, 1.0) / before.get(name, 1.0)
                for name in before.keys() | after.keys()
            }
            exchange.switch(
                choice.compressor,
                choice.tensors,
                gains,
                self.port.factor(),
                machine=choice.machine,
                transport=choice.transport,
                follows_momentum=choice.follows_momentum,
            )
            self.use(choice)
        self.agreed = compared
        if compared:
            self.meet()

    def resize(self) -> None:
        """From the next step on, ranks are those that are there now."""
        self.ranks.known = self.ranks.rank_and_size()
        self.exchange.resize(*self.ranks.known)

    def step_begins(self) -> None:
        """Goes on with another compression where that was asked for from this step on, or a trial
        says so."""
        if self.switches:
            self.exchange.end_step()
        while self.switches and self.switches[0][0] <= self.exchange.steps_taken():
            self.switch(self.switches.pop(0)[1])
        if self.trial is not None:
            self.trial.step_begins()

    def tell_of_float32(self, name: str) -> None:
        """Warns, the first time, of a tensor whose float64 numbers are not all there in float32."""
        if not self.has_told_of_float32:
            self.has_told_of_float32 = True
            warnings.warn(
                f"horovod_compress: {name} has float64 numbers that are not 0, and are 0 or "
                "infinite in float32, in which they are compressed. Scale the loss, or use none, "
                "which carries float64 as it is",
                RuntimeWarning,
                stacklevel=2,
            )

    # -- for users, as `Bound` says

    def record(self, to: Destination, every: int, by_tensor: bool) -> Recorder:
        self.exchange.end_step()
        recorder = Recorder(self.exchange, to, every, by_tensor)
        self.exchange.features["recording"] = recorder
        return recorder

    def discard(self) -> None:
        discard(self.exchange)
        self.lifecycle.take(Event.ROLLBACK)

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        state = {**self.exchange.state_dict(), **self.port.kept()}
        if portable:
            state = checkpoint.portable(state, self.ranks.transport, self.ranks.label())
        if self.trial is not None:
            state.update(self.trial.state())
        return self.port.as_saved(state)

    def load_state_dict(self, state: Any) -> None:
        if not self.ranks.included:
            return
        self.port.look_for_optimizer()
        resuming: ContextManager[None] = contextlib.nullcontext()
        if self.trial is not None:
            resuming = self.trial.resuming(state)
        with resuming:
            state = self.port.as_here(state)
            while self.switches and self.switches[0][0] < checkpoint.steps_of(state):
                self.switch(self.switches.pop(0)[1], compare=False)
            with self.port.changing():
                try:
                    self.exchange.load_state_dict(state)
                    self.port.take(state)
                except ValueError as error:
                    if self.ranks.active or self.choice.tensors:
                        raise
                    raise ValueError(f"{error}. And {self.ranks.refused_alone}") from None
            self.lifecycle.take(Event.ROLLBACK)
