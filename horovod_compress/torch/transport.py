"""Horovod's ranks in PyTorch, and its own collectives, through horovod.torch. These work with MPI
and Gloo, and Horovod fuses them with its other ones."""

import functools
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from ..protocol.wire import FrameLength, Steady
from ..session.join_error import REDUCES_ONLY, error_of_joined
from ..session.process_sets import HorovodRanks, ProcessSetRanks
from ..torch_common.parameters import tensor_of
from ..transport.base import Transport
from ..transport.loopback import Loopback
from .counted_step import CountedStep
from .mpi import MPITransport

_OPS = {"sum": hvd.Sum, "max": hvd.Max}
# Seconds between two looks whether an operation is over; a sixteenth of the time so far, within
# these.
_SHORTEST, _LONGEST = 50e-6, 1e-3


def sleep_until_over(handle: int) -> None:
    """Waits for an operation of Horovod's, and leaves the processor to others meanwhile. Horovod's
    own wait is a loop of sched_yield(), which takes turns with all that has to run before the
    operation can end, where ranks share a core."""
    since = time.monotonic()
    while not _is_over(handle):
        time.sleep(min(max(_SHORTEST, (time.monotonic() - since) / 16), _LONGEST))


def _is_over(handle: int) -> bool:
    try:
        return hvd.poll(handle)
    except ValueError:
        # Its result has been taken before.
        return True


def synchronize(handle: int) -> Any:
    """hvd.synchronize, asleep until the operation is over."""
    sleep_until_over(handle)
    try:
        return hvd.synchronize(handle)
    finally:
        _views.pop(handle, None)


# Of the tensors of operations that are under way, by handle.
_views: Dict[int, List[torch.Tensor]] = {}


def keep(handle: int) -> int:
    """Keeps views of an operation's tensors until `synchronize`. Returns its handle.

    Without them its tensors are only Python's when Horovod's thread lets go of them, for which
    PyTorch needs Python's lock. When that thread ends, as it does when another rank has ended, it
    has a lock of Horovod's then, for which a rank that starts an operation waits with Python's.
    """
    # Horovod gives its outputs to nobody before. Its thread may be giving them their sizes: so none
    # are read.
    tensors = _tensors_in(mpi_ops._handle_map.get(handle, ()))
    _views[handle] = [each.as_strided((0,), (1,)) for each in tensors]
    return handle


def _tensors_in(found: Any) -> List[torch.Tensor]:
    if isinstance(found, tuple):
        return [tensor for each in found for tensor in _tensors_in(each)]
    return [found]


# A process set's ranks are asked for, because they may change.
class HorovodTransport(ProcessSetRanks, Transport):  # type: ignore[override]
    """Sends each message when it is started, those of a step's gathers as soon as its ranks are
    counted; Horovod negotiates the order, but of those whose shapes it has seen."""

    reduces_on_device = True

    def in_step(self, name: str) -> Any:
        return CountedStep(self, name)

    def frame_length(self) -> FrameLength:
        return Steady()

    def allgather(
        self, name: str, payload: np.ndarray, begin: Optional[Callable] = None
    ) -> Callable[[], np.ndarray]:
        wait = (begin or self.begin)(
            functools.partial(hvd.allgather_async, name=name, process_set=self._process_set),
            payload,
        )
        self.count(payload.nbytes, -payload.nbytes)

        def wait_for_all() -> np.ndarray:
            received = wait().numpy()
            self.count(0, received.nbytes)
            return received

        return wait_for_all

    def allreduce(self, name: str, array: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        self.count(array.nbytes, array.nbytes)
        handle = keep(
            hvd.allreduce_async_(
                tensor_of(array), name=name, op=_OPS[op], process_set=self._process_set
            )
        )

        def wait() -> np.ndarray:
            self.wait_for(handle)
            return array

        return wait

    def alltoall(
        self,
        name: str,
        payload: np.ndarray,
        splits: Sequence[int],
        begin: Optional[Callable] = None,
    ) -> Callable[[], List[np.ndarray]]:
        lengths = torch.tensor(splits, dtype=torch.int32, device="cpu")
        wait = (begin or self.begin)(
            functools.partial(
                hvd.alltoall_async, splits=lengths, name=name, process_set=self._process_set
            ),
            payload,
        )
        self.count(sum(splits), -splits[self.rank])

        def wait_for_parts() -> List[np.ndarray]:
            received, lengths = wait()
            self.count(0, received.nbytes)
            return [part.numpy() for part in received.split(lengths.tolist())]

        return wait_for_parts

    def begin(self, start: Callable[[torch.Tensor], int], payload: np.ndarray) -> Callable[[], Any]:
        """Starts what ranks that have called hvd.join() can take no part in, unless a `CountedStep`
        gives `allgather` and `alltoall` its own way. start: returns Horovod's handle."""
        return functools.partial(self.wait_for, keep(start(torch.from_numpy(payload))))

    def begin_count(self, here: torch.Tensor, name: str) -> int:
        """Starts the mean of a 1 over ranks, to which those that have joined add 0. Returns
        Horovod's handle."""
        self.count(here.nbytes, here.nbytes)
        # A mean, as carriers mostly are: Horovod joins it with those.
        return keep(
            hvd.allreduce_async_(here, name=name, op=hvd.Average, process_set=self._process_set)
        )

    def error_of_missing(self, count: int, why: str) -> RuntimeError:
        return error_of_joined(count, self.size, self._joined(), why)

    def _joined(self) -> List[int]:
        """The ranks that have called hvd.join(). A collective of those that have not."""
        here = np.zeros(self.size, np.int32)
        here[self.rank] = 1
        # Ranks that have joined add zeros.
        found = self.allreduce("hvdc.here", here)()
        return [rank for rank, there in enumerate(found.tolist()) if not there]

    def refusal(self) -> RuntimeError:
        """The error where ranks have called hvd.join(). A collective of those that have not."""
        joined = self._joined()
        return error_of_joined(len(joined), self.size, joined, REDUCES_ONLY)

    def wait_for(self, handle: int) -> Any:
        try:
            return synchronize(handle)
        except HorovodInternalError as error:
            if "Join" in str(error):
                raise self.refusal() from error
            raise


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
