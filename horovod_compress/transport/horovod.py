"""Horovod's own collectives, through horovod.torch. They work with MPI and Gloo, and Horovod fuses them with its other ones."""
from typing import Any, Callable, List, Sequence

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from ..handshake import error_of_joined
from .base import ProcessSetRanks, Transport

_OPS = {"sum": hvd.Sum, "max": hvd.Max}


class HorovodTransport(ProcessSetRanks, Transport):
    """Sends each message when it is started; Horovod negotiates the order."""

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        handle = hvd.allgather_async(torch.from_numpy(payload), name=name, process_set=self._process_set)
        return lambda: self._wait(handle).numpy()

    def allreduce(self, name: str, array: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        tensor = torch.from_numpy(array)
        handle = hvd.allreduce_async_(tensor, name=name, op=_OPS[op], process_set=self._process_set)
        return lambda: self._wait(handle).numpy()

    def alltoall(self, name: str, payload: np.ndarray, splits: Sequence[int]) -> Callable[[], List[np.ndarray]]:
        lengths = torch.tensor(splits, dtype=torch.int32)
        handle = hvd.alltoall_async(torch.from_numpy(payload), lengths, name=name, process_set=self._process_set)

        def wait() -> List[np.ndarray]:
            received, lengths = self._wait(handle)
            return [part.numpy() for part in received.split(lengths.tolist())]

        return wait

    def joined(self) -> List[int]:
        here = torch.zeros(self.size, dtype=torch.int32)
        here[self.rank] = 1
        found = hvd.allreduce(here, name="hvdc.here", op=hvd.Sum, process_set=self._process_set)  # ranks that have joined add zeros
        return [rank for rank, there in enumerate(found.tolist()) if not there]

    def _wait(self, handle: int) -> Any:
        try:
            return hvd.synchronize(handle)
        except HorovodInternalError as error:
            if "Join" in str(error):
                joined = self.joined()
                raise error_of_joined(
                    len(joined), self.size, joined, "hvd.join() works with Horovod's own reductions only, and this compression exchanges more"
                ) from error
            raise
