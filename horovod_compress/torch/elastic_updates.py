"""The state of an UpdateOptimizer that its ranks keep where others come and go, and where one of
them alone has loaded a state."""

import copy
from typing import Any, Dict, List, Optional

import horovod.torch as hvd
import numpy as np
import torch

from ..engine.handover import DEBT
from ..protocol.handshake import gather
from ..session.elastic import Kept
from ..torch_common.updates import UpdatingOptimizer


class KeptUpdates:
    """As of `Kept`, with the optimizer's own state and what ranks share."""

    def __init__(self, optimizer: UpdatingOptimizer) -> None:
        self._optimizer, self._session = optimizer, optimizer._session
        self._compression = Kept(optimizer._session)

    def _of_all(self, number: int) -> List[int]:
        """The numbers of all ranks, which all call it, also where they do not know each other
        yet."""
        return gather(self._session.ranks.transport, "hvdc.elastic.number", number)

    def entry(self, into: Optional[Dict[str, Any]] = None, begun: bool = False) -> Dict[str, Any]:
        """As of `Kept`. A round that has begun, on this rank or, with `begun`, on another, is kept
        as one that has not: with what local steps have added among what the next exchange is to
        send."""
        optimizer = self._optimizer
        local_steps, parameters = optimizer.local_steps, optimizer._parameters
        kept = self._compression.entry(into["compression"] if into else None)
        for each in parameters if begun or local_steps else ():
            arrays = kept["tensors"][each.name]
            arrays[DEBT] = arrays.get(DEBT, 0) + (
                each.load(each.param.detach() - each.shared)[1]
                if local_steps
                else np.zeros(each.param.numel(), np.float32)
            )
        return {
            "compression": kept,
            "optimizer": copy.deepcopy(optimizer._optimizer.state_dict()),
            "shared": {
                each.name: (each.shared if local_steps else each.param).detach().clone()
                for each in parameters
            },
            "momentum": {name: its.clone() for name, its in optimizer._momenta().items()},
        }

    @torch.no_grad()
    def go_back_to(self, state: Dict[str, Any]) -> None:
        optimizer = self._optimizer
        self._compression.go_back_to(state["compression"])
        # Which would go on in the tensors that it is given.
        optimizer._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for each in optimizer._parameters:
            each.shared.copy_(state["shared"][each.name])
        for name, momentum in optimizer._momenta().items():
            momentum.copy_(state["momentum"][name])
        optimizer._rollback_round()
        optimizer._shared_is_kept = True

    @torch.no_grad()
    def sync(self) -> None:
        """All ranks go on from what rank 0 shares. Ranks that stay keep their optimizer's own
        state, and those that have just begun take rank 0's."""
        optimizer = self._optimizer
        # What the elastic state itself does with the model brings a rank's own parameters.
        if optimizer.local_steps or optimizer._shared_is_kept:
            optimizer._rollback_round()
        steps = self._of_all(self._session.exchange.steps_taken())
        self._compression.sync()
        if len(set(steps)) > 1:
            state = hvd.broadcast_object(
                optimizer._optimizer.state_dict(), root_rank=0, name="hvdc.elastic.optimizer"
            )
            if steps[hvd.rank()] != steps[0]:
                optimizer._optimizer.load_state_dict(state)
        shared = [(each.name, each.param) for each in optimizer._parameters]
        momenta = [(f"{name}.momentum", its) for name, its in optimizer._momenta().items()]
        hvd.broadcast_parameters([*shared, *momenta], root_rank=0)

    @torch.no_grad()
    def even_out(self, saved: Dict[str, Any]) -> Dict[str, Any]:
        """As of `Kept`. A round that has begun ends here."""
        if any(self._of_all(self._optimizer.local_steps)):
            self.go_back_to(self.entry(begun=True))
        return {**saved, "compression": self._compression.even_out(saved["compression"])}
