"""MPI's collectives, through mpi4py. All collectives that a step has started run together, in one
exchange."""

import time
import warnings
import zlib
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

from ..protocol.handshake import STALLED, MismatchError
from ..session.process_sets import ProcessSetRanks
from ..transport.base import Transport

_Key = Tuple[str, str]  # operation, name
# Bytes from which an array is reduced in place; smaller ones are joined.
_ALONE = 2**20
_MOST = 2**31 - 1  # bytes of one MPI operation
_SHUT_DOWN = (
    "Horovod has been shut down, and MPI with it: another rank has ended, or has failed. Look for "
    "the first traceback"
)


# A process set's ranks are asked for, because they may change.
class MPITransport(ProcessSetRanks, Transport):  # type: ignore[override]
    """The ranks of a Horovod process set, on a communicator of their own, beside Horovod's use of
    MPI.

    Nothing is sent before the first call that waits for a result. Then all collectives that were
    started run, in an order that follows from their names: an announcement of sizes, of fixed
    length, one Allgatherv of all payloads, and one Allreduce for each operation and type. All ranks
    must have started the same operations by then.

    hvd is the framework's Horovod, initialized. process_set is the one that
    hvd.DistributedOptimizer has too. The ranks of the set make the communicator together in their
    first exchange. Raises ValueError where mpi4py is missing, or Horovod does not run on MPI with
    threads.
    """

    def __init__(self, hvd: Any, process_set: Any) -> None:
        if not hvd.mpi_enabled():
            raise ValueError(
                "transport=mpi needs a Horovod that runs on MPI: start with mpirun or horovodrun "
                "--mpi, or say transport=horovod"
            )
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ValueError(
                "transport=mpi needs mpi4py: pip install horovod-compress[mpi]"
            ) from error
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            raise ValueError(
                "transport=mpi needs MPI with MPI_THREAD_MULTIPLE, because Horovod uses it at the "
                "same time"
            )
        if (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) != (hvd.rank(), hvd.size()):
            raise ValueError(
                "transport=mpi needs hvd.init() without a communicator: Horovod's ranks must be "
                "those of MPI_COMM_WORLD"
            )
        super().__init__(process_set)
        self._mpi = MPI
        self._comm: Any = None
        self._started: Dict[_Key, np.ndarray] = {}  # until they are sent
        # Of alltoalls that were started, bytes for each rank.
        self._splits: Dict[str, np.ndarray] = {}
        self._arrived: Dict[_Key, Any] = {}
        self._announcing: Any = None  # what MPI may still write to
        self._broken = False

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        return self._start(("gather", name), payload)

    def allreduce(self, name: str, array: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        return self._start((op, name), array)

    def alltoall(
        self, name: str, payload: np.ndarray, splits: Sequence[int]
    ) -> Callable[[], List[np.ndarray]]:
        self._splits[name] = np.array(splits, np.int64)
        return self._start(("alltoall", name), payload)

    def neighbors(
        self, name: str, payload: np.ndarray, ranks: Sequence[int]
    ) -> Callable[[], Dict[int, np.ndarray]]:
        """By messages between these ranks, which wait for no other rank but in their first
        exchange."""
        if payload.nbytes > _MOST:
            raise ValueError(
                f"{payload.nbytes} bytes are too many for a message of MPI: say transport=horovod"
            )
        comm, status = self._communicator(), self._mpi.Status()
        tag = zlib.crc32(name.encode()) & 0x7FFF
        sending = [comm.Isend(payload, rank, tag) for rank in ranks]
        self.count(payload.nbytes * len(ranks), 0)

        def received() -> Dict[int, np.ndarray]:
            arrays = {}
            for rank in ranks:
                found = _until(
                    lambda: comm.Improbe(rank, tag, status),
                    f"rank {self.rank} has waited for {STALLED:.0f} s for rank {rank} to come to "
                    f"{name}",
                )
                arrays[rank] = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
                found.Recv(arrays[rank])
                self.count(0, arrays[rank].nbytes)
            self._mpi.Request.Waitall(sending)
            return arrays

        return received

    def _communicator(self) -> Any:
        """That of the set's ranks, which they make together the first time."""
        if self._comm is None:
            self._comm = self._mpi.COMM_WORLD.Create_group(
                self._mpi.COMM_WORLD.group.Incl(self._process_set.ranks)
            )
        return self._comm

    def _start(self, key: _Key, array: np.ndarray) -> Callable[[], Any]:
        self._arrived.pop(key, None)  # of a step that was abandoned
        self._started[key] = array

        def wait() -> Any:
            if key in self._started:
                self._exchange()
            if key not in self._arrived:
                raise RuntimeError(f"{key[1]}: the exchange that it belonged to has failed")
            return self._arrived.pop(key)

        return wait

    def _exchange(self) -> None:
        if self._broken:
            raise RuntimeError(
                "an exchange over MPI was interrupted: this rank is no longer in step with the "
                "others, start again"
            )
        self._communicator()
        started, self._started = sorted(self._started.items()), {}
        try:
            self._run(started)
        except BaseException as error:
            self._arrived.clear()
            # All ranks raise those alike.
            self._broken = not isinstance(error, (MismatchError, ValueError))
            raise

    def _run(self, started: List[Tuple[_Key, np.ndarray]]) -> None:
        gathered = {name: array for (op, name), array in started if op == "gather"}
        lengths = np.array([array.nbytes for array in gathered.values()], np.int64)
        sent = np.concatenate([lengths.view(np.uint8), *gathered.values()])
        totals = self._announce(started, sent.size)
        if totals.sum() > _MOST:
            raise ValueError(
                f"{totals.sum()} bytes gathered in one step are too many for MPI: say "
                f"transport=horovod"
            )
        if gathered:
            received = np.empty(totals.sum(), np.uint8)
            self.count(sent.nbytes, received.nbytes - sent.nbytes)
            self._comm.Allgatherv(sent, [received, totals])
            self._hand_out(list(gathered), received, totals)
        for (op, name), array in started:
            if op == "alltoall":
                self._arrived[op, name] = self._exchange_parts(array, self._splits.pop(name))
        reduced = [(key, array) for key, array in started if key[0] in ("sum", "max")]
        for op, dtype in sorted({(op, array.dtype.str) for (op, _), array in reduced}):
            self._reduce(
                op,
                {key: array for key, array in reduced if (key[0], array.dtype.str) == (op, dtype)},
            )

    def _announce(self, started: List[Tuple[_Key, np.ndarray]], size: int) -> np.ndarray:
        """The bytes that each rank contributes to the Allgatherv. Raises MismatchError, on all
        ranks, where operations differ."""
        operations = [
            (*key, array.nbytes if key[0] in ("sum", "max") else 0) for key, array in started
        ]
        own = np.array([size, len(started), zlib.crc32(repr(operations).encode())], np.int64)
        all_ranks = np.empty((self.size, own.size), np.int64)
        self.count(own.nbytes, all_ranks.nbytes - own.nbytes)
        request = self._comm.Iallgather(own, all_ranks)
        self._announcing = request, own, all_ranks
        _until(
            request.Test,
            f"rank {self.rank} has waited for {STALLED:.0f} s for the others to come to "
            f"{started[0][0][1]} and what goes with it. With transport=mpi all ranks must take the "
            "same number of steps: hvd.join() is not supported",
        )
        for rank, announced in enumerate(all_ranks):
            if (announced[1:] != all_ranks[0][1:]).any():
                raise MismatchError(
                    f"rank {rank} exchanges {announced[1]} arrays in this step and rank 0 "
                    f"{all_ranks[0][1]}, or others: all ranks must "
                    "have the same gradients in every step"
                )
        return all_ranks[:, 0].copy()

    def _exchange_parts(self, payload: np.ndarray, splits: np.ndarray) -> List[np.ndarray]:
        """The parts that an alltoall received, by rank."""
        lengths = np.empty(self.size, np.int64)
        self._comm.Alltoall(splits, lengths)
        received = np.empty(lengths.sum(), np.uint8)
        others = np.delete(lengths, self.rank)
        self.count(splits.nbytes + int(splits.sum()), others.nbytes + int(others.sum()))
        self._comm.Alltoallv([payload, splits], [received, lengths])
        return np.split(received, np.cumsum(lengths)[:-1])

    def _hand_out(self, names: List[str], received: np.ndarray, totals: np.ndarray) -> None:
        """Joins each operation's parts in rank order."""
        parts: Dict[str, List[np.ndarray]] = {name: [] for name in names}
        for rank_part in np.split(received, np.cumsum(totals)[:-1]):
            lengths, frames = np.split(rank_part, [8 * len(names)])
            ends = np.cumsum(lengths.view(np.int64))
            for name, frame in zip(names, np.split(frames, ends[:-1])):
                parts[name].append(frame)
        for name, arrays in parts.items():
            self._arrived["gather", name] = np.concatenate(arrays)

    def _reduce(self, op: str, arrays: Dict[_Key, np.ndarray]) -> None:
        operation = {"sum": self._mpi.SUM, "max": self._mpi.MAX}[op]
        nbytes = sum(array.nbytes for array in arrays.values())
        self.count(nbytes, nbytes)
        together = {key: array for key, array in arrays.items() if array.nbytes < _ALONE}
        for key, array in arrays.items():
            if key not in together:
                self._comm.Allreduce(self._mpi.IN_PLACE, array, operation)
        if together:
            joined = np.concatenate(list(together.values()))
            self._comm.Allreduce(self._mpi.IN_PLACE, joined, operation)
            for array, result in zip(
                together.values(),
                np.split(joined, np.cumsum([a.size for a in together.values()])[:-1]),
            ):
                array[...] = result
        self._arrived.update(arrays)


def _until(test: Callable[[], Any], said: str) -> Any:
    """Calls `test` until what it returns is true, and returns that; sleeps in between, and warns
    after a minute of what is said. HorovodInternalError where Horovod has ended MPI."""
    from horovod.common.exceptions import HorovodInternalError
    from mpi4py import MPI

    since, warned = time.monotonic(), False
    while True:
        # Horovod ends MPI in a thread of its own when another rank has ended.
        if MPI.Is_finalized():
            raise HorovodInternalError(_SHUT_DOWN)
        result = test()
        if result:
            return result
        waited = time.monotonic() - since
        if waited > 1e-3:
            time.sleep(2e-5)
        if waited > STALLED and not warned:
            warned = True
            warnings.warn(f"horovod_compress: {said}", RuntimeWarning, stacklevel=3)
