"""Horovod's own collectives, through horovod.torch. They work with MPI and Gloo, and Horovod fuses them with its other ones."""
import contextlib
import functools
from typing import Any, Callable, List, Optional, Sequence

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from ..handshake import error_of_joined
from ..wire import FrameLength, Steady
from .base import ProcessSetRanks, Transport

_OPS = {"sum": hvd.Sum, "max": hvd.Max}


class HorovodTransport(ProcessSetRanks, Transport):
    """Sends each message when it is started; Horovod negotiates the order, but of those whose shapes it has seen."""

    def in_step(self, name: str) -> Transport:
        return _CountedStep(self._process_set, name)

    def frame_length(self) -> FrameLength:
        return Steady()

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        wait = self._start(functools.partial(hvd.allgather_async, torch.from_numpy(payload), name=name, process_set=self._process_set))
        return lambda: wait().numpy()

    def allreduce(self, name: str, array: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        tensor = torch.from_numpy(array)
        handle = hvd.allreduce_async_(tensor, name=name, op=_OPS[op], process_set=self._process_set)
        return lambda: self._wait(handle).numpy()

    def alltoall(self, name: str, payload: np.ndarray, splits: Sequence[int]) -> Callable[[], List[np.ndarray]]:
        lengths = torch.tensor(splits, dtype=torch.int32)
        wait = self._start(functools.partial(hvd.alltoall_async, torch.from_numpy(payload), lengths, name=name, process_set=self._process_set))

        def wait_for_parts() -> List[np.ndarray]:
            received, lengths = wait()
            return [part.numpy() for part in received.split(lengths.tolist())]

        return wait_for_parts

    def _start(self, start: Callable[[], int]) -> Callable[[], Any]:
        """Starts what ranks that have called hvd.join() can take no part in. start: returns Horovod's handle."""
        handle = start()
        return lambda: self._wait(handle)

    def joined(self) -> List[int]:
        here = torch.zeros(self.size, dtype=torch.int32)
        here[self.rank] = 1
        found = hvd.allreduce(here, name="hvdc.here", op=hvd.Sum, process_set=self._process_set)  # ranks that have joined add zeros
        return [rank for rank, there in enumerate(found.tolist()) if not there]

    def _refusal(self) -> RuntimeError:
        """A collective of the ranks that have not called hvd.join()."""
        joined = self.joined()
        return error_of_joined(
            len(joined), self.size, joined, "hvd.join() works with Horovod's own reductions only, and this compression exchanges more"
        )

    def _wait(self, handle: int) -> Any:
        try:
            return hvd.synchronize(handle)
        except HorovodInternalError as error:
            if "Join" in str(error):
                raise self._refusal() from error
            raise


class _Held:
    """A collective that is not started yet."""

    def __init__(self, start: Callable[[], int]) -> None:
        self.start = start
        self.handle: Optional[int] = None  # Horovod's, from the start on


class _CountedStep(HorovodTransport):
    """Holds a step's gathered messages back until its ranks are counted, by an allreduce to which ranks that have joined add zeros.

    Horovod answers an allgather or alltoall of shapes that it has seen from its response cache, and a rank that has called hvd.join() dies of that
    answer. Where gathers are negotiated, as they are in a graph, the other ranks get an error.
    """

    def __init__(self, process_set: Any, name: str) -> None:
        super().__init__(process_set)
        self._name = name
        self._count: Optional[int] = None  # Horovod's handle, until the count is known
        self._counted = False
        self._held: List[_Held] = []

    def expect_gather(self) -> None:
        if self._count is None and not self._counted:  # A mean, as carriers mostly are: Horovod joins it with those.
            self._count = hvd.allreduce_async_(torch.ones(1), name=self._name, op=hvd.Average, process_set=self._process_set)

    def end_step(self) -> None:
        with contextlib.suppress(HorovodInternalError):  # where there are no other ranks any more
            self._start_held()

    def _start(self, start: Callable[[], int]) -> Callable[[], Any]:
        if self._counted:
            return super()._start(start)
        held = _Held(start)
        self._held.append(held)
        if self._count is not None and hvd.poll(self._count):
            self._finish_count()
        self.expect_gather()

        def wait() -> Any:
            self._finish_count()
            if held.handle is None:
                raise RuntimeError("the exchange that this belonged to has failed")
            return self._wait(held.handle)

        return wait

    def _finish_count(self) -> None:
        """Waits for the count, and starts what is held. RuntimeError where ranks are gone."""
        if self._count is None:
            return
        count, self._count = self._count, None
        if self.size * self._wait(count).item() < self.size - 0.5:
            self._held.clear()
            raise self._refusal()
        self._counted = True
        self._start_held()

    def _start_held(self) -> None:
        held, self._held = self._held, []
        for each in held:
            each.handle = each.start()
