"""Two levels, `hosts=true`: the ranks of a host add up their gradients in memory that they share,
and each compresses its part of the sum.

Of L ranks on each of H hosts, local rank l has the rows R·l/L to R·(l+1)/L of every tensor of R
rows: its state, and the time to encode, are 1/L of a tensor's. Every rank gathers all parts, which
are H payloads' worth of bytes in place of H·L. For an algorithm the hosts are the ranks.
"""

import contextlib
import dataclasses
import math
import mmap
import os
import secrets
from collections.abc import Generator
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from . import kernels
from .compressors.base import Compressor, Decoded, Shard, State, Step, result_of, zeros
from .handover import OWED, late
from .handshake import Gathering, gather
from .requests import Allreduce, Collective, HostReduce

_TOGETHER = Collective("allreduce", "float32", "max")
# What drivers read of a compressor's class.
_AS_INSIDE = ("id", "number", "kept", "clip_norm", "follow_lr", "m", "nesterov")
_ALIGNED = 16  # float32 of a cache line
_FOLDER = "/dev/shm"
# Characters.
_TOKEN = 16
_ADVICE = (
    "Leave out hosts=true, or let the containers of one machine share it (docker run --ipc=host)"
)


class Host:
    """The ranks of this rank's host, and the memory in which each puts its gradients.

    local: which of them this is; size: how many they are, as many on every host; places: the same
    of all ranks, by rank, once `meet` has been called.
    """

    def __init__(self, local: int, size: int) -> None:
        self.local, self.size = local, size
        self.places: Sequence[int] = ()
        self._slots: Dict[str, np.ndarray] = {}
        self._wanted: Dict[str, int] = {}

    @classmethod
    def group(cls, ranks: int, size: int) -> List["Host"]:
        """Those of `ranks` ranks in one process, of which every `size` that follow each other are a
        host. ValueError where that does not come out even."""
        _refuse_uneven(ranks, size)
        memories: List[Dict[str, np.ndarray]] = [{} for _ in range(ranks // size)]
        hosts = [_InProcess(rank % size, size) for rank in range(ranks)]
        places = [rank % size for rank in range(ranks)]
        for rank, host in enumerate(hosts):
            host._slots, host.places = memories[rank // size], places
        return list(hosts)

    @classmethod
    def alone(cls, ranks: int, size: int) -> "Host":
        """The first of `ranks` ranks on hosts of `size`, to measure what one does without the
        others: their gradients are zero, and all parts are taken for its own. ValueError where that
        does not come out even."""
        _refuse_uneven(ranks, size)
        host = _InProcess(0, size)
        host.places = [0] * ranks
        return host

    @property
    def waits(self) -> bool:
        """Whether tensors have no memory yet: `meet` is due."""
        return bool(self._wanted)

    def want(self, name: str, numel: int) -> None:
        """Has a tensor's memory made by the next `meet`."""
        if name not in self._slots:
            self._wanted[name] = numel

    def slots(self, name: str) -> np.ndarray:
        """The memory of a tensor's gradients, float32, one row for each rank of the host."""
        return self._slots[name]

    def meet(self, transport: Gathering, label: str, host: int) -> None:
        """Makes the memory of tensors that have none. All ranks call it alike; host: which host
        this rank says to be on. RuntimeError, on all ranks alike, where the ranks of one host
        cannot share memory."""
        mine = [host, self.local, secrets.token_hex(_TOKEN // 2)]
        said = gather(transport, f"{label}.hosts", mine)
        self.places = [local for _, local, _ in said]
        tokens = {local: token for each, local, token in said if each == host}
        numels = list(self._wanted.values())
        starts = np.cumsum([0, *(-(-numel // _ALIGNED) * _ALIGNED for numel in numels)])
        # Until all have opened it, the file has a name and holds their tokens. It gets its memory
        # when it has no name any more: ranks that are killed leave none of that behind.
        path = os.path.join(_FOLDER, f"horovod_compress-{next(iter(tokens.values()))}")
        with contextlib.ExitStack() as stack:
            try:
                problem, handle = _try(lambda: _opened(path, self.local, tokens[self.local]))
                if handle is not None:
                    stack.callback(os.close, handle)
                problems = gather(transport, f"{label}.opened", problem)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            if not any(problems):
                count = max(int(starts[-1]), _ALIGNED) * self.size
                memory: Any = None
                problem = self._missing(handle, tokens)
                if problem is None:
                    problem, memory = _try(lambda: _mapped(handle, count))
                problems = gather(transport, f"{label}.shared", problem)
        for other, problem in enumerate(problems):
            if problem:
                raise RuntimeError(
                    f"hosts=true: rank {other} cannot share memory with the ranks of its host: "
                    f"{problem}"
                )
        rows = memory.reshape(self.size, -1)
        self._slots.update(
            (name, rows[:, start : start + numel])
            for name, numel, start in zip(self._wanted, numels, starts.tolist())
        )
        self._wanted.clear()

    def _missing(self, handle: int, tokens: Dict[int, str]) -> Optional[str]:
        """Why ranks of this host are not those that have opened this file."""
        places = range(self.size)
        found = {local: os.pread(handle, _TOKEN, local * _TOKEN).decode() for local in places}
        missing = [str(local) for local in found if found[local] != tokens.get(local)]
        return (
            f"what local rank {', '.join(missing)} has put into {_FOLDER} is not there. {_ADVICE}"
            if missing
            else None
        )


class _InProcess(Host):
    """A rank of several in one process."""

    def want(self, name: str, numel: int) -> None:
        if name not in self._slots:
            self._slots[name] = zeros(self.size * numel).reshape(self.size, numel)


def _refuse_uneven(ranks: int, size: int) -> None:
    if size < 1 or ranks % size:
        raise ValueError(f"{ranks} ranks are not hosts of {size}")


def _try(make: Any) -> Tuple[Optional[str], Any]:
    """(None, what was made), or (what went wrong, None)."""
    try:
        return None, make()
    except OSError as error:
        return f"{error}. {_ADVICE}, or make {_FOLDER} larger (docker run --shm-size)", None


def _opened(path: str, local: int, token: str) -> int:
    """Opens a file, which the first rank of a host that comes makes, and puts a token into it."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.pwrite(handle, token.encode(), local * _TOKEN)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _mapped(handle: int, numel: int) -> np.ndarray:
    """A file's memory, as so many float32."""
    # Without its memory being there a rank would be killed where that ends.
    os.posix_fallocate(handle, 0, 4 * numel)
    return np.frombuffer(mmap.mmap(handle, 4 * numel), np.float32)


@dataclasses.dataclass(frozen=True, repr=False)
class HostSharded(Compressor):
    """Another compressor, for one tensor whose gradients are added on each host before. To drivers
    it is that compressor.

    inner: of the part that this rank holds; shape: of the whole tensor, which has at least as many
    rows as a host has ranks.
    """

    takes_scale = True

    inner: Compressor
    host: Host
    shape: Tuple[int, ...]

    def __post_init__(self) -> None:
        for name in _AS_INSIDE:
            object.__setattr__(self, name, getattr(self.inner, name))
        own = self.elements(self.host.local)
        object.__setattr__(self, "shard", Shard(*own, self._numel, self.host.size))

    def __repr__(self) -> str:
        return f"{self.inner!r} on hosts of {self.host.size}"

    def with_options(self, **options: Any) -> "HostSharded":
        return dataclasses.replace(self, inner=self.inner.with_options(**options))

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        return (_TOGETHER, *self.inner.collectives(size))

    def rows(self, local: int) -> Tuple[int, int]:
        """The first row of a local rank's part, and that of the next."""
        rows, size = self.shape[0], self.host.size
        return rows * local // size, rows * (local + 1) // size

    def elements(self, local: int) -> Tuple[int, int]:
        """The first element of a local rank's part, and that of the next."""
        first, last = self.rows(local)
        row = self._numel // self.shape[0]
        return first * row, last * row

    @property
    def _numel(self) -> int:
        return math.prod(self.shape)

    def init(self, name: str, shape: Tuple[int, ...]) -> State:
        first, last = self.rows(self.host.local)
        self.host.want(name, self._numel)
        return self.inner.init(name, (last - first, *shape[1:]))

    def encode(self, grad: np.ndarray, state: State, step: Step) -> Generator[Any, Any, Any]:
        part = yield from self._summed(grad, state, step)
        step = dataclasses.replace(step, scale=1.0)
        return (yield from result_of(self.inner.encode(part, state, step)))

    def encode_dense(
        self, grad: np.ndarray, state: State, step: Step
    ) -> Generator[Allreduce, Any, HostReduce]:  # type: ignore[override]
        part = yield from self._summed(grad, state, step)
        self.inner.encode_dense(part, state, dataclasses.replace(step, scale=1.0))
        return HostReduce(grad)

    def _summed(
        self, grad: np.ndarray, state: State, step: Step
    ) -> Generator[Allreduce, Any, np.ndarray]:
        """This rank's part of the gradient's memory, with the host's sum. The rest of the gradient
        is zero then."""
        slots = self.host.slots(state.name)
        kernels.of(grad).move(grad, slots[self.host.local], scale=step.scale)
        owed = state.arrays.get(OWED)
        if owed is not None:
            slots[self.host.local] += late(self.inner, owed)
        # Answered when all ranks have sent it. Nobody writes here again before all have decoded
        # what this rank makes of it.
        yield Allreduce(np.zeros(1, np.float32), "max")
        # From here on residuals have it, but for sums that these do not take.
        if owed is not None and self.inner.residual(state) is not None:
            owed[np.isfinite(slots.sum(0))] = 0
            if not owed.any():
                del state.arrays[OWED]
        first, last = self.elements(self.host.local)
        part = grad[first:last]
        kernels.of(part).add_up(part, [slot[first:last] for slot in slots])
        return part

    def payload_bits(self, numel: int, step: Step) -> Optional[float]:
        first, last = self.elements(self.host.size - 1)  # the largest part
        bits = self.inner.payload_bits(last - first, step)
        return None if bits is None else bits * (last - first) / numel

    def part(self, out: np.ndarray, rank: int) -> np.ndarray:
        first, last = self.elements(self.host.places[rank])
        return out[first:last]

    def add(self, body: np.ndarray, out: np.ndarray, scale: float) -> Decoded:
        return self.inner.add(body, out, scale)

    def decode_dense(
        self, reduced: np.ndarray, out: np.ndarray, state: State, scale: float
    ) -> Decoded:
        return self.inner.decode_dense(reduced, out, state, scale)

    def residual(self, state: State) -> Optional[np.ndarray]:
        return self.inner.residual(state)

    def end_step(self, state: State, succeeded: bool) -> None:
        self.inner.end_step(state, succeeded)

    def apply_pending(self, state: State) -> None:
        self.inner.apply_pending(state)


def sharded(compressor: Compressor, host: Optional[Host], shape: Tuple[int, ...]) -> Compressor:
    """The compressor of a tensor on a host, by what its option `hosts` says. A tensor with fewer
    rows than a host has ranks stays whole, and so does one that has no rows, or nothing in them."""
    if host is None or host.size == 1 or not getattr(compressor, "hosts", False):
        return compressor
    if not shape or shape[0] < host.size or not math.prod(shape):
        return compressor
    return HostSharded(compressor.for_part(host.size), host, shape)
