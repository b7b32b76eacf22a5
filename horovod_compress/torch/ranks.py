"""Horovod's ranks in PyTorch."""

import functools
from typing import Any, Callable, Dict

import horovod.torch as hvd
import torch

from ..session.process_sets import HorovodRanks
from ..transport.base import Transport
from ..transport.loopback import Loopback
from .mpi import MPITransport
from .transport import HorovodTransport, keep, synchronize


class TorchRanks(HorovodRanks):
    """The ranks of a process set of horovod.torch. reduced: True where Horovod's optimizer reduces
    what they exchange, which it also does in a process set of one rank."""

    def __init__(self, process_set: Any, reduced: bool = False) -> None:
        super().__init__(hvd, process_set)
        self.active = self.active or reduced and self.included and hvd.size() > 1
        # By whether MPI moves payloads.
        self._transports: Dict[bool, Transport] = {}

    def transport_of(self, compressor: Any) -> Transport:
        if not self.active:
            return Loopback.group(1)[0]
        over_mpi = compressor.policy.transport == "mpi"
        if over_mpi not in self._transports:
            self._transports[over_mpi] = (
                MPITransport(hvd, self.process_set)
                if over_mpi
                else HorovodTransport(self.process_set)
            )
        return self._transports[over_mpi]

    def mean(self, tensor: torch.Tensor, name: str) -> Callable[[], Any]:
        """Starts the mean over ranks, in the tensor's own memory. Returns a function that waits for
        it."""
        self.transport.count(tensor.nbytes, tensor.nbytes)
        handle = hvd.allreduce_async_(
            tensor, name=name, op=hvd.Average, process_set=self.process_set
        )
        return functools.partial(synchronize, keep(handle))
