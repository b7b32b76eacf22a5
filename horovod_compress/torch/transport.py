"""Horovod's ranks in PyTorch, and its own collectives, through horovod.torch. These work with MPI
and Gloo, and Horovod fuses them with its other ones."""

import atexit
import functools
import queue
import threading
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
from .mpi import MPITransport

_OPS = {"sum": hvd.Sum, "max": hvd.Max}
# Seconds between polls of the counts that are under way. Each takes Python's lock from a rank that
# trains.
_POLL_INTERVAL = 20e-3
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

    def in_step(self, name: str) -> Transport:
        return _CountedStep(self, name)

    def frame_length(self) -> FrameLength:
        return Steady()

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        wait = self._start(
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
        start = functools.partial(hvd.allreduce_async_, op=_OPS[op], process_set=self._process_set)
        handle = keep(start(tensor_of(array), name=name))

        def wait() -> np.ndarray:
            self._wait(handle)
            return array

        return wait

    def alltoall(
        self, name: str, payload: np.ndarray, splits: Sequence[int]
    ) -> Callable[[], List[np.ndarray]]:
        lengths = torch.tensor(splits, dtype=torch.int32, device="cpu")
        wait = self._start(
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

    def _start(
        self, start: Callable[[torch.Tensor], int], payload: np.ndarray
    ) -> Callable[[], Any]:
        """Starts what ranks that have called hvd.join() can take no part in. start: returns
        Horovod's handle."""
        return functools.partial(self._wait, keep(start(torch.from_numpy(payload))))

    def error_of_missing(self, count: int, why: str) -> RuntimeError:
        return error_of_joined(count, self.size, self._joined(), why)

    def _joined(self) -> List[int]:
        """The ranks that have called hvd.join(). A collective of those that have not."""
        here = np.zeros(self.size, np.int32)
        here[self.rank] = 1
        # Ranks that have joined add zeros.
        found = self.allreduce("hvdc.here", here)()
        return [rank for rank, there in enumerate(found.tolist()) if not there]

    def _refusal(self) -> RuntimeError:
        """A collective of the ranks that have not called hvd.join()."""
        joined = self._joined()
        return error_of_joined(len(joined), self.size, joined, REDUCES_ONLY)

    def _wait(self, handle: int) -> Any:
        try:
            return synchronize(handle)
        except HorovodInternalError as error:
            if "Join" in str(error):
                raise self._refusal() from error
            raise


class _Held:
    """A collective that is not started yet."""

    def __init__(self, start: Callable[[torch.Tensor], int], payload: np.ndarray) -> None:
        self.start, self.payload = start, payload
        self.handle: Any = None  # Horovod's, from the start on


class _CountedStep(HorovodTransport):
    """Holds a step's gathered messages back until its ranks are counted, by an allreduce to which
    ranks that have joined add zeros.

    Horovod answers an allgather or alltoall of shapes that it has seen from its response cache, and
    a rank that has called hvd.join() dies of that answer. What is held is started when the count is
    there, whatever this rank does or waits for by then, because others may wait for it.
    """

    def __init__(self, transport: HorovodTransport, name: str) -> None:
        super().__init__(transport._process_set)
        self._name = name
        self.count = transport.count  # type: ignore[method-assign]
        self._lock = threading.Lock()  # for all below
        # Horovod's handle, once the count has begun.
        self._count: Optional[int] = None
        # Becomes the mean over ranks.
        self._here = torch.ones(1, dtype=torch.float32, device="cpu")
        # Whether all ranks were there, once the count is over.
        self._counted: Optional[bool] = None
        self._error: Optional[Exception] = None  # why what is held is not started
        self._held: List[_Held] = []

    def expect_gather(self) -> None:
        with self._lock:
            self._begin_count()

    def end_step(self) -> None:
        with self._lock:
            for held in self._held:
                # The next step's is encoded in the same memory.
                held.payload = held.payload.copy()

    def end_count(self, wait: bool) -> bool:
        """Starts what is held, if the count is there and full. wait: whether to wait for it.
        Returns whether it is over."""
        if not self._lock.acquire(blocking=wait):
            return False  # Who has the lock ends it.
        try:
            return self._end_count(wait)
        finally:
            self._lock.release()

    def _start(
        self, start: Callable[[torch.Tensor], int], payload: np.ndarray
    ) -> Callable[[], Any]:
        with self._lock:
            if not self._counted:
                self._end_count(wait=False)
            if self._counted:
                return super()._start(start, payload)
            held = _Held(start, payload)
            self._held.append(held)
            self._begin_count()

        def wait() -> Any:
            if not self._counted:
                self.end_count(wait=True)
            if self._counted:
                return self._wait(held.handle)
            self._error = self._error or self._refusal()
            raise self._error

        return wait

    def _begin_count(self) -> None:
        if self._count is None:
            # A mean, as carriers mostly are: Horovod joins it with those.
            self.count(self._here.nbytes, self._here.nbytes)
            self._count = keep(
                hvd.allreduce_async_(
                    self._here, name=self._name, op=hvd.Average, process_set=self._process_set
                )
            )
            _counts.add(self)

    def _end_count(self, wait: bool) -> bool:
        if self._count is None or self._counted is not None:
            return True
        try:
            if not wait and not hvd.poll(self._count):
                return False
            self._wait(self._count)
            full = self.size * self._here.item() > self.size - 0.5
            for held in self._held if full else ():
                held.handle = keep(held.start(torch.from_numpy(held.payload)))
            self._counted = full
        except Exception as error:
            # Of a Horovod that has been shut down, of whatever type.
            self._counted, self._error = False, error
        self._held.clear()
        return True


class _Counts:
    """The counts that are under way in this process, and a thread that polls them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for the thread
        self._thread: Optional[threading.Thread] = None
        # None ends the thread.
        self._steps: "queue.SimpleQueue[Optional[_CountedStep]]" = queue.SimpleQueue()

    def add(self, step: _CountedStep) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._poll, name="hvdc-counts", daemon=True)
                self._thread.start()
                # A thread that frees a tensor while Python shuts down aborts the process.
                atexit.register(self._stop, self._thread)
        self._steps.put(step)

    def _stop(self, thread: threading.Thread) -> None:
        self._steps.put(None)
        thread.join()

    def _poll(self) -> None:
        steps: List[Any] = [self._steps.get()]
        while None not in steps:
            steps = [step for step in steps if not step.end_count(wait=False)]
            time.sleep(_POLL_INTERVAL)
            # Waits where none is under way.
            while not steps or not self._steps.empty():
                steps.append(self._steps.get())


_counts = _Counts()


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
