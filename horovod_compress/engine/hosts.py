"""Two levels, `hosts=true`: the ranks of a host add up their gradients in memory that they share,
and each compresses its part of the sum.

Of L ranks on each of H hosts, local rank l has the rows R·l/L to R·(l+1)/L of every tensor of R
rows: its state, and the time to encode, are 1/L of a tensor's. Every rank gathers all parts, which
are H payloads' worth of bytes in place of H·L. For an algorithm the hosts are the ranks.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import mmap
import os
import secrets
from collections.abc import Generator
from typing import Any, Callable, Dict, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .. import kernels
from ..compressors.base import Compressor, Step
from ..compressors.state import LOCAL, State, zeros
from ..compressors.topk import TopK
from ..compressors.wrapper import Wrapper
from ..protocol.handshake import AnyTransport, Words, gather, shown
from ..protocol.machine import Machine, Placement
from ..protocol.requests import Allreduce, Collective, ToReducer
from . import checkpoint
from .debt import DEBT, late
from .tensor import Tensor

_TOGETHER = Collective("allreduce", "float32", "max")
_ALIGNED = 16  # float32 of a cache line
_FOLDER = "/dev/shm"
# Characters.
_TOKEN = 16
_ADVICE = (
    "Leave out hosts=true, or let the containers of one machine share it (docker run --ipc=host)"
)


class SharedMemory:
    """The memory in which each rank of a machine puts its gradients."""

    def __init__(self) -> None:
        # A tensor's gradients, float32, one row for each rank of the machine.
        self.slots: Dict[str, np.ndarray] = {}
        self._wanted: Dict[str, int] = {}

    @classmethod
    def of(cls, machine: Machine) -> "SharedMemory":
        """That of a machine, the same for all tensors."""
        return machine.held.setdefault("memory", cls())

    def want(self, machine: Machine, name: str, numel: int) -> None:
        """Has a tensor's memory made, by the next `Machine.arrange` where ranks are processes."""
        if machine.together is not None:
            if name not in machine.together:
                slots = zeros(machine.size * numel).reshape(machine.size, numel)
                machine.together[name] = slots
            self.slots[name] = machine.together[name]
        elif name not in self.slots:
            if not self._wanted:
                machine.due.append(functools.partial(self._make, machine))
            self._wanted[name] = numel

    def _make(self, machine: Machine, transport: AnyTransport, label: str, number: int) -> None:
        """Makes the memory of tensors that have none. RuntimeError, on all ranks alike, where the
        ranks of one machine cannot share memory."""
        mine = [number, machine.local, secrets.token_hex(_TOKEN // 2)]
        said = gather(transport, f"{label}.hosts", mine)
        machine.places = [local for _, local, _ in said]
        tokens = {local: token for each, local, token in said if each == number}
        numels = list(self._wanted.values())
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
        self.slots.update(
            (name, rows[:, start : start + numel])
            for name, numel, start in zip(self._wanted, numels, starts.tolist())
        )
        self._wanted.clear()


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

    pays_debts = dense_asks = True

    machine: Machine
    shape: Tuple[int, ...]

    @classmethod
    def around(
        cls, compressor: Compressor, shape: Tuple[int, ...], machine: Optional[Machine]
    ) -> Compressor:
        """As of `Wrapper`. A tensor with fewer rows than a machine has ranks stays whole, and so
        does one that has no rows, or nothing in them."""
        if machine is None or machine.size == 1 or not compressor.policy.hosts:
            return compressor
        if not shape or shape[0] < machine.size or not math.prod(shape):
            return compressor
        return cls(_for_part(compressor, machine.size), machine, shape)

    @classmethod
    def needs_machine(
        cls, compressor: Compressor, placement: Placement, tell: Callable[[str], Any]
    ) -> bool:
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

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self)["traits"] = self.traits._replace(takes_scale=True)
        # Beside a debt, which is in true units, gradients are to be in those, too.
        vars(self)["roles"] = {**self.roles, DEBT: LOCAL}

    @property
    def kin(self) -> Any:
        return type(self), self.inner

    def __repr__(self) -> str:
        return f"{self.inner!r} on hosts of {self.machine.size}"

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        return (_TOGETHER, *self.inner.collectives(size))

    def rows(self, local: int) -> Tuple[int, int]:
        """The first row of a local rank's part, and that of the next."""
        rows, size = self.shape[0], self.machine.size
        return rows * local // size, rows * (local + 1) // size

    def part_of(self, local: Optional[int] = None) -> "HostPart":
        """The part of a local rank; default: that of this one, which its state is of."""
        first, last = self.rows(self.machine.local if local is None else local)
        row = math.prod(self.shape[1:])
        return HostPart(first * row, last * row, self.shape[0] * row, self.machine.size)

    def init(self, name: str, shape: Tuple[int, ...]) -> State:
        first, last = self.rows(self.machine.local)
        SharedMemory.of(self.machine).want(self.machine, name, math.prod(shape))
        return self.inner.init(name, (last - first, *shape[1:]))

    def encode(self, grad: np.ndarray, state: State, step: Step) -> Generator[Any, Any, Any]:
        part = yield from self._summed(grad, state, step)
        step = dataclasses.replace(step, scale=1.0)
        encoding = self.inner.encode(part, state, step)
        return (yield from encoding) if isinstance(encoding, Generator) else encoding

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
        slots = SharedMemory.of(self.machine).slots[state.name]
        kernels.of(grad).move([grad], [slots[self.machine.local]], scale=step.scale)
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
        first, last, *_ = self.part_of()
        part = grad[first:last]
        kernels.of(part).add_up([part], [[slot[first:last] for slot in slots]])
        return part

    def payload_bits(self, numel: int, step: Step) -> Optional[float]:
        # The largest.
        first, last, *_ = self.part_of(self.machine.size - 1)
        bits = self.inner.payload_bits(last - first, step)
        return None if bits is None else bits * (last - first) / numel

    def whole(self, debt: np.ndarray) -> np.ndarray:
        return self.part_of().whole(debt)

    def part(self, out: np.ndarray, rank: int) -> np.ndarray:
        first, last, *_ = self.part_of(self.machine.places[rank])
        return out[first:last]


class HostPart(NamedTuple):
    """The part of a tensor that one of `ranks` ranks keeps: its first element, the one after its
    last, and the tensor's number of elements."""

    first: int
    last: int
    numel: int
    ranks: int

    def whole(self, part: np.ndarray) -> np.ndarray:
        """A flat tensor with this part, and zero elsewhere."""
        array = zeros(self.numel)
        array[self.first : self.last] = part
        return array


class StateParts(checkpoint.Parts):
    """Host parts in states: {tensor: HostPart}, as "shards" in their headers."""

    of_none = {"shards": {}}

    def of_tensors(self, tensors: Iterable[Tensor]) -> Dict[str, Any]:
        kinds = ((tensor.name, tensor.compressor) for tensor in tensors)
        return {
            "shards": {name: list(c.part_of()) for name, c in kinds if isinstance(c, HostParts)}
        }

    def wrong(self, header: Mapping[str, Any]) -> checkpoint.Difference:
        parts, size = header["shards"], header["size"]
        for name, part in parts.items() if isinstance(parts, dict) else [("", parts)]:
            good = isinstance(part, (list, tuple)) and len(part) == len(HostPart._fields)
            good = good and not any(checkpoint.wrong_count(name, number) for number in part)
            if not good or not part[0] <= part[1] <= part[2] or not 1 <= part[3] <= size:
                where = f"shards.{name}" if name else "shards"
                right = Words(f"first, last, numel and ranks of a part, at most {size} ranks,")
                return where, right, part
        return None

    def refuse_missing(self, headers: Sequence[Mapping[str, Any]]) -> None:
        for name in headers[0]["shards"]:
            parts = [HostPart(*header["shards"][name]) for header in headers]
            found = collections.Counter((part.first, part.last) for part in parts)
            numel, ranks = parts[0].numel, parts[0].ranks
            starts = [*(first for first, _ in sorted(found)), numel]
            ends = [0, *(last for _, last in sorted(found))]
            if starts != ends or len(found) != ranks or set(found.values()) != {len(parts) / ranks}:
                (where,), (said,) = shown(f"shards.{name}"), shown(sorted(found))
                raise ValueError(
                    f"the states of all ranks do not belong together: {where} is {said}, which are "
                    f"not {ranks} parts of {numel} elements on each host. Load the states that one "
                    "job has saved"
                )

    def alike(self, header: Mapping[str, Any]) -> Dict[str, Any]:
        return {"shards": {name: list(part[2:]) for name, part in header["shards"].items()}}

    def shape(self, header: Mapping[str, Any], name: str, array: np.ndarray) -> Tuple[int, ...]:
        part = HostPart(*header.get("shards", {}).get(name, (0, -1, 0, 1)))
        return (part.numel,) if array.shape == (part.last - part.first,) else array.shape

    def whole(self, arrays: checkpoint.Arrays, header: Mapping[str, Any]) -> checkpoint.Arrays:
        def filled(name: str, array: np.ndarray) -> np.ndarray:
            part = HostPart(*header["shards"].get(name, (0, -1, 0, 1)))
            return part.whole(array) if array.shape == (part.last - part.first,) else array

        return {
            name: {key: filled(name, array) for key, array in named.items()}
            for name, named in arrays.items()
        }

    def own(self, tensor: Tensor, arrays: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
        if not isinstance(tensor.compressor, HostParts):
            return arrays
        first, last, numel, ranks = tensor.compressor.part_of()
        # A rank keeps its part for all ranks of its machine, but what is its own as it is.
        return {
            key: ranks * array[first:last]
            if key not in checkpoint.BESIDE and array.shape == (numel,)
            else array
            for key, array in arrays.items()
        }


checkpoint.parts = StateParts()
