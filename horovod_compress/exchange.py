"""Drives the steps of one compression on one rank: encode, move, decode, and commit or roll back.

Of each tensor the host (Horovod's optimizer, or `simulate`) takes a carrier, sums or averages it over ranks as its user
asked, and brings it back. A dense payload is its own carrier. Any other payload travels beside a carrier that holds a
single 1: what came back, divided by the number of ranks, is the factor for the sum of the payloads, whatever the host's
op, scale factors or predivision are.
"""
import dataclasses
import inspect
import json
import logging
import math
import numbers
import time
import zlib

import numpy as np

from . import kernels, wire
from .compressors.base import Agree, Compressor, Dense, Gathered, Model, State, Step
from .handshake import MismatchError, first_difference

_log = logging.getLogger("horovod_compress")
_TRIES = 16  # of measured payloads that were too large: what trying again costs is at most one part in so many
_SENT = ("bytes_sent", "dense_bytes", "elements_sent")
_SPENT = ("bytes_received", "encode_seconds", "exchange_seconds", "decode_seconds")  # what tensors share is one of them's


@dataclasses.dataclass
class _Tensor:
    name: str
    shape: tuple
    compressor: Compressor
    state: State
    digest: int
    numel: int
    carrier: np.ndarray
    run: object = None  # the last step that it was in
    kept: dict = dataclasses.field(default_factory=dict)  # where steps can be discarded: the state's arrays before that step
    dense_until: int = 0  # the step from which on its payloads are gathered
    counters: dict = dataclasses.field(default_factory=lambda: dict.fromkeys(_SENT + _SPENT, 0))

    def one(self):
        """The carrier of a payload that travels beside it."""
        self.carrier[0] = 1
        return self.carrier

    def keep(self):
        """Copies what the state holds before a step."""
        self.compressor.settle(self.state)
        for key, array in self.state.arrays.items():
            np.copyto(self.kept.setdefault(key, np.empty_like(array)), array)

    def end_step(self, succeeded):
        """Commits what the step took out of the state, or puts it back, and forgets its gradient where the state was kept."""
        self.compressor.end_step(self.state, succeeded)
        if not succeeded:
            self.put_back()

    def rescale(self, factor):
        """Between steps: gradients, and so what is kept of them, will be `factor` times as large."""
        self.compressor.settle(self.state)
        for arrays in (self.state.arrays, self.kept):
            for key, array in arrays.items():
                array *= np.float32(factor ** self.compressor.degrees.get(key, 1))

    def put_back(self):
        """Makes the state what `keep` found."""
        self.compressor.settle(self.state)
        for key, array in self.kept.items():
            np.copyto(self.state.arrays[key], array)


@dataclasses.dataclass
class Run:
    """One step of the optimizer: gradients that are used together, or not at all."""

    number: int  # alike on all ranks
    tensors: dict = dataclasses.field(default_factory=dict)  # to commit or to roll back
    finite: bool = True
    beat: object = None  # with sums: waits for the ranks' numbers of this step; False once they were compared


@dataclasses.dataclass
class _Pending:
    tensor: _Tensor
    grad: np.ndarray
    run: Run
    step: Step
    carrier: np.ndarray = None
    encoding: object = None  # the generator, until it has returned its payload
    request: object = None  # what it yielded last
    payload: object = None
    wait: object = None  # waits for the transport; None where the carrier is the payload


class Exchange:
    """One rank's side of a compression.

    compressor: the configuration that is in force; tensors: {name: (shape, compressor)}, the compressor being this one or
    a variant (other momentum for another parameter group). The driver submits every tensor of a step before it finishes the
    first; a step ends when all that was submitted is finished. discardable: each step begins with a copy of the state, and one that is
    not finite, or discarded, leaves no trace in it; else such a step's gradients stay in residuals.
    """

    def __init__(self, compressor, transport, tensors, label="hvdc", discardable=False):
        self.compressor = compressor
        self.transport = transport
        self._label = label
        self._discardable = discardable
        self._tensors = {}
        self._model = Model()
        for name, (shape, variant) in tensors.items():
            self._know(name, shape, variant)
        self._now = Step(0, transport.rank, transport.size)
        self._run = self._latest = Run(0)  # where the next tensor goes; where the last one went
        self._open = {}  # submitted, not finished
        self._deferred = []  # with clipping: not encoded before all gradients are there
        self._encoding = []  # with rounds to go before they have a payload
        self._steps_ended = self._steps_undone = 0
        self._said_dense = False

    def _know(self, name, shape, variant):
        chosen = variant.for_tensor(name, shape)
        digest = zlib.crc32(json.dumps([repr(chosen), name, shape]).encode())
        state = chosen.init(name, shape)
        if type(chosen) is type(self.compressor):
            self._model.add(name, math.prod(shape))
            state.model = self._model
        self._tensors[name] = _Tensor(name, tuple(shape), chosen, state, digest, math.prod(shape), np.ones(1, np.float32))

    # -- a step ---------------------------------------------------------------------------------------------------------

    def submit(self, name, grad, squares=None, lr=None):
        """Takes a tensor's flat float32 gradient into the step; returns the carrier for the host to reduce, in place.

        squares, lr: where known, as in Step: the sums over this rank's samples of their squared gradients, and the learning rate
        of this step. grad's memory belongs to the exchange until `finish`. A tensor that is submitted again although its step
        was never finished abandons that step: what it took out of residuals goes back.
        """
        if self._run.tensors and (not self._open or name in self._run.tensors):
            self._end_step()
        step = self._now
        if squares is not None or lr is not None:
            step = dataclasses.replace(step, squares=squares, lr=lr)
        return self._begin(name, grad, self._run, step, deferred=self.compressor.clip_norm is not None).carrier

    def _begin(self, name, grad, run, step, deferred=False):
        if name not in self._tensors:
            raise ValueError(f"{name} is none of the tensors of this compression")
        tensor = self._tensors[name]
        if grad.dtype != np.float32 or grad.shape != (tensor.numel,):
            raise ValueError(f"{name}: expected {tensor.numel} float32 in one dimension, not {grad.shape} of {grad.dtype}")
        pending = self._open[name] = _Pending(tensor, grad, run, step)
        run.tensors[name] = tensor
        tensor.run = self._latest = run
        if self._discardable:
            tensor.keep()
        if deferred:
            pending.carrier = tensor.one()
            self._deferred.append(pending)
        else:
            self._start(pending)
        self._count(tensor, pending.carrier.nbytes)
        tensor.counters["dense_bytes"] += grad.nbytes
        return pending

    def flush(self, factor=1.0):
        """Encodes and starts what had to wait for the whole step; `finish` does so by itself. factor: what the host makes of a 1 on
        each rank: 1 where it averages, the number of ranks where it sums; clipping limits what comes out."""
        if self._deferred or self._encoding:
            for _ in self.rounds(factor):
                pass

    def rounds(self, factor=1.0):
        """`flush` by rounds, for a driver of several ranks: yields when it has started something, before it waits for it."""
        deferred, self._deferred = self._deferred, []
        if deferred:
            scale = self._clipping(factor**2 * sum(kernels.of(pending.grad).squared_norm(pending.grad) for pending in deferred))
            for pending in deferred:
                pending.step = dataclasses.replace(pending.step, scale=scale)
                self._start(pending)
        while self._encoding:
            waiting, self._encoding = self._encoding, []
            order = {name: i for i, name in enumerate(self._tensors)}  # one on all ranks
            asking = sorted((p for p in waiting if isinstance(p.request, Agree)), key=lambda p: order[p.tensor.name])
            yield from self._round(waiting, asking, f"{self._label}:agree")

    def _clipping(self, squared_norm):
        """What this rank's gradient is multiplied by, for independent gradients of N ranks to give a result of at most clip_norm.
        squared_norm: of factor · g, all tensors together; the result is 1/N of the sum of that, whose norm is √N times one rank's."""
        norm, limit = squared_norm**0.5, self.compressor.clip_norm * self.transport.size**0.5 * self._now.unit
        return limit / norm if limit < norm < float("inf") else 1.0

    def _round(self, waiting, asking, agreement):
        """Takes encodings to what they need next: yields before it waits for what they need now. asking: those of them that
        need a maximum; all of those are one message, of that name."""
        largest = None
        if asking:
            for pending in asking:
                self._count(pending.tensor, 4 * len(pending.request.numbers))
            self._tell_step(asking[0])
            together = np.array([number for pending in asking for number in pending.request.numbers], np.float32)
            largest = self.transport.allreduce(agreement, together, op="max")
        yield
        self._compare_steps(waiting[0])
        started = time.perf_counter()
        answers = {id(pending): pending.wait() for pending in waiting if pending.wait}
        if asking:
            together, at = largest().tolist(), 0
            for pending in asking:
                answers[id(pending)] = together[at : at + len(pending.request.numbers)]
                at += len(pending.request.numbers)
        waiting[0].tensor.counters["exchange_seconds"] += time.perf_counter() - started
        started = time.perf_counter()
        for pending in waiting:
            self._resume(pending, answers[id(pending)])
        waiting[0].tensor.counters["encode_seconds"] += time.perf_counter() - started

    def finish(self, name, reduced):
        """Leaves the step's result in the memory of the gradient that was submitted. reduced: the carrier as the host
        brought it back. A result that is not finite on some rank is not finite on all of them."""
        self.flush(float(reduced[0]) if self._deferred else 1.0)  # the carrier of what is deferred is a single 1
        pending = self._open[name]
        tensor, grad, payload = pending.tensor, pending.grad, pending.payload
        started = time.perf_counter()
        scale, arrived = 1.0, None
        if pending.wait is not None:
            self._compare_steps(pending)
            scale, arrived = float(reduced[0]) / self.transport.size, pending.wait()
            tensor.counters["exchange_seconds"] += time.perf_counter() - started
            started = time.perf_counter()
        if isinstance(payload, Gathered):
            finite = self._add(pending, arrived, scale)
        else:
            payload.array = reduced if arrived is None else arrived
            finite = tensor.compressor.decode(payload, grad, tensor.state, scale)
        if not finite:
            pending.run.finite = False
        del self._open[name]
        tensor.counters["decode_seconds"] += time.perf_counter() - started

    def _start(self, pending):
        started = time.perf_counter()
        tensor = pending.tensor
        encode = tensor.compressor.encode_dense if self._goes_dense(tensor, pending.step) else tensor.compressor.encode
        encoded = encode(pending.grad, tensor.state, pending.step)
        if inspect.isgenerator(encoded):
            pending.encoding = encoded
            if pending.carrier is None:
                pending.carrier = pending.tensor.one()
            self._resume(pending, None)  # up to its first request
        else:
            self._send(pending, encoded)
        pending.tensor.counters["encode_seconds"] += time.perf_counter() - started

    def _goes_dense(self, tensor, step):
        """Whether gathering this step's payloads would bring a rank more than a ring allreduce of the tensor does: by what the
        compressor knows beforehand, or by what its last gathered payloads were. Alike on all ranks."""
        bits = tensor.compressor.payload_bits(step)
        dense = step.index < tensor.dense_until if bits is None else times_dense(bits, step.size) > 1
        if dense and not self._said_dense:
            self._said_dense = True
            if self.transport.rank == 0:
                _log.warning(
                    "%s: at step %d gathering %s from %d ranks would move more than a dense exchange does: it goes dense, and so do "
                    "other tensors wherever that is so", self.compressor.id, step.index, tensor.name, step.size,
                )
        return dense

    def _resume(self, pending, answer):
        """Lets an encoding go on to what it needs next, or to its payload."""
        pending.wait = None
        try:
            pending.request = pending.encoding.send(answer)
        except StopIteration as stop:
            pending.encoding = pending.request = None
            self._send(pending, stop.value)
        else:
            self._goes_on(pending)
            if not isinstance(pending.request, Agree):
                pending.wait = self._sum(pending, pending.request.array, ".round")

    def _goes_on(self, pending):
        self._encoding.append(pending)

    def _send(self, pending, payload):
        tensor = pending.tensor
        pending.payload = payload
        if pending.carrier is None:  # a deferred tensor's may have been reduced by now
            pending.carrier = payload.array if isinstance(payload, Dense) else tensor.one()
        if isinstance(payload, Gathered):
            frame = wire.seal(payload, tensor.compressor.number, tensor.digest, pending.step.index)
            self._count(tensor, len(frame), -len(frame))
            tensor.counters["elements_sent"] += payload.elements
            pending.wait = self.transport.allgather(f"{self._label}.{tensor.name}", frame)
        else:
            tensor.counters["elements_sent"] += tensor.numel
            if payload.array is not pending.carrier:
                pending.wait = self._sum(pending, payload.array)

    def _add(self, pending, arrived, scale):
        """Decodes the gathered payloads of all ranks into the gradient's memory, in rank order on every rank."""
        tensor, grad = pending.tensor, pending.grad
        tensor.counters["bytes_received"] += len(arrived)
        bodies, finite = wire.unseal(
            arrived, self.transport.size, tensor.compressor.number, tensor.digest, pending.step.index
        )
        if bodies and grad.size and tensor.compressor.payload_bits(pending.step) is None:
            bits = 8 * sum(map(len, bodies)) / len(bodies) / grad.size
            times = times_dense(bits, self.transport.size)
            if times > 1:
                tensor.dense_until = pending.step.index + 1 + math.ceil(_TRIES * times)
        if not finite:
            grad.fill(np.nan)
        for rank, body in enumerate(bodies if finite else ()):
            try:
                finite &= tensor.compressor.add(body, grad, scale)
            except ValueError as error:
                raise wire.WireError(f"payload of rank {rank}: {error}") from None
        return finite

    def _sum(self, pending, array, suffix=""):
        self._tell_step(pending)
        self._count(pending.tensor, array.nbytes)
        return self.transport.allreduce(f"{self._label}.{pending.tensor.name}{suffix}", array)

    def _tell_step(self, pending):
        """Once a step with sums, before the first of them, starts a sum of its number: frames carry theirs, sums cannot."""
        run = pending.run
        if run.beat is None:
            powers = np.array([1, run.number, run.number * run.number], np.int64)
            self._count(pending.tensor, powers.nbytes)
            run.beat = self.transport.allreduce(f"{self._label}:step", powers)

    def _compare_steps(self, pending):
        run = pending.run
        if not run.beat:
            return
        (ranks, total, squares), run.beat = run.beat().tolist(), False
        if ranks != self.transport.size:
            raise RuntimeError(
                f"{self.transport.size - ranks} of {self.transport.size} ranks have called hvd.join(), or are gone, and sums of this compression "
                "are wrong without them: let every rank take the same number of steps, or use none or fp16"
            )
        if ranks * squares != total * total:  # equal numbers, and only those, have no variance
            raise MismatchError(
                f"this rank is at step {run.number}, others are not: was a state loaded, or did training begin, on some ranks only?"
            )

    def _end_step(self):
        succeeded = self._run.finite and not self._open
        for tensor in self._run.tensors.values():
            tensor.end_step(succeeded)
        self._run.finite = succeeded
        self._run.tensors.clear()
        self._steps_ended += 1
        self._steps_undone += not succeeded
        self._now = dataclasses.replace(self._now, index=self._now.index + 1)
        self._run = Run(self._now.index)
        self._open.clear()
        self._deferred.clear()
        self._encoding.clear()

    def reject(self):
        """The host could not use a result of this step, on all ranks alike: the step will be rolled back."""
        self._run.finite = False

    def is_open(self, name):
        """Whether this tensor is submitted and not finished."""
        return name in self._open

    @property
    def under_way(self):
        """Whether something is submitted and not finished."""
        return bool(self._open)

    @property
    def succeeded(self):
        """Whether the last step, which is not under way, brought a result that counts."""
        return self._latest.finite

    def discard(self):
        """Forgets the last step, on all ranks alike: its result is not used. RuntimeError where steps are not discardable, and in
        the middle of one."""
        if not self._discardable:
            raise RuntimeError("only a compression that was made with discardable=True can forget a step")
        self._refuse_if_under_way()
        run = self._latest
        ended, succeeded, run.finite = not run.tensors, run.finite, False
        self.settle()
        in_it = [tensor for tensor in self._tensors.values() if tensor.run is run]
        if ended and succeeded and in_it:
            self._steps_undone += 1
            for tensor in in_it:
                tensor.put_back()

    def rescale(self, unit):
        """From the next step on, gradients come times `unit`, a loss scale; brings what is kept of earlier ones to it."""
        if unit == self._now.unit:
            return
        self.settle()
        for tensor in self._tensors.values():
            tensor.rescale(unit / self._now.unit)
        self._now = dataclasses.replace(self._now, unit=unit)

    # -- between steps --------------------------------------------------------------------------------------------------

    def _refuse_if_under_way(self):
        if self._open:
            raise RuntimeError(
                f"a step is under way ({', '.join(list(self._open)[:3])} … not finished): ask between optimizer.step() and "
                "the next backward()"
            )

    def settle(self):
        """Ends the last step where that has not happened yet. RuntimeError in the middle of one."""
        self._refuse_if_under_way()
        if self._run.tensors:
            self._end_step()

    def replace(self, name, **options):
        """Changes options of one tensor's compressor between steps (a momentum that a scheduler has changed)."""
        tensor = self._tensors[name]
        tensor.compressor = dataclasses.replace(tensor.compressor, **options)

    @property
    def keeps_state(self):
        """Whether anything of a gradient is kept for later steps."""
        return any(tensor.state.arrays for tensor in self._tensors.values())

    def arrays(self):
        """{name: {array name: array}}: the state itself, not a copy."""
        self.settle()
        for tensor in self._tensors.values():
            tensor.compressor.settle(tensor.state)
        return {name: tensor.state.arrays for name, tensor in self._tensors.items()}

    def state_dict(self):
        """This rank's state as plain values and copied arrays, without the loss scale."""
        tensors = {name: {k: a / self._unit_of(name, k) for k, a in arrays.items()} for name, arrays in self.arrays().items()}
        return {
            "format": 1,
            "id": self.compressor.id,
            "rank": self.transport.rank,
            "size": self.transport.size,
            "seed": self.compressor.seed,
            "step": self._now.index,
            "dense_until": {name: tensor.dense_until for name, tensor in self._tensors.items()},
            "tensors": tensors,
        }

    def load_state_dict(self, state):
        """Continues from a state_dict of the same rank, size and model. ValueError, and nothing changed, for any other."""
        arrays, step = self._checked(state)
        self._restore(self.arrays(), arrays)
        for name, tensor in self._tensors.items():
            tensor.dense_until = dense_until(state, name)
        self._now = dataclasses.replace(self._now, index=step)
        self._run = self._latest = Run(step)

    def _restore(self, own, arrays):
        refuse(first_difference(_layout(own), _layout(arrays)))
        for name, named in own.items():
            for key, array in named.items():
                np.multiply(arrays[name][key], self._unit_of(name, key), out=array)

    def _unit_of(self, name, key):
        """What a 1 in this array of the state stands as, under the loss scale."""
        return np.float32(self._now.unit ** self._tensors[name].compressor.degrees.get(key, 1))

    def _checked(self, state):
        """(arrays by tensor, steps taken) of a state. ValueError for one of another rank, size, algorithm or seed."""
        expected = {
            "format": 1, "id": self.compressor.id, "rank": self.transport.rank, "size": self.transport.size,
            "seed": self.compressor.seed,
        }
        try:
            found = {key: state[key] for key in expected}
            arrays = {n: {k: np.asarray(a) for k, a in named.items()} for n, named in state["tensors"].items()}
            step = state["step"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a state_dict of a compression: {error!r}") from None
        refuse(first_difference(expected, found) or self._wrong_step(step) or _wrong_dense_until(state))
        return arrays, step

    def _wrong_step(self, step):
        return None if is_count(step) else ("step", "a whole number", step)

    def stats(self):
        """Totals of this rank since the start, by name:

        steps; steps_undone: not finite, or abandoned; bytes_sent, bytes_received: by this rank through collectives,
        carriers and frames included; dense_bytes: float32 of all gradients; ratio: dense_bytes / bytes_sent;
        elements_sent; encode_seconds, exchange_seconds (waiting), decode_seconds; residual_norm: ‖v‖₂ over all tensors,
        now (in the middle of a step, what was just sent may be in it); overflows: how often a tensor had finite elements
        that became infinite in float16.
        """
        if not self._open:
            self.settle()
        squares = 0.0
        for tensor in self._tensors.values():
            if not self._open:
                tensor.compressor.settle(tensor.state)
            residual = tensor.compressor.residual(tensor.state)
            if residual is not None:
                squares += kernels.of(residual).squared_norm(residual)
        counters = {"steps": self._steps_ended, "steps_undone": self._steps_undone}
        for key in (*_SENT, *_SPENT):
            counters[key] = sum(tensor.counters[key] for tensor in self._tensors.values())
        counters["ratio"] = counters["dense_bytes"] / counters["bytes_sent"] if counters["bytes_sent"] else 1.0
        counters["residual_norm"] = squares**0.5 / self._now.unit
        counters["overflows"] = sum(tensor.state.overflows for tensor in self._tensors.values())
        return counters

    def stats_by_tensor(self):
        """{name: {"bytes_sent", "dense_bytes", "elements_sent"}} of each tensor: totals since the start, as in `stats`."""
        return {name: {key: tensor.counters[key] for key in _SENT} for name, tensor in self._tensors.items()}

    def _count(self, tensor, sent, received=None):
        """Counts bytes that go into a collective; an allreduce brings as many back, an allgather more."""
        tensor.counters["bytes_sent"] += sent
        tensor.counters["bytes_received"] += sent if received is None else received


def times_dense(bits, size):
    """How many times what a ring allreduce of float32 brings a rank, 2·(N−1)/N·32 bits an element, it gets from an allgather of
    payloads of `bits` an element, (N−1)·bits."""
    return size * bits / 64


def dense_until(state, name):
    """The step in a state_dict until which a tensor goes dense; files of before that have none."""
    return state.get("dense_until", {}).get(name, 0)


def _wrong_dense_until(state):
    until = state.get("dense_until", {})
    good = isinstance(until, dict) and all(map(is_count, until.values()))
    return None if good else ("dense_until", "steps by tensor", until)


def _layout(arrays):
    return {name: {k: f"{a.dtype} of {a.shape}" for k, a in named.items()} for name, named in arrays.items()}


def is_count(number):
    """Whether this is a whole number of steps."""
    return isinstance(number, numbers.Integral) and number >= 0


def refuse(difference):
    """Raises ValueError for a difference between a state and what it is loaded into."""
    if difference:
        where, mine, its = difference
        raise ValueError(
            f"this state does not fit: {where} is {its} in it and {mine} here. A compression's state belongs to one rank: "
            "save and load one file a rank, at the same number of ranks and with the same model"
        )
