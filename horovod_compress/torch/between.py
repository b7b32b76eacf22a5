"""Watches for changes between the results of a step and its use, by the versions of one parameter
and its gradient."""

from typing import Optional, Tuple

import torch

from ..adapters.binding import warn_once
from ..pytorch.parameters import is_sparse
from ..pytorch.sgd import SGDTakeover, warn_of_changed
from . import horovod_internals


class Watch:
    """Watches the parameter whose result came last, which stands for all."""

    def __init__(self) -> None:
        self._param: Optional[torch.Tensor] = None
        # Of the parameter, and of its gradient.
        self._versions: Tuple[int, int] = 0, 0
        # Whether parameters changed after the last results, which no step has used.
        self._moved = False

    def results_came(self, param: torch.Tensor) -> None:
        version = horovod_internals.version_to_come(param.grad)
        self._param, self._versions = param, (param._version, version)

    def before_use(self, takeover: SGDTakeover, algorithm: str) -> None:
        """Warns where gradients that hold a momentum were changed."""
        self._moved = False
        if self._param is None or not takeover.covers(self._param):
            return
        grad = self._param.grad
        if grad is not None and not is_sparse(grad) and grad._version != self._versions[1]:
            warn_of_changed(algorithm, "optimizer.synchronize()")

    def before_discard(self) -> None:
        """Warns where results moved parameters without a step; not at once, for SAM does so."""
        moved = self._param is not None and self._param._version != self._versions[0]
        if moved and self._moved:
            warn_once(
                "two steps in turn were exchanged without an optimizer.step(), and are forgotten, "
                "because discardable=True; but parameters changed after them. Where you update "
                "parameters from p.grad yourself, what was not sent of gradients is lost: leave "
                "discardable out"
            )
        self._moved = moved
