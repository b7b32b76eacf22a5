"""The collectives of torch.distributed, on Gloo for what is in the CPU's memory, whatever the
model's backend is."""

import atexit
import collections
import functools
import struct
import time
import zlib
from abc import ABC, abstractmethod
from typing import Any, Callable, Collection, Deque, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist

from ..protocol.handshake import MismatchError
from ..protocol.wire import WireError
from ..torch_common.parameters import tensor_of
from ..transport.base import Transport

# Of a row: a mark of what is gathered, a checksum of all lengths, and the row's own length, twice.
_HEAD = struct.Struct("<2I2Q")
# Rows of one gather, of which it is known how long they were.
_WINDOW = 8
# Bytes that take as long on a link of 100 Mbit/s as a message of its own takes the processor.
_SMALL = 1 << 12
# Bytes from which a tensor is reduced in its own memory; smaller ones are joined.
_ALONE = 1 << 16


def _gather_parts(rows: torch.Tensor, row: torch.Tensor, **options: Any) -> Any:
    return dist.all_gather(list(rows.view(-1, row.numel()).unbind()), row, **options)


# PyTorch 2.13 has another name for it; the Gloo of PyTorch 2.1 has none.
_gather_rows: Any = getattr(dist, "all_gather_single", None) or (
    _gather_parts if torch.__version__.startswith("2.1.") else dist.all_gather_into_tensor
)

# Gloo's threads take Python's lock to free the last tensors. One that waits for it while Python
# shuts down aborts the process.
atexit.register(time.sleep, 0.05)


class _Message(ABC):
    """Collectives that travel together."""

    def __init__(self, transport: "DistributedTransport") -> None:
        self._transport = transport
        self._work: Any = None  # what to wait for, once it is sent
        self._ended = False
        self._error: Optional[Exception] = None  # with which it has ended

    def end(self) -> None:
        """Waits until its results are there."""
        if self._work is None:
            self._transport.send()
        if not self._ended:
            self._ended = True
            try:
                self._work.wait()
                self._take()
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error

    @abstractmethod
    def send(self) -> None:
        """Starts it."""

    @abstractmethod
    def _take(self) -> None:
        """Takes what has come."""


def _cut_of(lengths: Collection[int]) -> int:
    """Where rows of these lengths would have cost least, if a second gather takes as long as
    `_SMALL` bytes. A 32nd more where they differ."""

    def cost(cut: int) -> int:
        return sum(cut if length <= cut else length + _SMALL for length in lengths)

    cut = min(lengths, key=cost)
    return cut + cut // 32 if min(lengths) < max(lengths) else cut


class _Gather(_Message):
    """A row of bytes from each rank: a head, with the lengths of its frames, and the frames.

    Rows are cut where most of late have ended, because all must be equally long. Every rank sees
    all lengths in them, so all know alike whether a second gather brings the rest.
    """

    def __init__(self, transport: "DistributedTransport") -> None:
        super().__init__(transport)
        self.names: List[str] = []
        self.frames: List[np.ndarray] = []

    def send(self) -> None:
        mark = self._mark = zlib.crc32("\n".join(self.names).encode())
        lengths = np.array([frame.nbytes for frame in self.frames], np.int64)
        # Where frames begin.
        self._begin = _HEAD.size + lengths.nbytes
        total = self._begin + int(lengths.sum())
        checked = struct.pack("<2Q", total, total ^ mark) + lengths.tobytes()
        head = struct.pack("<2I", mark, zlib.crc32(checked, mark)) + checked
        self._row = np.concatenate([np.frombuffer(head, np.uint8), *self.frames])
        self._late = self._transport.late[tuple(self.names)]
        self._cut = _cut_of(self._late or [self._begin])
        self._rows, self._work = self._gathered(self._row[: self._cut], self._cut)

    def _gathered(self, part: np.ndarray, length: int) -> Tuple[torch.Tensor, Any]:
        """The matrix of all ranks' parts, which comes with the work."""
        row = torch.zeros(length, dtype=torch.uint8, device="cpu")
        row[: part.size] = torch.from_numpy(part)
        size, group = self._transport.size, self._transport.group
        rows = torch.empty(size * length, dtype=torch.uint8, device="cpu")
        self._transport.count(length, rows.nbytes - length)
        work = _gather_rows(rows, row, group=group, async_op=True)
        return rows.view(size, length), work

    def _take(self) -> None:
        rows, damaged, longest = self._rows.numpy(), [], self._begin
        for rank, head in enumerate(rows[:, : self._begin]):
            mark, checksum, total, again = _HEAD.unpack_from(head)
            if checksum != zlib.crc32(head[8:], mark):
                damaged.append(rank)
                # Others may have seen it undamaged, and wait for the rest of it.
                added = self._begin + int(head[_HEAD.size :].view(np.int64).sum())
                told = [total, again ^ self._mark, added]
                total = max(told, key=told.count) if len(set(told)) < 3 else 0
            elif mark != self._mark:
                raise MismatchError(
                    f"rank {self._transport.rank} gathers {self.names[0]}, and another rank "
                    "something else: state_dict(portable=True), switch() and handshake() are calls "
                    "of all ranks, after the same step"
                )
            longest = max(longest, total)
        if longest > self._cut:
            rest, work = self._gathered(self._row[self._cut :], longest - self._cut)
            work.wait()
            rows = np.concatenate([rows, rest.numpy()], axis=1)
        self._late.append(longest)
        if damaged:
            raise WireError(
                f"payload of rank {damaged[0]}: the checksum of its lengths does not fit: it was "
                "changed on the way"
            )
        lengths = np.ascontiguousarray(rows[:, _HEAD.size : self._begin]).view(np.int64)
        self._results, self._ends = rows, self._begin + np.cumsum(lengths, axis=1)
        self._begins = self._ends - lengths

    def result(self, number: int) -> np.ndarray:
        """All ranks' frames of one collective, joined in rank order."""
        self.end()
        parts = zip(self._results, self._begins[:, number].tolist(), self._ends[:, number].tolist())
        return np.concatenate([row[first:last] for row, first, last in parts])


class _Reduction(_Message):
    """Tensors of one type on one device that are added up together, each in its own memory."""

    def __init__(self, transport: "DistributedTransport", op: str) -> None:
        super().__init__(transport)
        self._op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        self.tensors: List[torch.Tensor] = []

    def send(self) -> None:
        alone = len(self.tensors) == 1
        self._joined = (
            self.tensors[0] if alone else torch.cat([tensor.view(-1) for tensor in self.tensors])
        )
        self._transport.count(self._joined.nbytes, self._joined.nbytes)
        self._work = dist.all_reduce(
            self._joined, self._op, group=self._transport.group, async_op=True
        )

    def _take(self) -> None:
        if len(self.tensors) > 1:
            parts = self._joined.split([tensor.numel() for tensor in self.tensors])
            for tensor, part in zip(self.tensors, parts):
                tensor.view(-1).copy_(part)


class DistributedTransport(Transport):
    """The ranks of a process group that is for this alone.

    What was started is held back until `send`, or until somebody waits for it: then all gathers
    travel as one message, and small tensors that are added up as one for each type. All ranks start
    the same collectives in the same order, and send and wait at the same places.
    """

    reduces_on_device = True

    def __init__(self, group: Optional[dist.ProcessGroup]) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.gathers_on_device = "nccl" in dist.get_backend_config(group)
        # Messages, by what they join.
        self._held: Dict[Any, Any] = {}
        # By the names of its collectives: how long the longest rows of a gather were of late.
        self.late: Dict[Tuple[str, ...], Deque[int]] = collections.defaultdict(
            functools.partial(collections.deque, maxlen=_WINDOW)
        )

    def send(self) -> None:
        """Starts what is held back."""
        held, self._held = list(self._held.values()), {}
        for message in held:
            message.send()

    def allgather(self, name: str, payload: Any) -> Callable[[], Any]:
        if not isinstance(payload, np.ndarray):
            return self._gather_there(payload)
        message = self._held.setdefault("gather", _Gather(self))
        number = len(message.frames)
        message.names.append(name)
        message.frames.append(payload)
        return lambda: message.result(number)

    def _gather_there(self, payload: Any) -> Callable[[], Any]:
        """Starts a gather of a DeviceArray, at once."""
        rows = payload.tensor.new_empty(self.size * payload.size)
        self.count(payload.nbytes, rows.nbytes - payload.nbytes)
        work = _gather_rows(rows, payload.tensor, group=self.group, async_op=True)

        def wait() -> Any:
            work.wait()
            if rows.is_cuda:
                # On which it is read.
                rows.record_stream(torch.cuda.current_stream(rows.device))
            return type(payload)(rows)

        return wait

    def allreduce(self, name: str, array: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        wait = self.reduce(tensor_of(array), op)

        def wait_for_array() -> np.ndarray:
            wait()
            return array

        return wait_for_array

    def reduce(self, tensor: torch.Tensor, op: str = "sum") -> Callable[[], None]:
        """Starts the sum or maximum over ranks of contiguous tensors in their own memory, on any
        device. Returns a function that waits for it."""
        alone = tensor.numel() * tensor.element_size() >= _ALONE
        key = len(self._held) if alone else (op, tensor.dtype, tensor.device)
        message = self._held.setdefault(key, _Reduction(self, op))
        message.tensors.append(tensor)
        return message.end

    def alltoall(
        self, name: str, payload: np.ndarray, splits: Sequence[int]
    ) -> Callable[[], List[np.ndarray]]:
        sent = np.ascontiguousarray(payload[: sum(splits)])
        lengths = self.allgather(f"{name}.splits", np.array(splits, np.int64).view(np.uint8))

        def wait() -> List[np.ndarray]:
            table = lengths().view(np.int64).reshape(self.size, self.size)
            received = table[:, self.rank].tolist()
            parts = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
            self.count(sent.nbytes, parts.nbytes - received[self.rank])
            dist.all_to_all_single(
                parts, torch.from_numpy(sent), received, list(splits), group=self.group
            )
            return [part.numpy() for part in parts.split(received)]

        return wait
