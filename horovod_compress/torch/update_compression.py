"""The exchange of what ranks' optimizers would add to the parameters, on Horovod."""

import functools
from typing import Any, Callable, Dict, List, Optional, Tuple

import horovod.torch as hvd
import numpy as np
import torch

from ..engine.handover import DEBT
from ..protocol.handshake import gather
from ..pytorch.update_compression import UpdateExchange
from ..transport.horovod import synchronize
from .binding import TorchBinding


class UpdateCompression(UpdateExchange, TorchBinding):
    """The exchange of an UpdateOptimizer of Horovod's ranks."""

    def __init__(
        self,
        spec: Any,
        shapes: Dict[str, Tuple[int, ...]],
        options: Dict[str, Any],
        process_set: Any,
    ) -> None:
        TorchBinding.__init__(self, process_set)
        self._begin_with(spec, shapes, options)

    _broadcast = "call hvd.broadcast_parameters(model.state_dict(), root_rank=0)"

    def begin(self, parameters: Dict[str, int], local_steps: int) -> None:
        self._refuse_unsynced(
            "hvd.elastic.TorchState(model=model, optimizer=optimizer) of this UpdateOptimizer"
        )
        super().begin(parameters, local_steps)

    def _start_mean(self, name: str, tensor: torch.Tensor) -> Callable[[], Any]:
        handle = hvd.allreduce_async_(
            tensor, name=name, op=hvd.Average, process_set=self._process_set
        )
        return functools.partial(synchronize, handle)

    def _follow_ranks(self) -> None:
        # In an elastic job: ranks have left, and those that stay are not asked to synchronize.
        if self._rank_and_size() != self._ranks:
            self._resize()

    # -- for elastic jobs: see `elastic.py`

    def of_all(self, number: int) -> List[int]:
        """The numbers of all ranks, which all call it, also where they do not know each other
        yet."""
        return gather(self._transport, "hvdc.elastic.number", number)

    def _entry(
        self, into: Optional[Dict[str, Any]] = None, debts: Optional[Dict[str, np.ndarray]] = None
    ) -> Dict[str, Any]:
        """debts: by name, what is to be sent beside what this keeps already."""
        kept = super()._entry(into)
        for name, values in (debts or {}).items():
            arrays = kept["tensors"][name]
            arrays[DEBT] = arrays.get(DEBT, 0) + values
        return kept
