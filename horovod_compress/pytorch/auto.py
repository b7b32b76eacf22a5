"""The choice by trial in PyTorch: steps are seen from gradient to gradient, and another candidate
begins with a step's first one."""

import time
from typing import Any, Dict, List, Optional, Sequence, Union

import torch

from ..adapters.auto import Controller, default_candidates
from ..adapters.binding import is_elastic
from ..engine.records import Plan
from .compression import OptimizerCompression
from .sgd import can_take_over, is_plain_sgd


def _candidates_for(optimizer: Optional[torch.optim.Optimizer]) -> List[str]:
    takes_over = can_take_over(optimizer) and not is_plain_sgd(optimizer)
    return default_candidates(is_sgd=isinstance(optimizer, torch.optim.SGD), takes_over=takes_over)


class OnTrial(OptimizerCompression):
    """A compression with a controller, which it tells of steps.

    Args:
        auto: the arguments of `AutoCompression`.
        arguments: those of the compression's class behind the spec; the optimizer is the last.
        options: those by name.
    """

    def __init__(self, auto: Dict[str, Any], *arguments: Any, **options: Any) -> None:
        if is_elastic():
            raise ValueError(
                "in an elastic job ranks that join would not know what was chosen: let auto() "
                "choose in a job of constant size, and use plan['spec']"
            )
        candidates = list(auto["candidates"] or _candidates_for(arguments[-1]))
        # Steps are taken with the last candidate at first.
        super().__init__(candidates[-1], *arguments, **options)
        for spec in candidates:
            # What cannot be is refused now, not when its turn comes.
            self._choose(spec)
        self._controller = Controller(self, self._switch, {**auto, "candidates": candidates})
        self._began: Optional[float] = None  # when the last step did
        self._now = 0.0  # when the step that begins did

    def _begin_step(self) -> None:
        self._now = time.perf_counter()
        super()._begin_step()
        self._began = time.perf_counter()

    def _switch_where_due(self) -> None:
        super()._switch_where_due()
        if self._began is not None:
            self._controller.step_ended(self._now - self._began)
            self._controller.follow()

    def _description(self) -> Dict[str, Any]:
        return {**super()._description(), "auto": self._controller.arguments}

    @property
    def plan(self) -> Plan:
        """As of `Controller.plan`."""
        return self._controller.plan()

    def switch(self, spec: Any, *arguments: Any, **options: Any) -> None:
        """As of the compression; that is the choice then, and nothing is tried any more."""
        if not isinstance(spec, str) or arguments or options:
            raise ValueError(
                "auto() keeps specs as text, and changes them itself: say "
                "switch('dgc:ratio=0.01'), without at"
            )
        super().switch(spec)
        self._controller.resume(spec, True)

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """As of the compression; the choice comes with it."""
        return {**super().state_dict(portable), **self._controller.state()}

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """As of OptimizerCompression. The choice that was made when the state was saved is taken
        over."""
        with self._controller.resuming(state):
            super().load_state_dict(state)
