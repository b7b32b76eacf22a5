"""What PyTorch's compressions share, of gradients and of updates: transports, and states as
tensors."""

from typing import Any, Dict

import horovod.torch as hvd
import torch

from .. import checkpoint
from ..binding import Binding
from ..exchange import Exchange
from ..transport.base import Transport
from ..transport.horovod import HorovodTransport
from ..transport.loopback import Loopback
from ..transport.mpi import MPITransport


class TorchBinding(Binding):
    """A compression bound to a process set of horovod.torch."""

    def __init__(self, process_set: Any) -> None:
        super().__init__(hvd, process_set)
        self._number()
        # By whether MPI moves payloads.
        self._transports: Dict[bool, Transport] = {}

    _exchange: Exchange
    _transport: Transport

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

    def _state(self, portable: bool) -> Dict[str, Any]:
        """What is kept, in tensors and plain values; portable: the mean of all ranks'."""
        state = self._exchange.state_dict()
        if portable:
            state = checkpoint.portable(state, self._transport, self._label)
        state["tensors"] = {
            name: {key: torch.from_numpy(array) for key, array in arrays.items()}
            for name, arrays in state["tensors"].items()
        }
        return state
