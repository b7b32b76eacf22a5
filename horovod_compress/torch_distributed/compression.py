"""A compression of gradients whose means over a process group it takes itself."""

from abc import ABC, abstractmethod
from typing import Any, Dict, Iterable, List, Optional

import torch

from ..session.bound import Bound
from ..session.step_lifecycle import Event
from ..torch_common.parameters import Slot
from ..torch_common.steps import Steps
from .ranks import GroupRanks


class GroupCompression(Bound, ABC):
    """A compression that hands its gradients over by itself: it is the `Host` of its steps.

    Args:
        ranks: those that exchange.
        arguments: as of `Steps`, from `spec` on.
    """

    advice_on_options = (
        "Where only some ranks have set or loaded it, load it on all of them before training"
    )

    def __init__(self, ranks: GroupRanks, *arguments: Any) -> None:
        self._ranks = ranks
        self._steps = Steps(self, ranks, *arguments)
        super().__init__(self._steps.session)

    def __repr__(self) -> str:
        return f"<{self._session.compressor!r} of {len(self._steps.slots)} parameters>"

    # -- as of `Host`

    def reduced(self, steps: Steps) -> List[Slot]:
        return list(steps.slots)

    def factor(self) -> float:
        # That of a mean.
        return 1.0

    # It was given.
    def look_for_optimizer(self) -> None: ...

    def before_step(self, optimizer: Any) -> None: ...

    @abstractmethod
    def before_use(self, optimizer: Any, in_closure: bool) -> None:
        """As of `Host`."""

    @abstractmethod
    def before_unused(self) -> None:
        """As of `Host`."""

    def _used_by_any(self, here: Iterable[bool]) -> List[Slot]:
        """The parameters that some rank's backward passes have reached. All ranks call it.

        Others take no part in a step: what is kept of them would come as a gradient, by which an
        optimizer decays and moves them without end. here: of each parameter, whether this rank's
        have.
        """
        used = torch.tensor(list(here), dtype=torch.uint8, device="cpu")
        self._ranks.beside.reduce(used, "max")()
        return [slot for slot, its in zip(self._steps.slots, used.tolist()) if its]

    def _drop_interrupted(self) -> None:
        """Rolls back what a backward pass that has failed has left."""
        exchange = self._session.exchange
        exchange.within = bool
        if exchange.under_way:
            exchange.rollback()
            self._session.lifecycle.take(Event.ROLLBACK)
            self._ranks.beside.give_up()

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """As of `Bound`. After a backward pass that has failed, without its step."""
        if not self._session.exchange.within():
            self._drop_interrupted()
        return super().state_dict(portable)

    def switch(self, spec: Any, at: Optional[int] = None) -> None:
        """As of `Bound`, or with `at` as of `Steps`."""
        self._steps.switch(spec, at)
