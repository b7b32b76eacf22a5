"""N ranks in one process, for tests and `simulate`. One thread may drive the ranks one after the
other."""

from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np

from .base import Transport

# {operation and name: {rank: its array or parts}}.
_Board = Dict[Tuple[str, str], Dict[int, Any]]
_OPS: Dict[str, np.ufunc] = {"sum": np.add, "max": np.maximum}


class Loopback(Transport):
    """One rank of a group made by `group`. Results are available once every rank has started the
    operation."""

    def __init__(self, rank: int, size: int, board: _Board) -> None:
        self.rank, self.size, self._board = rank, size, board

    @classmethod
    def group(cls, size: int) -> List["Loopback"]:
        """`size` connected ranks."""
        board: _Board = {}
        return [cls(rank, size, board) for rank in range(size)]

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        parts = self._post(("gather", name), payload)
        self.count(payload.nbytes, -payload.nbytes)
        return lambda: np.concatenate(self._arrived(self._all(name, parts)))

    def allreduce(self, name: str, array: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        parts = self._post(("reduce", name), array.copy())
        self.count(array.nbytes, array.nbytes)
        return lambda: _OPS[op].reduce(self._all(name, parts), axis=0, out=array)

    def alltoall(
        self, name: str, payload: np.ndarray, splits: Sequence[int]
    ) -> Callable[[], List[np.ndarray]]:
        sent = self._post(("alltoall", name), np.split(payload, np.cumsum(splits))[:-1])
        self.count(sum(splits), -splits[self.rank])
        return lambda: self._arrived([parts[self.rank] for parts in self._all(name, sent)])

    def _arrived(self, parts: List[np.ndarray]) -> List[np.ndarray]:
        self.count(0, sum(part.nbytes for part in parts))
        return parts

    def _post(self, key: Tuple[str, str], array: Any) -> Dict[int, Any]:
        parts = self._board.setdefault(key, {})
        if self.rank in parts:
            raise RuntimeError(f"rank {self.rank} started {key} twice")
        parts[self.rank] = array
        if len(parts) == self.size:
            del self._board[key]
        return parts

    def _all(self, name: str, parts: Dict[int, Any]) -> List[Any]:
        missing = [rank for rank in range(self.size) if rank not in parts]
        if missing:
            raise RuntimeError(f"{name}: ranks {missing} have not started this operation")
        return [parts[rank] for rank in range(self.size)]
