"""Two levels, `hosts=true`: the ranks of a host add up their gradients in memory that they share,
and each compresses its part of the sum.

Of L ranks on each of H hosts, local rank l has the rows R·l/L to R·(l+1)/L of every tensor of R
rows: its state, and the time to encode, are 1/L of a tensor's. Every rank gathers all parts, which
are H payloads' worth of bytes in place of H·L. For an algorithm the hosts are the ranks.
"""

import contextlib
import dataclasses
import functools
import math
import mmap
import os
import secrets
from collections.abc import Generator
from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np

from .. import kernels
from ..compressors.base import Compressor, Step, result_of
from ..compressors.state import LOCAL, State, zeros
from ..compressors.topk import TopK
from ..compressors.wrapper import Shard, Wrapper
from ..protocol.handshake import AnyTransport, gather
from ..protocol.machine import Machine, Placement
from ..protocol.requests import Allreduce, Collective, ToReducer
from .handover import late
from .tensor import DEBT

_TOGETHER = Collective("allreduce", "float32", "max")
_ALIGNED = 16  # float32 of a cache line
_FOLDER = "/dev/shm"
# Characters.
_TOKEN = 16
_ADVICE = (
    "Leave out hosts=true, or let the containers of one machine share it (docker run --ipc=host)"
)


def want(machine: Machine, name: str, numel: int) -> None:
    """Has the memory made in which each rank of a machine puts a tensor's gradients: at once, or
    where ranks are processes by the next `Machine.arrange`."""
    if name in machine.slots:
        return
    if machine.one_process:
        machine.slots[name] = zeros(machine.size * numel).reshape(machine.size, numel)
        return
    if not machine.wanted:
        machine.due.append(functools.partial(_make, machine))
    machine.wanted[name] = numel


def _make(machine: Machine, transport: AnyTransport, label: str, number: int) -> None:
    """Makes the memory of tensors that have none. RuntimeError, on all ranks alike, where the
    ranks of one machine cannot share memory."""
    mine = [number, machine.local, secrets.token_hex(_TOKEN // 2)]
    said = gather(transport, f"{label}.hosts", mine)
    machine.places = [local for _, local, _ in said]
    tokens = {local: token for each, local, token in said if each == number}
    numels = list(machine.wanted.values())
    starts = np.cumsum([0, *(-(-numel // _ALIGNED) * _ALIGNED for numel in numels)])
    # Until all have opened it, the file has a name and holds their tokens. It gets its memory
    # when it has no name any more: ranks that are killed leave none of that behind.
    path = os.path.join(_FOLDER, f"horovod_compress-{next(iter(tokens.values()))}")
    with contextlib.ExitStack() as stack:
        try:
            # The first rank of a host that comes makes it.
            problem, handle = _try(lambda: os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            if handle is not None:
                stack.callback(os.close, handle)
                token, at = tokens[machine.local].encode(), machine.local * _TOKEN
                problem, _ = _try(lambda: os.pwrite(handle, token, at))
            problems = gather(transport, f"{label}.opened", problem)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        if not any(problems):
            count = max(int(starts[-1]), _ALIGNED) * machine.size
            memory: Any = None
            problem = _missing(handle, tokens, machine.size)
            if problem is None:
                problem, memory = _try(lambda: _mapped(handle, count))
            problems = gather(transport, f"{label}.shared", problem)
    for other, problem in enumerate(problems):
        if problem:
            raise RuntimeError(
                f"hosts=true: rank {other} cannot share memory with the ranks of its host: "
                f"{problem}"
            )
    rows = memory.reshape(machine.size, -1)
    machine.slots.update(
        (name, rows[:, start : start + numel])
        for name, numel, start in zip(machine.wanted, numels, starts.tolist())
    )
    machine.wanted.clear()


def _missing(handle: int, tokens: Dict[int, str], size: int) -> Optional[str]:
    """Why the `size` ranks of this machine are not those that have opened this file."""
    found = {local: os.pread(handle, _TOKEN, local * _TOKEN).decode() for local in range(size)}
    missing = [str(local) for local in found if found[local] != tokens.get(local)]
    return (
        f"what local rank {', '.join(missing)} has put into {_FOLDER} is not there. {_ADVICE}"
        if missing
        else None
    )


def _try(make: Any) -> Tuple[Optional[str], Any]:
    """(None, what was made), or (what went wrong, None)."""
    try:
        return None, make()
    except OSError as error:
        return f"{error}. {_ADVICE}, or make {_FOLDER} larger (docker run --shm-size)", None


def _mapped(handle: int, numel: int) -> np.ndarray:
    """A file's memory, as so many float32."""
    # Without its memory being there a rank would be killed where that ends.
    os.posix_fallocate(handle, 0, 4 * numel)
    return np.frombuffer(mmap.mmap(handle, 4 * numel), np.float32)


def _for_part(compressor: Compressor, ranks: int) -> Compressor:
    """The compressor for one of so many parts of a tensor, which together send what it sends of the
    whole: numbers of entries are a part's, but for those of chunks."""
    if not isinstance(compressor, TopK) or compressor.chunk:
        return compressor
    k = compressor.k and -(-compressor.k // ranks)
    return dataclasses.replace(compressor, min_k=-(-compressor.min_k // ranks), k=k)


@dataclasses.dataclass(frozen=True, repr=False)
class HostParts(Wrapper):
    """Another compressor, for one tensor whose gradients are added on each host before.

    inner: of the part that this rank holds; shape: of the whole tensor, which has at least as many
    rows as a machine has ranks.
    """

    machine: Machine
    shape: Tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        # Beside a debt, which is in true units, gradients are to be in those, too.
        roles = {**self.roles, DEBT: LOCAL}
        vars(self).update(traits=self.traits._replace(takes_scale=True), roles=roles)

    def __repr__(self) -> str:
        return f"{self.inner!r} on hosts of {self.machine.size}"

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        return (_TOGETHER, *self.inner.collectives(size))

    @property
    def shard(self) -> Shard:
        return self.shard_of_rank(self.machine.local)

    def shard_of_rank(self, local: int) -> Shard:
        """The part of a local rank: rows."""
        rows, size, row = self.shape[0], self.machine.size, math.prod(self.shape[1:])
        first, last = rows * local // size, rows * (local + 1) // size
        return Shard(first * row, last * row, rows * row, size)

    def init(self, name: str, shape: Tuple[int, ...]) -> State:
        want(self.machine, name, math.prod(shape))
        first, last, *_ = self.shard
        return self.inner.init(name, ((last - first) // math.prod(shape[1:]), *shape[1:]))

    def encode(self, grad: np.ndarray, state: State, step: Step) -> Generator[Any, Any, Any]:
        part = yield from self._summed(grad, state, step)
        step = dataclasses.replace(step, scale=1.0)
        return (yield from result_of(self.inner.encode(part, state, step)))

    def encode_dense(
        self, grad: np.ndarray, state: State, step: Step
    ) -> Generator[Allreduce, Any, ToReducer]:
        part = yield from self._summed(grad, state, step)
        self.inner.encode_dense(part, state, dataclasses.replace(step, scale=1.0))
        return ToReducer(grad)

    def _summed(
        self, grad: np.ndarray, state: State, step: Step
    ) -> Generator[Allreduce, Any, np.ndarray]:
        """This rank's part of the gradient's memory, with the host's sum. The rest of the gradient
        is zero then."""
        slots = self.machine.slots[state.name]
        kernels.of(grad).move(grad, slots[self.machine.local], scale=step.scale)
        debt = state.arrays.get(DEBT)
        if debt is not None:
            slots[self.machine.local] += late(self.inner, debt)
        # Answered when all ranks have sent it. Nobody writes here again before all have decoded
        # what this rank makes of it.
        yield Allreduce(np.zeros(1, np.float32), "max")
        # From here on residuals have it, but for sums that these do not take.
        if debt is not None and self.inner.residual(state) is not None:
            debt[np.isfinite(slots.sum(0))] = 0
            if not debt.any():
                del state.arrays[DEBT]
        first, last, *_ = self.shard
        part = grad[first:last]
        kernels.of(part).add_up(part, [slot[first:last] for slot in slots])
        return part

    def payload_bits(self, numel: int, step: Step) -> Optional[float]:
        # The largest.
        first, last, *_ = self.shard_of_rank(self.machine.size - 1)
        bits = self.inner.payload_bits(last - first, step)
        return None if bits is None else bits * (last - first) / numel

    def part(self, out: np.ndarray, rank: int) -> np.ndarray:
        first, last, *_ = self.shard_of_rank(self.machine.places[rank])
        return out[first:last]


def around(
    compressor: Compressor, shape: Tuple[int, ...], machine: Optional[Machine]
) -> Compressor:
    """The compressor of a tensor of this shape, in a wrapper where its options say so. A tensor
    with fewer rows than a machine has ranks stays whole, and so does one that has no rows, or
    nothing in them."""
    if machine is None or machine.size == 1 or not compressor.policy.hosts:
        return compressor
    if not shape or shape[0] < machine.size or not math.prod(shape):
        return compressor
    return HostParts(_for_part(compressor, machine.size), machine, shape)


def needs_machine(compressor: Compressor, placement: Placement, tell: Callable[[str], Any]) -> bool:
    """Whether `around` has use for the ranks of a machine. ValueError where it cannot have them,
    among such ranks.

    Args:
        compressor: that of a binding.
        placement: where the ranks are.
        tell: warns of an option that has no effect.
    """
    if not compressor.policy.hosts:
        return False
    if placement.refused is not None:
        raise ValueError(f"hosts=true {placement.refused}")
    if not placement.even and placement.rank == 0:
        tell(
            "hosts=true has no effect, because hosts have different numbers of ranks: start as "
            "many on each"
        )
    return placement.even
