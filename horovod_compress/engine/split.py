"""Split and select again: each rank's entries go to the owners of their places, who add them up and
send all ranks the largest sums.

The tensors of a step, in the order of their names, are one index space, cut into a region for each
rank, its owner. Hop 1, an alltoall, brings each owner the entries of its region. Hop 2, an
allgather, brings all ranks the sums that owners have accepted. What an owner does not accept, and
what its values lose when they are coded, goes into its own residual. docs/wire-format.md has both
messages.
"""

import dataclasses
import functools
import itertools
import math
import struct
import zlib
from collections.abc import Generator
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from .. import kernels
from ..compressors.base import GATHER, Asking, Compressor, Step
from ..compressors.state import State
from ..compressors.topk import TopK
from ..compressors.wrapper import Wrapper
from ..kernels import Encoded, new_body
from ..kernels.reference.dense import TOO_LARGE
from ..kernels.reference.sparse import HEAD, SCALES
from ..protocol import wire
from ..protocol.machine import Machine
from ..protocol.requests import Allgather, Alltoall, Arrived, Collective, Joint, Lengths, Payload

_LENGTH = struct.Struct("<I")
# In place of a length: the rest is what an owner says of the entries that it was sent.
_REFUSED = 2**32 - 1
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


class Split(NamedTuple):
    """How a tensor's entries are split among ranks and selected again. k: entries that a rank sends
    at most; accept: how many times as many owners accept of all ranks; values: how theirs travel, a
    kind of `encode_sparse`."""

    k: int
    accept: float
    values: str


class Selected(NamedTuple):
    """The result for one tensor on one rank. bodies: (first, last, sparse body of the sums
    accepted of these elements), None where something was not finite; left: (indices, values) for
    this rank's residual; scale: what sums were multiplied by."""

    bodies: Optional[List[Tuple[int, int, np.ndarray]]]
    left: Tuple[np.ndarray, np.ndarray]
    scale: float


@dataclasses.dataclass
class SelectAgain(Joint):
    """Has a tensor's entries added by the owners of their places, and the largest sums sent to all
    ranks. payload: this rank's, sparse; grad: the gradient's memory, which is zero; residual: where
    this rank keeps what was not sent; number, digest: as for a frame."""

    payload: Encoded
    split: Split
    grad: np.ndarray
    residual: np.ndarray
    number: int
    digest: int = 0
    collective = GATHER
    label = "split"

    def __post_init__(self) -> None:
        self.elements, self.finite = self.payload.elements, self.payload.finite

    @classmethod
    def exchange(
        cls,
        joints: Sequence["SelectAgain"],
        step: Step,
        lengths: Lengths = (wire.exact, wire.exact),
    ) -> Asking[List[Arrived]]:
        """As of `Joint`. Sums are made in rank order in the memory of the owner's gradients, which
        is zero before; it is so again of a tensor that is finite. WireError, on all ranks, where an
        owner refuses what it was sent."""
        regions = regions_of(
            tuple((tensor.grad.size, tensor.split.k) for tensor in joints),
            step.size,
            joints[0].split.accept,
        )
        rank, own = step.rank, regions[step.rank]
        messages = _Messages(joints, regions, step, lengths[1])
        frames = [
            messages.seal(bodies, owner, to=owner)
            for owner, bodies in enumerate(_bodies_by_owner(joints, regions))
        ]
        total = sum(map(len, frames))
        # Goes to nobody: Horovod's cache knows an alltoall by the length of its memory.
        spare = np.zeros(lengths[0](total) - total, np.uint8)
        arrived = yield Alltoall(np.concatenate([*frames, spare]), [len(frame) for frame in frames])
        left = [_NONE_LEFT] * len(joints)
        try:
            entries = messages.unseal(arrived, [own] * step.size, rank, len(arrived[rank]), to=rank)
            accepted = []
            for i, part in enumerate(own):
                body, left[part.tensor] = _accept(
                    joints[part.tensor], part, [bodies[i] for bodies in entries], step.gain
                )
                accepted.append(body)
            frame = messages.seal(accepted, rank)
        except wire.WireError as error:
            frame = messages.refusal(str(error))
        gathered = yield Allgather(frame)
        sums = messages.unseal([gathered], regions, rank, len(frame))
        bodies: List[Optional[List[Tuple[int, int, np.ndarray]]]] = [[] for _ in joints]
        for part, body in zip(itertools.chain(*regions), itertools.chain(*sums)):
            found = bodies[part.tensor]
            if len(body) and found is not None:
                found.append((part.first, part.last, body))
            else:
                bodies[part.tensor] = None
        return [
            Arrived(Selected(its, kept, step.gain), sent, received)
            for its, kept, sent, received in zip(bodies, left, messages.sent, messages.received)
        ]


@dataclasses.dataclass(frozen=True, repr=False)
class Splitting(Wrapper):
    """Top-k, or one of its kin, whose entries are split and selected again. An owner's sums are
    made on the CPU, in the gradient's memory, where a base would be left."""

    @classmethod
    def around(
        cls, compressor: Compressor, shape: Tuple[int, ...], machine: Optional[Machine]
    ) -> Compressor:
        splits = isinstance(compressor, TopK) and compressor.exchange == "split"
        return cls(compressor) if splits else compressor

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        return (*self.inner.collectives(size)[:-1], Collective("alltoall", "uint8"), GATHER)

    def payload_bits(self, numel: int, step: Step) -> Optional[float]:
        bits = self.inner.payload_bits(numel, step)
        # A rank receives its share of one payload, and `accepted` payloads.
        payloads = 1 + accepted(self.inner, step.size)
        return None if bits is None else bits * payloads / step.size

    def encode_all(
        self, grads: Sequence[np.ndarray], states: Sequence[State], steps: Sequence[Step]
    ) -> Asking[List[Payload]]:
        encodings = self.inner.encode_all(grads, states, steps)
        payloads = (yield from encodings) if isinstance(encodings, Generator) else encodings
        for i, (payload, grad, state) in enumerate(zip(payloads, grads, states)):
            if isinstance(payload, Encoded):
                split, residual = split_of(self.inner, grad.size, steps[i]), self.residual(state)
                payloads[i] = SelectAgain(payload, split, grad, residual, self.traits.number)
        return payloads

    # The result of a Joint is what its own exchange has made of it.
    def decode_all(  # type: ignore[override]
        self, summed: List[Selected], outs: List[np.ndarray], states: Any, steps: Any, scale: float
    ) -> List[bool]:
        finite, found = [each.bodies is not None for each in summed], []
        for i, (each, out, state) in enumerate(zip(summed, outs, states)):
            state.sent = each.left
            found += [(i, body, out[first:last]) for first, last, body in each.bodies or ()]
            if each.bodies is None:
                out.fill(np.nan)
        if found:
            tensors, bodies, parts = map(list, zip(*found))
            try:
                added = self.inner.add_all(bodies, parts, scale / summed[0].scale)
            except ValueError as error:
                raise wire.WireError(f"sums that owners have accepted: {error}") from None
            for i, good in zip(tensors, added):
                finite[i] &= good
        return finite

    def commit(self, state: State) -> None:
        if state.sent:
            # What this rank as an owner has not accepted, of all ranks' entries.
            indices, values = state.sent
            self.residual(state)[indices] += values
        super().commit(state)


def accepted(compressor: Any, size: int) -> float:
    """How many times the entries that a rank sends all ranks get."""
    asked = compressor.accept
    return min(max(min(4.0, size / 2), 1.0) if asked == "auto" else float(asked), size)


def split_of(compressor: Any, numel: int, step: Step) -> Split:
    """How this step's entries of a tensor are split."""
    chunk, k = compressor.entries(numel, step.index)
    sent = k * -(-numel // chunk) if chunk else 0
    return Split(sent, accepted(compressor, step.size), compressor.values)


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
                until = math.floor(accept * (before + high) + 0.5)
                quota = max(until - math.floor(accept * (before + low) + 0.5), 1)
                parts.append(Part(tensor, first, last, quota if accept < ranks else last - first))
        before += k
    return regions


class _Messages:
    """The frames of both hops in one step, and their bytes by tensor; those of headers and padding,
    which are no tensor's own, count with the first."""

    def __init__(
        self,
        tensors: Sequence[SelectAgain],
        regions: Regions,
        step: Step,
        sums_length: wire.FrameLength,
    ) -> None:
        self.sent, self.received = [0] * len(tensors), [0] * len(tensors)
        self._regions, self._number = regions, tensors[0].number
        self._step, self._sums_length = step, sums_length
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

    def _framed(self, pieces: Sequence[Any], to: int) -> np.ndarray:
        length = self._sums_length if to < 0 else wire.exact
        encoded, step = Encoded(new_body(*pieces), 0), self._step
        return wire.seal([encoded], self._number, self._digest(to), step.index, step.rank, length)

    def unseal(
        self, arrived: Sequence[np.ndarray], regions: Regions, rank: int, own: int, to: int = -1
    ) -> List[List[np.ndarray]]:
        """The sparse bodies of each rank's parts, from all ranks' frames; empty where something was
        not finite. rank: this one, of which `own` bytes are. WireError for anything else, and where
        an owner refuses."""
        joined = np.concatenate(arrived)
        self.received[0] += len(joined) - own
        digest, index = self._digest(to), self._step.index
        frames, _ = wire.unseal(joined, len(regions), 1, self._number, digest, index)
        bodies = []
        for sender, ((frame,), parts) in enumerate(zip(frames, regions)):
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
    if len(frame) >= _LENGTH.size and _LENGTH.unpack_from(frame.data)[0] == _REFUSED:
        said = frame[_LENGTH.size :].tobytes().decode(errors="replace")
        raise wire.WireError(f"it refuses what it was sent: {said}")
    bodies, at = [], 0
    for _ in range(count):
        start = at + _LENGTH.size
        if start > len(frame):
            raise wire.WireError("cut off before one of its parts")
        (length,) = _LENGTH.unpack_from(frame.data, at)
        at = start + length
        bodies.append(frame[start:at])
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
                    (entries[tensor],) = kernel.decode_sparse([payload.body], numel=its.grad.size)
                indices, values = entries[tensor]
                low, high = np.searchsorted(indices, [first, last])
                cut = indices[low:high] - np.uint32(first)
                count = SCALES.get(its.split.values, 0)
                scales = payload.body[HEAD.size :][: 4 * count].view("<f4")
                (encoded,) = kernel.encode_sparse(
                    [cut],
                    [values[low:high]],
                    kind=its.split.values,
                    scales=tuple(scales.tolist()),
                )
                bodies.append(encoded.body)
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
            ((indices, values),) = kernel.decode_sparse([body], numel=sums.size)
        except ValueError as error:
            raise wire.WireError(f"payload of rank {rank}: {error}") from None
        finite &= kernel.scatter_add([sums], [indices], [values], scale=scale)[0]
        entries.append((indices, values))
    if not finite:
        return _NOT_FINITE, _NONE_LEFT
    places = np.unique(np.concatenate([indices for indices, _ in entries]))
    unscaled = np.zeros(len(places), np.float32)
    for indices, values in entries:
        unscaled[np.searchsorted(places, indices)] += values
    # For a residual: such are accepted in any case.
    too_large = np.abs(unscaled + tensor.residual[part.first : part.last][places]) >= TOO_LARGE
    chosen = _largest(np.abs(unscaled), part.quota) | too_large
    kind = tensor.split.values
    ((accepted, _, values, scales),) = kernel.take_entries(
        [places[chosen]], [sums], None, kind=kind, masked=0
    )
    (encoded,) = kernel.encode_sparse([accepted], [values], kind=kind, scales=[scales])
    left = np.where(chosen, sums[places] / np.float32(scale), unscaled)
    sums[places] = 0
    return encoded.body, ((places + np.uint32(part.first))[left != 0], left[left != 0])


def _largest(magnitude: np.ndarray, count: int) -> np.ndarray:
    """True for the `count` largest, of equal ones the first."""
    if count >= len(magnitude):
        return np.ones(len(magnitude), bool)
    threshold = np.partition(magnitude, -count)[-count]
    chosen = magnitude > threshold
    chosen[np.flatnonzero(magnitude == threshold)[: count - np.count_nonzero(chosen)]] = True
    return chosen
