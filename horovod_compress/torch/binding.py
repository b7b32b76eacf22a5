"""The transports of PyTorch's compressions on Horovod, of gradients and of updates."""

from typing import Any, Dict

import horovod.torch as hvd

from ..adapters.process_sets import HorovodBinding
from ..transport.base import Transport
from ..transport.horovod import HorovodTransport
from ..transport.loopback import Loopback
from ..transport.mpi import MPITransport


class TorchBinding(HorovodBinding):
    """A compression bound to a process set of horovod.torch."""

    def __init__(self, process_set: Any) -> None:
        super().__init__(hvd, process_set)
        # By whether MPI moves payloads.
        self._transports: Dict[bool, Transport] = {}

    def _transport_of(self, compressor: Any) -> Transport:
        if not self._active:
            return Loopback.group(1)[0]
        over_mpi = compressor.policy.transport == "mpi"
        if over_mpi not in self._transports:
            self._transports[over_mpi] = (
                MPITransport(hvd, self._process_set)
                if over_mpi
                else HorovodTransport(self._process_set)
            )
        return self._transports[over_mpi]
