"""What an UpdateOptimizer keeps on Horovod: broadcast, and in elastic jobs."""

import copy
from typing import Any, Callable, Dict, Optional

import horovod.torch as hvd
import numpy as np
import torch

from ..adapters.binding import warn_once
from ..pytorch.around import OptimizerAround
from ..pytorch.updates import UpdatingOptimizer
from .update_compression import UpdateCompression

_NOT_NEEDED = (
    "an UpdateOptimizer's state is each rank's own, and hvd.broadcast_optimizer_state gives all "
    "ranks that of one: delete the line hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
)


class SharesUpdates(UpdatingOptimizer):
    """What an UpdateOptimizer does where ranks begin, come and go."""

    compression: UpdateCompression

    # torch declares it once for each kind of closure.
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """That of hvd.broadcast_optimizer_state: see `OptimizerAround.step`."""
        OptimizerAround.step(self)
        warn_once(_NOT_NEEDED)

    # -- for elastic jobs: see `elastic.py`

    def _entry(self, into: Optional[Dict[str, Any]] = None, begun: bool = False) -> Dict[str, Any]:
        """A round that has begun, on this rank or on another, is kept as one that has not: with
        what local steps have added among what the next exchange is to send."""
        return {
            "compression": self.compression._entry(
                into["compression"] if into else None,
                self._added() if begun or self.local_steps else {},
            ),
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
            "shared": {
                each.name: (each.shared if self.local_steps else each.param).detach().clone()
                for each in self._parameters
            },
            "momentum": {
                each.name: each.momentum.clone()
                for each in self._parameters
                if each.momentum is not None
            },
        }

    def _added(self) -> Dict[str, np.ndarray]:
        if not self.local_steps:
            return {
                each.name: np.zeros(each.param.numel(), np.float32) for each in self._parameters
            }
        return {
            each.name: each.load(each.param.detach() - each.shared)[1].copy()
            for each in self._parameters
        }

    @torch.no_grad()
    def _go_back_to(self, state: Dict[str, Any]) -> None:
        self.compression._go_back_to(state["compression"])
        # Which would go on in the tensors that it is given.
        self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for each in self._parameters:
            each.shared.copy_(state["shared"][each.name])
            if each.momentum is not None:
                each.momentum.copy_(state["momentum"][each.name])
        self._rollback_round()
        self._shared_is_kept = True

    def _rollback_round(self) -> None:
        self.local_steps = 0
        for each in self._parameters:
            each.rollback()

    @torch.no_grad()
    def _sync(self) -> None:
        """All ranks go on from what rank 0 shares. Ranks that stay keep their optimizer's own
        state, and those that have just begun take rank 0's."""
        # What the elastic state itself does with the model brings a rank's own parameters.
        if self.local_steps or self._shared_is_kept:
            self._rollback_round()
        steps = self.compression.of_all(self.compression._exchange.steps_taken())
        self.compression._sync()
        if len(set(steps)) > 1:
            state = hvd.broadcast_object(
                self._optimizer.state_dict(), root_rank=0, name="hvdc.elastic.optimizer"
            )
            if steps[hvd.rank()] != steps[0]:
                self._optimizer.load_state_dict(state)
        shared = [(each.name, each.param) for each in self._parameters]
        momenta = [
            (f"{each.name}.momentum", each.momentum)
            for each in self._parameters
            if each.momentum is not None
        ]
        hvd.broadcast_parameters([*shared, *momenta], root_rank=0)

    @torch.no_grad()
    def _even_out(self, saved: Dict[str, Any]) -> Dict[str, Any]:
        """As of compressions. A round that has begun ends here."""
        if any(self.compression.of_all(self.local_steps)):
            self._go_back_to(self._entry(begun=True))
        return {**saved, "compression": self.compression._even_out(saved["compression"])}
