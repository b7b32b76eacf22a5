"""A step whose gathered messages wait until its ranks are counted, because ranks that have called
hvd.join() can take no part in them."""

import atexit
import queue
import threading
import time
from typing import Any, Callable, List, Optional, Sequence

import horovod.torch as hvd
import numpy as np
import torch

# Seconds between polls of the counts that are under way. Each takes Python's lock from a rank that
# trains.
_POLL_INTERVAL = 20e-3


class _Held:
    """A collective that is not started yet."""

    def __init__(self, start: Callable[[torch.Tensor], int], payload: np.ndarray) -> None:
        self.start, self.payload = start, payload
        self.wait: Any = None  # for its result, from the start on


class CountedStep:
    """Starts a step's collectives as a HorovodTransport does, but holds gathered messages back
    until the step's ranks are counted, by an allreduce to which ranks that have joined add zeros.

    Horovod answers an allgather or alltoall of shapes that it has seen from its response cache, and
    a rank that has called hvd.join() dies of that answer. What is held is started when the count is
    there, whatever this rank does or waits for by then, because others may wait for it.
    """

    def __init__(self, transport: Any, name: str) -> None:
        self._transport, self._name = transport, name
        self.allreduce = transport.allreduce
        # For all below. Reentrant, because messages end the count that they come after.
        self._lock = threading.RLock()
        # Horovod's handle, once the count has begun.
        self._count: Optional[int] = None
        # Becomes the mean over ranks.
        self._here = torch.ones(1, dtype=torch.float32, device="cpu")
        # Whether all ranks were there, once the count is over.
        self._counted: Optional[bool] = None
        self._error: Optional[Exception] = None  # why what is held is not started
        self._held: List[_Held] = []

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        return self._transport.allgather(name, payload, self._begin)

    def alltoall(
        self, name: str, payload: np.ndarray, splits: Sequence[int]
    ) -> Callable[[], List[np.ndarray]]:
        return self._transport.alltoall(name, payload, splits, self._begin)

    def expect_gather(self) -> None:
        with self._lock:
            if self._count is None:
                self._count = self._transport.begin_count(self._here, self._name)
                _counts.add(self)

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
            if self._count is not None and self._counted is None:
                if not wait and not hvd.poll(self._count):
                    return False
                self._transport.wait_for(self._count)
                full = self._transport.size * self._here.item() > self._transport.size - 0.5
                for held in self._held if full else ():
                    held.wait = self._transport.begin(held.start, held.payload)
                self._counted = full
                self._held.clear()
        except Exception as error:
            # Of a Horovod that has been shut down, of whatever type.
            self._counted, self._error = False, error
        finally:
            self._lock.release()
        return True

    def _begin(
        self, start: Callable[[torch.Tensor], int], payload: np.ndarray
    ) -> Callable[[], Any]:
        """In place of `HorovodTransport.begin`."""
        with self._lock:
            self.end_count(wait=False)
            if self._counted:
                return self._transport.begin(start, payload)
            held = _Held(start, payload)
            self._held.append(held)
            self.expect_gather()

        def wait() -> Any:
            self.end_count(wait=True)
            if self._counted:
                return held.wait()
            self._error = self._error or self._transport.refusal()
            raise self._error

        return wait


class _Counts:
    """The counts that are under way in this process, and a thread that polls them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for the thread
        self._thread: Optional[threading.Thread] = None
        # None ends the thread.
        self._steps: "queue.SimpleQueue[Optional[CountedStep]]" = queue.SimpleQueue()

    def add(self, step: CountedStep) -> None:
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
