"""One rank's side of decentralized training: messages to its neighbors, and theirs."""

import collections
import dataclasses
import json
import math
import time
import warnings
import zlib
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Tuple

import numpy as np

from ..compressors import Spec, get_compressor
from ..compressors.base import Compressor, Step
from ..compressors.selective import decide_follow_lr
from ..compressors.state import State, zeros
from ..engine import checkpoint
from ..engine.dense_policy import compressor_for
from ..engine.lockstep import Named
from ..engine.step import end_steps
from ..kernels import HEADROOM, Encoded
from ..protocol import wire
from ..protocol.handshake import first_difference, shown
from ..transport.base import Transport
from .rules import Copies, names_of_arrays
from .topology import Topology

# Of messages, where none is asked for.
DEFAULT = "qsgd:bits=4,norm=max"
# Every so-many-th step α is measured, and it is the mean of so many of them.
MEASURED, MEAN_OF = 10, 10
_DIVERGED = (
    "the parameters of rank {} are beyond float32: training has diverged. Load the last saved "
    "states, and take more bits, a smaller step or a lower learning rate"
)
_COUNTS = (
    "steps",
    "steps_undone",
    "bytes_sent",
    "bytes_received",
    "dense_bytes",
    "encode_seconds",
    "exchange_seconds",
    "decode_seconds",
)
# Comes before the tensors' parts of a message, where it has those.
_NO_TEXT = np.zeros(0, np.uint8)


def compressor_of_messages(spec: Spec) -> Compressor:
    """The compressor of a spec, for messages that each receiver decodes by itself and that leave
    nothing behind. ValueError, which says why, for others, and for options without meaning here."""
    compressor = get_compressor(spec)
    policy, declared = compressor.policy, compressor.collectives(2)
    others = set(compressor.roles) - {compressor.traits.accumulator, "lr"}
    why = ""
    if compressor.traits.corrects_momentum:
        why = "it corrects the momentum of gradients, and here parameters travel: use topk"
    elif len(declared) > 1 or declared[0].verb in ("allreduce", "alltoall"):
        why = "its payloads are sums over ranks, which share a scale: use qsgd, natural or topk"
    elif others:
        why = f"it needs what earlier steps have left ({', '.join(sorted(others))})"
    elif policy.hosts or policy.exchange == "split":
        why = "hosts=true and exchange=split are for exchanges of all ranks: leave them out"
    elif policy.dense == "int8":
        why = "dense=int8 has one scale for all ranks: say dense=fp16"
    if why:
        raise ValueError(f"{compressor.id} cannot compress messages between neighbors: {why}")
    return decide_follow_lr(compressor, False, False)


@dataclasses.dataclass(order=True)
class _Failure:
    """The number of an exchange that failed, and the error that all ranks raise. finite: False
    where a rank's parameters are beyond float32."""

    exchange: int
    finite: bool
    text: str


@dataclasses.dataclass
class _Tensor:
    """dtype: of its numbers in messages, where it is not compressed; sent: C(z) of this rank."""

    name: str
    compressor: Compressor
    state: State
    numel: int
    dtype: Optional[np.dtype]
    sent: np.ndarray

    def encode(self, z: np.ndarray, step: Step) -> Tuple[np.ndarray, bool]:
        """(this tensor's part of a message, whether it is finite). The part may be in the memory of
        z, which is used up."""
        residual = self.compressor.residual(self.state)
        if residual is not None:
            # Of another tensor.
            residual.fill(0)
        encoded: Any = self.compressor.encode(z, self.state, step)
        end_steps([self], True)
        self.compressor.apply_pending(self.state)
        if self.dtype is None:
            return encoded.body, encoded.finite
        finite = self.compressor.decode_dense(encoded.array, z, self.state, 1.0)
        return encoded.array.view(np.uint8), finite

    def add(self, body: np.ndarray, out: np.ndarray, scale: float, spare: np.ndarray) -> bool:
        """Adds a part of a message, times a factor. Returns whether what is added is finite.
        ValueError for what is no part."""
        if self.dtype is None:
            return self.compressor.add(body, out, scale)
        if body.nbytes != self.numel * self.dtype.itemsize:
            raise ValueError(f"{body.nbytes} bytes for {self.numel} elements of {self.dtype}")
        values = _aligned(body, self.dtype)
        finite = self.compressor.decode_dense(values, spare, self.state, scale)
        out += spare
        return finite


class Gossip:
    """One rank's side of decentralized training. `start` sends, `finish` receives; between them
    other ranks of the same process may start. Parameters are {name: flat float32 array}.

    Args:
        compressor: of messages, from `compressor_of_messages`.
        algorithm: one of ALGORITHMS.
        zeta: CHOCO's step ζ.
        topology: of all ranks.
        transport: what moves messages.
        shapes: of the tensors, by name, in one order on all ranks.
    """

    # What names of messages begin with.
    label = "gossip"

    def __init__(
        self,
        compressor: Compressor,
        algorithm: str,
        zeta: float,
        topology: Topology,
        transport: Transport,
        shapes: Dict[str, Tuple[int, ...]],
    ) -> None:
        self.algorithm, self.zeta, self.topology = algorithm, zeta, topology
        self.transport = transport
        self.neighbors, self._shapes = topology.neighbors(transport.rank), shapes
        self._number = compressor.traits.number
        told = [repr(compressor), algorithm, list(map(list, shapes.items()))]
        self._digest = zlib.crc32(json.dumps(told).encode())
        largest = max(map(math.prod, shapes.values()), default=0)
        self._out, self._spare, residual = (zeros(largest) for _ in range(3))
        self._wide = np.zeros(largest)
        self._tensors = []
        for name, shape in shapes.items():
            chosen = compressor_for(compressor, name, shape)
            state, numel = chosen.init(name, shape), math.prod(shape)
            (declared,) = chosen.collectives(2)
            if chosen.residual(state) is not None:
                # One for all tensors: it is zero before each.
                state.arrays[chosen.traits.accumulator] = residual[:numel]
            dtype = None if declared.verb == "allgather" else np.dtype(declared.dtype)
            self._tensors.append(_Tensor(name, chosen, state, numel, dtype, zeros(numel)))
        self.copies: Dict[str, Copies] = {}
        self.steps = 0
        self._memory, self._frame_length = np.zeros(0, np.uint8), transport.frame_length()
        self._wait: Callable[[], Dict[int, np.ndarray]] = dict
        self._finite = True
        # Until `resync`.
        self.failure: Optional[_Failure] = None
        self._alphas: Deque[float] = collections.deque(maxlen=MEAN_OF)
        # Of this process, whatever state it has loaded.
        self.counts: Dict[str, float] = dict.fromkeys(_COUNTS, 0)

    def begin(self, values: Named) -> None:
        """Makes public copies of parameters that all ranks have alike."""
        keys = names_of_arrays(self.algorithm)
        self.copies = {
            name: Copies(self.algorithm, {key: x.astype(np.float64) for key in keys})
            for name, x in values.items()
        }

    def start(self, values: Named) -> None:
        """Sends this rank's message. Where parameters are not finite, the local step is undone
        before: in CHOCO, where that is not known any more, they become their public copies."""
        began = time.perf_counter()
        frame = self._frame(self._parts(values))
        if not self._finite and self.failure is None:
            self.counts["steps_undone"] += 1
            for name, copies in self.copies.items():
                copies.undo(values[name])
            frame = self._frame(self._parts(values))
        self.counts["encode_seconds"] += time.perf_counter() - began
        self.counts["dense_bytes"] += 4 * sum(t.numel for t in self._tensors) * len(self.neighbors)
        self._send("message", frame)

    def finish(self, values: Named) -> None:
        """Receives the neighbors' messages, and makes parameters what they are after the exchange.

        Where a message cannot be used, the rank that got it changes nothing, and sends the error in
        place of its next messages. Ranks that get it do the same. All raise it in one exchange,
        when it has come to the furthest.

        Raises:
            WireError: a message was not what its receiver expects, such as one of another step.
            FloatingPointError: a rank's parameters are beyond float32.
        """
        messages = self._received()
        began = time.perf_counter()
        for i, tensor in enumerate(self._tensors if self.failure is None else ()):
            arrived = self._decoded(tensor, {rank: parts[i] for rank, parts in messages.items()})
            self.copies[tensor.name].mix(self.steps + 1, arrived, self._wide[: tensor.numel])
        self.steps += 1
        if self.failure is not None:
            self.raise_failure(self.steps - 1 - self.topology.diameter)
            return
        # All messages can be used: what they bring is taken over now.
        for tensor in self._tensors:
            x, wide = values[tensor.name], self._wide[: tensor.numel]
            self.copies[tensor.name].merge(x, self.steps, self.zeta, tensor.sent, wide)
        self.counts["steps"] += 1
        self.counts["decode_seconds"] += time.perf_counter() - began

    def raise_failure(self, until: float = math.inf) -> None:
        """Raises the error of an exchange that failed, if that had a number up to `until`."""
        if self.failure is not None and self.failure.exchange <= until:
            kind = wire.WireError if self.failure.finite else FloatingPointError
            raise kind(self.failure.text)

    def resync(self) -> None:
        """Makes W x̂ anew, of public copies that ranks send each other. All ranks call it, where an
        error may have left them with different ones."""
        mine = np.array([self.steps], np.int64)
        self.steps = int(self.transport.allreduce(f"{self.label}.steps", mine, "max")()[0])
        self._finite, self.failure = True, None
        copies = [self.copies[tensor.name] for tensor in self._tensors]
        publics = [each.public.view(np.uint8) for each in copies]
        self._send("resync", self._frame([_NO_TEXT, *publics]))
        messages, weights = self._received(), self.topology.weights[self.transport.rank]
        for rank, parts in messages.items():
            if any(part.nbytes != public.nbytes for part, public in zip(parts, publics)):
                self._fail(f"{self._of(rank)}: its parts are no copies of parameters")
        # Where that has failed, the next exchanges tell all ranks.
        if self.failure is None:
            for i, each in enumerate(copies):
                each.mixed.fill(0)
                for rank, parts in messages.items():
                    each.mixed += weights[rank] * _aligned(parts[i], np.dtype(np.float64))

    @property
    def loses_too_much(self) -> bool:
        """True if α was above 1 on average over a hundred steps of this process."""
        return len(self._alphas) == MEAN_OF and float(np.mean(self._alphas)) > 1

    @property
    def alpha(self) -> Optional[float]:
        """The mean of ‖C(z) − z‖/‖z‖, over the last hundred steps at most; None before it was
        measured."""
        return float(np.mean(self._alphas)) if self._alphas else None

    def stats(self) -> Dict[str, Any]:
        """Totals of this rank since this process began, whatever state it has loaded: steps;
        steps_undone, whose update was not finite; bytes_sent, bytes_received, by messages with
        their frames; dense_bytes, of the same messages as float32; ratio: dense_bytes / bytes_sent;
        alpha; encode_seconds, exchange_seconds (waiting), decode_seconds."""
        dense, sent = self.counts["dense_bytes"], self.counts["bytes_sent"]
        return {**self.counts, "ratio": dense / sent if sent else 1.0, "alpha": self.alpha}

    def identity(self, portable: bool) -> Dict[str, Any]:
        """The rank, topology and algorithm that a state belongs to; None for all of them in a
        portable one."""
        its = {
            "rank": self.transport.rank,
            "size": self.transport.size,
            "algorithm": self.algorithm,
            "topology": self.topology.description(),
        }
        return dict.fromkeys(its) if portable else its

    def check(self, kept: Any) -> None:
        """Looks whether a state fits.

        Args:
            kept: what `DecentralizedOptimizer.state_dict` has under "decentralized".

        Raises:
            ValueError: it does not fit, or is no such state.
        """
        try:
            portable = kept["rank"] is None
            expected = self.identity(portable)
            found = {key: kept[key] for key in expected}
            arrays = {
                name: {key: np.asarray(tensor) for key, tensor in its.items()}
                for name, its in kept["tensors"].items()
            }
            counts = kept["exchanges"], kept["local_steps"]
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"not a state of a DecentralizedOptimizer: {error!r}") from None
        keys = names_of_arrays(self.algorithm)
        expected["tensors"] = {
            name: {"parameter": shape} if portable else dict.fromkeys(keys, (math.prod(shape),))
            for name, shape in self._shapes.items()
            if portable or arrays
        }
        found["tensors"] = {
            name: {key: array.shape for key, array in its.items()} for name, its in arrays.items()
        }
        difference = first_difference(expected, found)
        if difference:
            (where,), (wanted, its) = shown(difference[0]), shown(*difference[1:])
            raise ValueError(
                f"this state does not fit: {where} is {its} in it and {wanted} here. Load on every "
                "rank what that rank has saved, at the same number of ranks and with the same "
                "model and options; or a portable state"
            )
        for count in counts:
            checkpoint.refuse(checkpoint.wrong_count("steps", count))
        checkpoint.refuse_not_finite(arrays)

    def _parts(self, values: Named) -> Iterator[np.ndarray]:
        """The parts of this rank's message, one after the other in the same memory. Says in
        `_finite` whether they are."""
        self._finite, squares, errors = True, 0.0, 0.0
        if self.failure is not None:
            self._finite = self.failure.finite
            told = self.failure.exchange.to_bytes(8, "little") + self.failure.text.encode()
            yield np.frombuffer(told, np.uint8)
            return
        yield _NO_TEXT
        measures = self.algorithm in ("dcd", "choco") and self.steps % MEASURED == MEASURED - 1
        step = Step(self.steps, self.transport.rank, self.transport.size)
        for tensor in self._tensors:
            z, error = self._out[: tensor.numel], self._spare[: tensor.numel]
            self.copies[tensor.name].message(values[tensor.name], self.steps + 1, z, error)
            if measures:
                np.copyto(error, z)
                squares += float(np.dot(z, z))
            part, finite = tensor.encode(z, step)
            self._finite &= finite
            yield part
            if measures and self._finite:
                tensor.add(part, error, -1.0, z)
                errors += float(np.dot(error, error))
        if measures and self._finite and squares:
            alpha = math.sqrt(errors / squares)
            # NaN where both are beyond float32.
            self._alphas.append(alpha if alpha < math.inf else math.inf)

    def _frame(self, parts: Iterable[np.ndarray]) -> np.ndarray:
        """A message: the lengths of its parts, and the parts, in memory of its own."""
        lengths = np.zeros(1 + len(self._tensors), np.int64)
        table = slice(HEADROOM, HEADROOM + lengths.nbytes)
        end = table.stop
        for i, part in enumerate(parts):
            lengths[i], start, end = part.nbytes, end, end + part.nbytes
            if end >= self._memory.size:
                self._memory = np.concatenate([self._memory[:start], np.zeros(end + 1, np.uint8)])
            self._memory[start:end] = part
        self._memory[table] = lengths.view(np.uint8)
        encoded = Encoded(self._memory[: end + 1], 0, self._finite)
        rank, length = self.transport.rank, self._frame_length
        return wire.seal([encoded], self._number, self._digest, self.steps, rank, length)

    def _send(self, name: str, frame: np.ndarray) -> None:
        self.counts["bytes_sent"] += frame.nbytes * len(self.neighbors)
        wait = self.transport.neighbors(f"{self.label}.{name}", frame, self.neighbors)
        self._wait = lambda: {self.transport.rank: frame, **wait()}

    def _received(self) -> Dict[int, List[np.ndarray]]:
        """{rank: its tensors' parts of a message}, of neighbors and of this rank, ascending, where
        no exchange has failed."""
        began = time.perf_counter()
        frames = self._wait()
        self.counts["exchange_seconds"] += time.perf_counter() - began
        self.counts["bytes_received"] += sum(frames[rank].nbytes for rank in self.neighbors)
        messages = {}
        for rank in sorted(frames):
            try:
                messages[rank] = self._opened(rank, frames[rank])
            except wire.WireError as error:
                self._fail(f"{self._of(rank)}: {error}")
        return messages

    def _opened(self, rank: int, frame: np.ndarray) -> List[np.ndarray]:
        """The tensors' parts of a message, or of one that brings an error none."""
        number, digest = self._number, self._digest
        ((body,),), (finite,) = wire.unseal(frame, 1, 1, number, digest, self.steps, rank)
        table = 8 * (1 + len(self._tensors))
        lengths = _aligned(body[: table if body.size >= table else 0], np.dtype(np.int64))
        if (lengths < 0).any() or table + lengths.sum(dtype=object) != body.size:
            raise wire.WireError("its parts do not make it up")
        ends = table + np.cumsum(lengths)
        told, *parts = np.split(body, [table, *ends.tolist()])[1:-1]
        if told.size:
            exchange = min(int.from_bytes(told[:8].tobytes(), "little"), self.steps)
            text = told[8:].tobytes().decode(errors="replace")
            self._learn(_Failure(exchange, finite, text))
        elif not finite:
            self._fail(_DIVERGED.format(rank), finite)
        return parts

    def _fail(self, text: str, finite: bool = True) -> None:
        """Begins to tell all ranks why this one cannot use a message."""
        self._learn(_Failure(self.steps, finite, text))
        if self.topology.diameter:
            warnings.warn(
                "horovod_compress: an exchange has failed. All ranks raise the error together, "
                f"{self.topology.diameter} exchanges later: {text}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _learn(self, failure: _Failure) -> None:
        # The first of all, so that ranks which know of several raise the same one.
        self.failure = min(failure, self.failure or failure)

    def _decoded(
        self, tensor: _Tensor, parts: Dict[int, np.ndarray]
    ) -> Iterator[Tuple[float, np.ndarray]]:
        """The weights and values of a tensor's parts, by rank, up to one that cannot be used."""
        own = self.transport.rank
        for rank, part in parts.items():
            values = tensor.sent if rank == own else self._spare[: tensor.numel]
            values.fill(0)
            try:
                finite = tensor.add(part, values, 1.0, self._out[: tensor.numel])
            except ValueError as error:
                self._fail(f"{self._of(rank)}, {tensor.name}: {error}")
                return
            if not finite:
                self._fail(_DIVERGED.format(rank), finite)
                return
            yield float(self.topology.weights[own, rank]), values

    def _of(self, rank: int) -> str:
        return f"rank {self.transport.rank}: the message of its neighbor {rank}"


def _aligned(part: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Bytes as numbers, in the same memory where that suits them."""
    return np.require(part.view(dtype), requirements="A")
