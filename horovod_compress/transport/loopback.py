"""N ranks in one process: what tests and `simulate` use. The ranks may be driven one after the other in one thread."""
import numpy as np

from .base import Transport


class Loopback(Transport):
    """One rank of a group made by `group`. A result can be waited for once every rank has started the operation."""

    def __init__(self, rank, size, board):
        self.rank, self.size, self._board = rank, size, board

    @classmethod
    def group(cls, size):
        """`size` connected ranks."""
        board = {}
        return [cls(rank, size, board) for rank in range(size)]

    def allgather(self, name, payload):
        parts = self._post(("gather", name), payload)
        return lambda: np.concatenate(self._all(name, parts))

    def allreduce(self, name, array, op="sum"):
        parts = self._post(("reduce", name), array.copy())
        reduce = {"sum": np.add, "max": np.maximum}[op].reduce

        def wait():
            return reduce(self._all(name, parts), axis=0, out=array)

        return wait

    def alltoall(self, name, payload, splits):
        sent = self._post(("alltoall", name), np.split(payload, np.cumsum(splits)[:-1]))
        return lambda: [parts[self.rank] for parts in self._all(name, sent)]

    def _post(self, key, array):
        parts = self._board.setdefault(key, {})
        if self.rank in parts:
            raise RuntimeError(f"rank {self.rank} started {key} twice")
        parts[self.rank] = array
        if len(parts) == self.size:
            del self._board[key]
        return parts

    def _all(self, name, parts):
        missing = [rank for rank in range(self.size) if rank not in parts]
        if missing:
            raise RuntimeError(f"{name}: ranks {missing} have not started this operation")
        return [parts[rank] for rank in range(self.size)]
