"""One group's step on one rank, from gradients to results, without input or output (sans I/O).

`group_step` is a generator: it yields requests, is sent their results, and never waits. It frames
payloads, scales results, counts bytes, and commits what the step took out of states or rolls it
back, as on all ranks where a gradient has a NaN on one. Drivers only pump it.
"""

import functools
import itertools
from types import GeneratorType
from typing import Any, Generator, Iterable, List, Sequence, Tuple

import numpy as np

from ..compressors.base import Asking, Compressor, Step, with_fields
from ..compressors.pairs import for_each
from ..compressors.wrapper import Wrapper
from ..kernels import HEADROOM, Encoded, Late, beside
from ..protocol import wire
from ..protocol.requests import Allgather, Allreduce, Final, Joint, Outcome, StepNorm, ToReducer
from .contract import check_payloads, check_request
from .dense_policy import note_sizes
from .feature import Feature
from .group import Group, digest_of
from .tensor import Tensor

# Yields Requests; what it is sent depends on each.
GroupStep = Generator[Any, Any, None]


def group_step(
    group: Group,
    tensors: Sequence[Tensor],
    grads: Sequence[np.ndarray],
    steps: Sequence[Step],
    features: Sequence[Feature],
) -> GroupStep:
    """The step of a group: yields requests, is sent their results, and decodes results into
    `grads`, flat float32. `Outcome` says whether they are finite.

    Closed before its Outcome is answered, or where it raises, the step is rolled back. WireError
    for payloads that are not what this rank expects.

    Args:
        group: in whose step these come.
        tensors: those of the group that are in this step, alike on all ranks.
        grads: their gradients.
        steps: what is known of each.
        features: those that the step concerns, the innermost first.
    """
    steps = begin(tensors, grads, steps, features)
    succeeded = False
    try:
        bases, steps = subtract_bases(group.compressor, grads, steps)
        step = steps[0]
        if step.clip_norm is not None:
            factor = clipping(step, (yield StepNorm(grads)))
            steps = with_fields(steps, scale=step.scale * factor)
        states = [tensor.state for tensor in tensors]
        alike = group.follow(tensors, grads)
        payloads = _call(
            tensors, alike, "encode_dense" if step.dense else "encode", grads, states, steps
        )
        if isinstance(payloads, GeneratorType):
            payloads = yield from _rounds(group, tensors, payloads, step.size)
        while isinstance(payloads, Late):
            payloads = yield payloads
        if isinstance(payloads, (list, tuple)):
            for feature in features:
                feature.encoded(tensors, payloads)
            finite = yield from _exchange(group, tensors, payloads, grads, steps, alike)
        else:
            finite = yield from _gather_there(group, tensors, payloads, grads, step)
        _add_bases(bases)
        for feature in features:
            finite = feature.decoded(tensors, grads, finite)
        outcome = [Outcome(finite)]
        # The answer comes with the next step: until then these would stay in memory.
        del grads, bases, steps, step, payloads, states
        yield outcome.pop()
        succeeded = True
    finally:
        end_steps(tensors, succeeded)
        for feature in features:
            feature.ended(tensors, succeeded)


def begin(
    tensors: Sequence[Tensor],
    grads: Sequence[np.ndarray],
    steps: Sequence[Step],
    features: Sequence[Feature],
) -> Sequence[Step]:
    """Begins the steps of tensors in all features. Returns what is to be known of each."""
    for feature in reversed(features):
        steps = feature.begin(tensors, grads, steps)
    compressor = tensors[0].compressor
    if steps[0].dense and compressor.traits.ignores_size and not compressor.roles:
        # What comes are gradients, which have not lost their size, nor are there in true units.
        return with_fields(steps, gain=1.0)
    return steps


def end_steps(tensors: Iterable[Any], succeeded: bool) -> None:
    """Ends the open steps of tensors: by `commit` or `rollback`, or after a dense step that
    succeeded by `forget_sent`."""
    for tensor in tensors:
        compressor, state = tensor.compressor, tensor.state
        if state.all_sent:
            if succeeded:
                compressor.forget_sent(state)
        elif not succeeded:
            compressor.rollback(state)
        # Most have nothing to do.
        elif type(compressor).commit is not Compressor.commit:
            compressor.commit(state)
        if state.rollbacks:
            state.rollbacks = []
        state.undo, state.sent, state.all_sent = (), None, False


def end_step(step: GroupStep, succeeded: bool) -> None:
    """Ends a group's step: goes on after its Outcome, or where it has not succeeded or not come
    that far, rolls it back."""
    if succeeded:
        next(step, None)
    else:
        step.close()


# Of tensors: the gradient's memory, and what the result is to be added to.
Bases = List[Tuple[np.ndarray, np.ndarray]]


def subtract_bases(
    compressor: Compressor, grads: Sequence[np.ndarray], steps: Sequence[Step]
) -> Tuple[Bases, Sequence[Step]]:
    """Subtracts from gradients what they count from, where the compressor does not do so. Returns
    what is to be added to results, and the steps without bases then."""
    bases = [(grad, step.base) for grad, step in zip(grads, steps) if step.base is not None]
    if not bases or compressor.traits.takes_base and not steps[0].dense:
        return [], steps
    for grad, base in bases:
        grad -= base
    return bases, with_fields(steps, base=None)


def _add_bases(bases: Bases) -> None:
    for grad, base in bases:
        grad += base


def _rounds(
    group: Group, tensors: Sequence[Tensor], encoding: Asking[List[Any]], size: int
) -> Asking[List[Any]]:
    """Yields what a compressor asks for before it has its payloads, counted and joined; returns the
    payloads."""
    answers: Any = None
    try:
        while True:
            requests = encoding.send(answers)
            # A tensor that asks no more has None.
            asking = [i for i, request in enumerate(requests) if request is not None]
            for i in asking:
                check_request(group, requests[i], size)
                tensors[i].count(requests[i])
            found = yield from _joined([requests[i] for i in asking])
            answers = [None] * len(requests)
            for i, answer in zip(asking, found):
                answers[i] = answer
    except StopIteration as stop:
        return stop.value
    finally:
        encoding.close()


def _joined(requests: List[Any]) -> Asking[List[Any]]:
    """Yields the requests of a round, sums or maxima of one type as one; returns their answers."""
    kinds = {(each.verb, each.op, each.array.dtype) for each in requests}
    if len(requests) == 1 or len(kinds) > 1 or requests[0].verb != "allreduce":
        return (yield requests)
    arrays = [each.array for each in requests]
    (answer,) = yield [_sum_of(arrays, requests[0].op)]
    return _parts_of(answer, arrays)


def _sum_of(arrays: Sequence[np.ndarray], op: str = "sum") -> Allreduce:
    """The sum of several arrays, one behind the other."""
    return Allreduce(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), op)


def _parts_of(summed: np.ndarray, arrays: Sequence[np.ndarray]) -> List[np.ndarray]:
    """The parts of a sum that are of these arrays."""
    ends = itertools.accumulate([each.size for each in arrays])
    return [summed[end - each.size : end] for end, each in zip(ends, arrays)]


def _count(tensors: Sequence[Tensor], grads: Sequence[np.ndarray], payloads: Sequence[Any]) -> None:
    """Counts what a step sends, beside the requests that were answered before."""
    for tensor, grad, payload in zip(tensors, grads, payloads):
        counters = tensor.counters
        counters["dense_bytes"] += grad.nbytes
        sent = None if isinstance(payload, ToReducer) else payload.elements
        counters["elements_sent"] += tensor.numel if sent is None else sent


def _final(group: Group, tensors: Sequence[Tensor], payloads: Sequence[Any], step: Step) -> Final:
    """The request that moves payloads, counted where their bytes are known."""
    first = payloads[0]
    if isinstance(first, Joint):
        for tensor, payload in zip(tensors, payloads):
            payload.digest = tensor.digest
        return Final(list(payloads))
    if isinstance(first, Encoded):
        frame = wire.seal(
            payloads,
            group.compressor.traits.number,
            digest_of(tensors),
            step.index,
            step.rank,
            group.frame_length,
        )
        # A frame's header, table and padding count with the first.
        rest = len(frame)
        for tensor, payload in zip(tensors, payloads):
            length = len(payload.buffer) - HEADROOM - 1
            rest -= length
            tensor.counters["bytes_sent"] += length
            tensor.counters["bytes_received"] -= length
        tensors[0].counters["bytes_sent"] += rest
        tensors[0].counters["bytes_received"] -= rest
        return Final(Allgather(frame))
    arrays = [payload.array for payload in payloads]
    for tensor, array in zip(tensors, arrays):
        tensor.counters["bytes_sent"] += array.nbytes
        tensor.counters["bytes_received"] += array.nbytes
    return Final(_sum_of(arrays))


def _exchange(
    group: Group,
    tensors: Sequence[Tensor],
    payloads: Sequence[Any],
    grads: Sequence[np.ndarray],
    steps: Sequence[Step],
    alike: bool,
) -> Asking[Sequence[bool]]:
    """Exchanges payloads, and decodes into the gradients' memory. Returns of each result whether it
    is finite."""
    if not group.checked:
        check_payloads(group, payloads, grads, steps)
    _count(tensors, grads, payloads)
    factor, arrived = yield _final(group, tensors, payloads, steps[0])
    return _decode(group, tensors, payloads, grads, steps, factor, arrived, alike)


def _gather_there(
    group: Group, tensors: Sequence[Tensor], frame: Any, grads: Sequence[Any], step: Step
) -> Asking[Sequence[bool]]:
    """Exchanges a group's frame that stays on its device, and adds those of all ranks into the
    gradients' memory. Returns of each result whether it is finite, late."""
    number, digest = group.compressor.traits.number, digest_of(tensors)
    sealed = frame.sealed(wire.head(number, digest, step.index, step.rank))
    # An index and a value; the head and the facts count with the first.
    lengths = [8 * room for room in frame.rooms]
    lengths[0] += sealed.nbytes - sum(lengths)
    for tensor, grad, room, length in zip(tensors, grads, frame.rooms, lengths):
        counters = tensor.counters
        counters["dense_bytes"] += grad.nbytes
        counters["elements_sent"] += room
        counters["bytes_sent"] += length
        counters["bytes_received"] += (step.size - 1) * length
    factor, arrived = yield Final(Allgather(sealed))
    scale = step.gain * factor / step.size
    check = functools.partial(wire.check_heads, number=number, digest=digest, step=step.index)
    return frame.add(arrived, grads, step.rank, scale, check)


def _decode(
    group: Group,
    tensors: Sequence[Tensor],
    payloads: Sequence[Any],
    grads: Sequence[np.ndarray],
    steps: Sequence[Step],
    factor: float,
    arrived: Any,
    alike: bool,
) -> Sequence[bool]:
    """Decodes what became of payloads into the gradients' memory. factor: what the reducer made of
    a 1. Returns of each result whether it is finite."""
    step, first = steps[0], payloads[0]
    scale = step.gain * factor / step.size
    if isinstance(first, Encoded):
        return _add_payloads(group, tensors, arrived, grads, step, scale, alike)
    states = [tensor.state for tensor in tensors]
    if not isinstance(first, Joint):
        arrived = _parts_of(arrived, [payload.array for payload in payloads])
    if isinstance(first, ToReducer):
        arrived = [beside(each, grad) for each, grad in zip(arrived, grads)]
        return _call(tensors, alike, "decode_dense", arrived, grads, states, scale)
    return _call(tensors, alike, "decode", arrived, grads, states, steps, scale)


def _add_payloads(
    group: Group,
    tensors: Sequence[Tensor],
    arrived: np.ndarray,
    grads: Sequence[np.ndarray],
    step: Step,
    scale: float,
    alike: bool,
) -> Sequence[bool]:
    """Decodes the gathered payloads of all ranks into the gradients' memory, in rank order on every
    rank."""
    number = group.compressor.traits.number
    bodies, finite = wire.unseal(
        arrived, step.size, len(tensors), number, digest_of(tensors), step.index
    )
    lengths = [sum(map(len, its)) for its in zip(*bodies)]
    for tensor, length in zip(tensors, lengths):
        tensor.counters["bytes_received"] += length
    tensors[0].counters["bytes_received"] += len(arrived) - sum(lengths)
    if group.measured:
        note_sizes(tensors, lengths, step)
    # To a tensor that is not finite on some rank nothing is added.
    good = list(itertools.compress(range(len(tensors)), finite))
    for i, is_finite in enumerate(finite):
        if not is_finite:
            grads[i].fill(np.nan)
    adding, outs = [tensors[i] for i in good], [grads[i] for i in good]
    added: List[Sequence[bool]] = []
    for rank, its in enumerate(bodies if good else ()):
        parts = [
            tensor.compressor.part(out, rank) if isinstance(tensor.compressor, Wrapper) else out
            for tensor, out in zip(adding, outs)
        ]
        try:
            added.append(_call(adding, alike, "add", [its[i] for i in good], parts, scale))
        except ValueError as error:
            raise wire.WireError(f"payload of rank {rank}: {error}") from None

    def counted(sums: Sequence[Sequence[bool]]) -> List[bool]:
        for which in sums:
            for i, is_finite in zip(good, which):
                finite[i] &= is_finite
        return finite

    late = any([isinstance(which, Late) for which in added])
    return Late(lambda: counted(added)) if late else counted(added)


def _call(tensors: Sequence[Tensor], alike: bool, method: str, *arguments: Any) -> Any:
    """Calls a compressor's method for a group (encode_all, decode_all, …), or where tensors are not
    alike, that of one tensor for each."""
    if alike:
        return getattr(tensors[0].compressor, f"{method}_all")(*arguments)
    return for_each([getattr(tensor.compressor, method) for tensor in tensors], *arguments)


def clipping(step: Step, squared_norm: float) -> float:
    """The factor of this rank's gradient beside its scale, for independent gradients of N
    ranks to give a result of at most clip_norm: the result is 1/N of the sum over ranks, whose norm
    is √N times one rank's."""
    norm, limit = squared_norm**0.5 * step.scale, step.clip_norm * step.size**0.5
    return limit / norm if limit < norm < float("inf") else 1.0
