"""Split and select again: each rank's entries go to the owners of their places, who add them up and
send all ranks the largest sums.

The tensors of a step, in the order of their names, are one index space, cut into a region for each
rank, its owner. Hop 1, an alltoall, brings each owner the entries of its region. Hop 2, an
allgather, brings all ranks the sums that owners have accepted. What an owner does not accept, and
what its values lose when they are coded, goes into its own residual. docs/wire-format.md has both
messages.
"""

import functools
import itertools
import math
import struct
import zlib
from typing import (
    Any,
    Dict,
    Generator,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np

from . import kernels, wire
from .kernels import Encoded, new_body
from .kernels.reference.dense import TOO_LARGE
from .requests import Allgather, Alltoall, SelectAgain

_LENGTH = struct.Struct("<I")
# In place of a length: the rest is what an owner says of the entries that it was sent.
_REFUSED = 2**32 - 1
# Bytes of a sparse body before its scales.
_HEAD = 6
_SCALE_BYTES = {"sign": 4, "power": 4, "2bit": 16}
_NOT_FINITE = np.empty(0, np.uint8)
_NONE_LEFT = np.empty(0, np.uint32), np.empty(0, np.float32)


class Part(NamedTuple):
    """The elements of a tensor, from first to before last, that one owner has. tensor: which of the
    step's; quota: how many sums it accepts."""

    tensor: int
    first: int
    last: int
    quota: int


Regions = Sequence[Sequence[Part]]  # by owner


class Selected(NamedTuple):
    """What becomes of one tensor on one rank. bodies: (first, last, sparse body of the sums
    accepted of these elements), None where something was not finite; left: (indices, values) for
    this rank's residual; sent, received: bytes; scale: what sums were multiplied by."""

    bodies: Optional[List[Tuple[int, int, np.ndarray]]]
    left: Tuple[np.ndarray, np.ndarray]
    sent: int
    received: int
    scale: float


@functools.lru_cache(maxsize=16)
def regions_of(sizes: Tuple[Tuple[int, int], ...], ranks: int, accept: float) -> Regions:
    """The parts of each rank's region, for tensors of (elements, entries that a rank sends).
    Regions have equally many entries, where a tensor's are spread evenly. Quotas add up to accept
    times all entries; each is 1 at least, so that nothing waits for ever. With accept = ranks
    nothing is left."""
    total, before = sum(k for _, k in sizes), 0
    cuts = [total * owner // ranks for owner in range(ranks + 1)]
    regions: List[List[Part]] = [[] for _ in range(ranks)]
    for tensor, (numel, k) in enumerate(sizes):
        inside = [min(max(cut - before, 0), k) for cut in cuts]
        for parts, low, high in zip(regions, inside, inside[1:]):
            if low < high:
                first, last = numel * low // k, numel * high // k
                quota = max(
                    _rounded(accept * (before + high)) - _rounded(accept * (before + low)), 1
                )
                parts.append(Part(tensor, first, last, quota if accept < ranks else last - first))
        before += k
    return regions


def _rounded(number: float) -> int:
    return math.floor(number + 0.5)


def split_step(
    tensors: Sequence[SelectAgain],
    rank: int,
    size: int,
    step: int,
    scale: float,
    lengths: Tuple[wire.FrameLength, wire.FrameLength] = (wire.exact, wire.exact),
) -> Generator[Union[Alltoall, Allgather], Any, List[Selected]]:
    """The exchange of all of a step's tensors, on one rank: yields an Alltoall and an Allgather, is
    sent their results, and returns what becomes of each tensor. tensors: in the order of their
    names, alike on all ranks; step: its number; scale: the factor for sums; lengths: what the
    memory of hop 1 and the frame of hop 2 are padded to.

    Sums are made in rank order in the memory of the owner's gradients, which is zero before; it is
    so again of a tensor that is finite. Raises WireError, on all ranks, where an owner refuses what
    it was sent.
    """
    regions = regions_of(
        tuple((tensor.grad.size, tensor.split.k) for tensor in tensors),
        size,
        tensors[0].split.accept,
    )
    own, messages = regions[rank], _Messages(tensors, regions, step, lengths[1])
    frames = [
        messages.seal(bodies, owner, to=owner)
        for owner, bodies in enumerate(_bodies_by_owner(tensors, regions))
    ]
    total = sum(map(len, frames))
    # Goes to nobody: Horovod's cache knows an alltoall by the length of its memory.
    spare = np.zeros(lengths[0](total) - total, np.uint8)
    arrived = yield Alltoall(np.concatenate([*frames, spare]), [len(frame) for frame in frames])
    left = [(np.empty(0, np.uint32), np.empty(0, np.float32))] * len(tensors)
    try:
        entries = messages.unseal(arrived, [own] * size, rank, len(arrived[rank]), to=rank)
        accepted = []
        for i, part in enumerate(own):
            body, left[part.tensor] = _accept(
                tensors[part.tensor], part, [bodies[i] for bodies in entries], scale
            )
            accepted.append(body)
        frame = messages.seal(accepted, rank)
    except wire.WireError as error:
        frame = messages.refusal(str(error))
    gathered = yield Allgather(frame)
    sums = messages.unseal([gathered], regions, rank, len(frame))
    bodies: List[Optional[List[Tuple[int, int, np.ndarray]]]] = [[] for _ in tensors]
    for part, body in zip(itertools.chain(*regions), itertools.chain(*sums)):
        found = bodies[part.tensor]
        if len(body) and found is not None:
            found.append((part.first, part.last, body))
        else:
            bodies[part.tensor] = None
    return [Selected(*each, scale) for each in zip(bodies, left, messages.sent, messages.received)]


class _Messages:
    """The frames of both hops in one step, and their bytes by tensor; those of headers and padding,
    which are no tensor's own, count with the first. sums_length: what frames of accepted sums are
    padded to."""

    def __init__(
        self,
        tensors: Sequence[SelectAgain],
        regions: Regions,
        step: int,
        sums_length: wire.FrameLength,
    ) -> None:
        self.sent, self.received = [0] * len(tensors), [0] * len(tensors)
        self._regions, self._step, self._number, self._sums_length = (
            regions,
            step,
            tensors[0].number,
            sums_length,
        )
        self._layout = zlib.crc32(
            repr([len(regions), [(tensor.digest, tensor.split) for tensor in tensors]]).encode()
        )

    def _digest(self, to: int) -> int:
        """Of a frame of entries for owner `to`, or for -1 of accepted sums."""
        return zlib.crc32(struct.pack("<i", to), self._layout)

    def seal(self, bodies: Sequence[np.ndarray], owner: int, to: int = -1) -> np.ndarray:
        """The frame of the sparse bodies of an owner's parts."""
        frame = self._framed(
            [piece for body in bodies for piece in (_LENGTH.pack(len(body)), body)], to
        )
        _count(self.sent, self._regions[owner], bodies, len(frame))
        return frame

    def refusal(self, why: str) -> np.ndarray:
        """In place of the frame of accepted sums."""
        return self._framed([_LENGTH.pack(_REFUSED), why.encode()], -1)

    def _framed(self, pieces: Sequence[Union[bytes, np.ndarray]], to: int) -> np.ndarray:
        length = self._sums_length if to < 0 else wire.exact
        return wire.seal(
            Encoded(new_body(*pieces), 0), self._number, self._digest(to), self._step, length
        )

    def unseal(
        self, arrived: Sequence[np.ndarray], regions: Regions, rank: int, own: int, to: int = -1
    ) -> List[List[np.ndarray]]:
        """The sparse bodies of each rank's parts, from all ranks' frames; empty where something was
        not finite. rank: this one, of which `own` bytes are. WireError for anything else, and where
        an owner refuses."""
        joined = np.concatenate(arrived)
        self.received[0] += len(joined) - own
        frames, _ = wire.unseal(joined, len(regions), self._number, self._digest(to), self._step)
        bodies = []
        for sender, (frame, parts) in enumerate(zip(frames, regions)):
            try:
                bodies.append(_split_bodies(frame, len(parts)))
            except wire.WireError as error:
                raise wire.WireError(f"payload of rank {sender}: {error}") from None
            if sender != rank:
                _count(self.received, parts, bodies[-1], 0)
        return bodies


def _count(
    counters: List[int], parts: Sequence[Part], bodies: Sequence[np.ndarray], total: int
) -> None:
    """Adds a frame's bytes to its tensors', of `total` what is left to the first's."""
    for part, body in zip(parts, bodies):
        counters[part.tensor] += _LENGTH.size + len(body)
        total -= _LENGTH.size + len(body)
    counters[0] += total


def _split_bodies(frame: np.ndarray, count: int) -> List[np.ndarray]:
    """The `count` sparse bodies that a frame's body consists of."""
    bodies, at = [], 0
    for _ in range(count):
        start = at + _LENGTH.size
        if start > len(frame):
            raise wire.WireError("cut off before one of its parts")
        (length,) = _LENGTH.unpack_from(frame.data, at)
        if length == _REFUSED:
            break
        at = start + length
        bodies.append(frame[start:at])
    if len(frame) >= at + _LENGTH.size and _LENGTH.unpack_from(frame.data, at)[0] == _REFUSED:
        raise wire.WireError(
            f"it refuses what it was sent: "
            f"{frame[at + _LENGTH.size :].tobytes().decode(errors='replace')}"
        )
    if at != len(frame):
        raise wire.WireError("not as long as its parts")
    return bodies


def _bodies_by_owner(
    tensors: Sequence[SelectAgain], regions: Regions
) -> Iterator[List[np.ndarray]]:
    """For each owner, the sparse bodies of this rank's entries in the parts of its region."""
    entries: Dict[int, Tuple[np.ndarray, np.ndarray]] = {}  # of tensors that are cut
    for parts in regions:
        bodies = []
        for tensor, first, last, _ in parts:
            its = tensors[tensor]
            payload, kernel = its.payload, kernels.of(its.grad)
            if not payload.finite:
                bodies.append(_NOT_FINITE)
            elif last - first == its.grad.size:
                bodies.append(payload.body)
            else:
                if tensor not in entries:
                    entries[tensor] = kernel.decode_sparse(payload.body, numel=its.grad.size)
                indices, values = entries[tensor]
                low, high = np.searchsorted(indices, [first, last])
                cut = indices[low:high] - np.uint32(first)
                scales = payload.body[_HEAD : _HEAD + _SCALE_BYTES.get(its.split.values, 0)].view(
                    "<f4"
                )
                bodies.append(
                    kernel.encode_sparse(
                        cut, values[low:high], kind=its.split.values, scales=scales.tolist()
                    ).body
                )
        yield bodies


def _accept(
    tensor: SelectAgain, part: Part, bodies: Sequence[np.ndarray], scale: float
) -> Tuple[np.ndarray, Tuple[np.ndarray, np.ndarray]]:
    """An owner's work on a part: adds all ranks' entries. Returns the sparse body of the sums that
    it accepts, and (indices, values) of what is left for its residual; empty ones where something
    is not finite."""
    kernel, sums = kernels.of(tensor.grad), tensor.grad[part.first : part.last]
    finite, entries = math.isfinite(scale) and scale != 0 and all(map(len, bodies)), []
    for rank, body in enumerate(bodies if finite else ()):
        try:
            entries.append(kernel.decode_sparse(body, numel=sums.size))
        except ValueError as error:
            raise wire.WireError(f"payload of rank {rank}: {error}") from None
        finite &= kernel.scatter_add(sums, *entries[-1], scale=scale)
    if not finite:
        return _NOT_FINITE, _NONE_LEFT
    places = np.unique(np.concatenate([indices for indices, _ in entries]))
    unscaled = np.zeros(len(places), np.float32)
    for indices, values in entries:
        unscaled[np.searchsorted(places, indices)] += values
    # For a residual: such are accepted in any case.
    too_large = np.abs(unscaled + tensor.residual[part.first : part.last][places]) >= TOO_LARGE
    chosen = _largest(np.abs(unscaled), part.quota) | too_large
    accepted, _, values, scales = kernel.take_entries(
        places[chosen], sums, None, kind=tensor.split.values, mask=False
    )
    body = kernel.encode_sparse(accepted, values, kind=tensor.split.values, scales=scales).body
    left = np.where(chosen, sums[places] / np.float32(scale), unscaled)
    sums[places] = 0
    return body, ((places + np.uint32(part.first))[left != 0], left[left != 0])


def _largest(magnitude: np.ndarray, count: int) -> np.ndarray:
    """Which are the `count` largest, of equal ones the first."""
    if count >= len(magnitude):
        return np.ones(len(magnitude), bool)
    threshold = np.partition(magnitude, -count)[-count]
    chosen = magnitude > threshold
    chosen[np.flatnonzero(magnitude == threshold)[: count - np.count_nonzero(chosen)]] = True
    return chosen
