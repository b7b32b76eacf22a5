"""The contract of a transport: named, asynchronous collectives on flat arrays."""

from abc import ABC, abstractmethod
from typing import Callable, Dict, List, Sequence

import numpy as np

from ..protocol.wire import FrameLength, exact


class Transport(ABC):
    """Moves flat contiguous arrays between `size` ranks, of which this is `rank`.

    Operations of one name on all ranks are one collective. Ranks may start collectives in different
    orders. Each method returns a function that waits for the result, to be called once.
    """

    rank: int
    size: int
    # Of all collectives: what this rank has handed over, with padding and lengths, and what came
    # back that is not its own. Not what Horovod and MPI add to that.
    bytes_sent = bytes_received = 0
    # Whether `allreduce` takes a DeviceArray as well.
    reduces_on_device = False
    # Whether payloads of a device are gathered there, with `allgather` of a DeviceArray of int32.
    gathers_on_device = False

    def count(self, sent: int, received: int) -> None:
        """Counts bytes of collectives."""
        self.bytes_sent += sent
        self.bytes_received += received

    @abstractmethod
    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        """Starts an allgather of uint8 arrays, whose lengths may differ. The result joins them in
        rank order."""

    @abstractmethod
    def allreduce(self, name: str, array: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        """Starts the sum, or with op="max" the maximum, over ranks of float32, int32 or int64
        arrays of one length. The result may use the memory of `array`."""

    @abstractmethod
    def alltoall(
        self, name: str, payload: np.ndarray, splits: Sequence[int]
    ) -> Callable[[], List[np.ndarray]]:
        """Starts sending each rank a part of a uint8 array: the first splits[0] bytes to rank 0,
        the next splits[1] to rank 1 …; what is beyond goes to nobody. The result is a list of the
        parts received, by rank."""

    def neighbors(
        self, name: str, payload: np.ndarray, ranks: Sequence[int]
    ) -> Callable[[], Dict[int, np.ndarray]]:
        """Starts sending a uint8 array to some ranks, and receiving theirs, of any length. All
        ranks start it. The relation must be symmetric.

        Args:
            name: of the exchange, alike on all ranks.
            payload: what each of the ranks gets; it must stay as it is until the result is there.
            ranks: others than this one, ascending.

        Returns:
            A function that waits for {rank: the array that it has sent}.
        """
        splits = [payload.size if rank in ranks else 0 for rank in range(self.size)]
        wait = self.alltoall(name, np.tile(payload, len(ranks)), splits)

        def received() -> Dict[int, np.ndarray]:
            parts = wait()
            return {rank: parts[rank] for rank in ranks}

        return received

    def in_step(self, name: str) -> "Transport":
        """Returns what starts the collectives of one step, as this does, and is told of the step by
        the two methods below. name: of what it exchanges by itself, alike on all ranks."""
        return self

    def expect_gather(self) -> None:
        """Of what `in_step` has returned: begins what a gather of this step will have to wait
        for."""

    def end_step(self) -> None:
        """Of what `in_step` has returned: the step has ended, or was given up. What was started,
        and is not sent yet, still is, because other ranks may wait for it, but memory of the step
        is used again."""

    def frame_length(self) -> FrameLength:
        """Returns a function from the length that a frame needs to the one that it is padded to
        before it is gathered, or sent to all. Frames of each name need one of their own."""
        return exact

    def error_of_missing(self, count: int, why: str) -> RuntimeError:
        """The error for the remaining ranks where `count` others take no part in a step. A
        collective of those that remain."""
        return RuntimeError(f"{count} of {self.size} ranks take no part in a step: {why}")
