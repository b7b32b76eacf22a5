"""A compression of gradients that users of PyTorch hold."""

from typing import Any, Optional

import torch

from ..compressors import get_compressor
from ..engine.record_types import Plan
from ..session.auto import refuse_begun_within_step
from ..session.bound import Bound
from .steps import Steps


class GradientCompression(Bound):
    """A compression of the gradients of an optimizer's parameters, whoever hands them over."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps.session)
        self._steps = steps

    def __repr__(self) -> str:
        return f"<{self._session.compressor!r} bound to {len(self._steps.slots)} parameters>"

    @property
    def plan(self) -> Plan:
        """The result of auto() so far: see `Controller.plan`. AttributeError without a trial."""
        if self._session.trial is None:
            raise AttributeError("only a compression that auto() has made has a plan")
        return self._session.trial.plan()

    def switch(self, spec: Any, at: Optional[int] = None) -> None:
        """Goes on with another compression, "dgc:ratio=0.01" or {"id": "dgc", "ratio": 0.01},
        from the next step on; at: from that step on, counted from 0 since training began.

        What ranks have not sent yet goes on: in what the new algorithm keeps, else densely in the
        first step. An SGD's momentum is taken over, or given back, and counts once. All ranks call
        it between the same two steps, with the same arguments. ValueError for a bad spec, and
        RuntimeError between backward() and step(), with nothing changed; MismatchError where ranks
        differ. auto() takes it for its choice, and tries nothing any more.
        """
        session, compressor = self._session, get_compressor(spec)
        if session.trial is not None and (not isinstance(spec, str) or at is not None):
            raise ValueError(
                "auto() keeps specs as text, and changes them itself: say "
                "switch('dgc:ratio=0.01'), without at"
            )
        if at is not None:
            if isinstance(at, bool) or not isinstance(at, int) or at < 0:
                raise ValueError(f"at must be a step, counted from 0, not {at!r}")
            refuse_begun_within_step(compressor)
            later = [*session.switches, (at, compressor.config)]
            session.switches = sorted(later, key=lambda switch: switch[0])
            return
        session.switch(compressor)
        if session.trial is not None:
            session.trial.resume(spec, True)


def check_types(optimizer: Any, grad_scaler: Any) -> None:
    """Raises TypeError for a first argument or a `grad_scaler` of the wrong kind."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"a compression is bound to a torch optimizer, its first argument, not to an "
            f"object of {type(optimizer)}"
        )
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, not {grad_scaler!r}")
