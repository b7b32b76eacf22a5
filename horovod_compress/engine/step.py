"""One tensor's step on one rank, from its gradient to the result, without input or output (sans
I/O).

`tensor_step` is a generator: it yields requests, is sent their results, and never waits. It frames
payloads, scales results, counts bytes, and commits what the step took out of the state or rolls it
back, as on all ranks where a gradient has a NaN on one. Drivers only pump it: `exchange.Exchange`
(eager), the TensorFlow adapter's graph, and `lockstep`, N ranks in one process.
"""

import dataclasses
from types import GeneratorType
from typing import Any, Generator, Optional, Tuple, Union

import numpy as np

from ..compressors.base import Asking, Compressor, Step
from ..compressors.state import State
from ..compressors.wrapper import Wrapper
from ..kernels import DeviceCall, Encoded, beside
from ..protocol import wire
from ..protocol.requests import (
    FLOAT32,
    Allgather,
    Allreduce,
    Alltoall,
    Collective,
    Exchanged,
    Final,
    Joint,
    Outcome,
    Payload,
    StepNorm,
    TensorStep,
    ToReducer,
)
from .dense_policy import note_size
from .extension import with_each
from .tensor import Tensor

_NOTHING_MORE = Final(None)
_PAYLOADS = (ToReducer, Allreduce, Encoded, Joint)


def tensor_step(tensor: Tensor, grad: np.ndarray, step: Step) -> TensorStep:
    """The step of one tensor: yields requests, is sent their results, and decodes the result into
    `grad`, flat float32, or where the gradient itself was the payload into what the reducer brought
    back; `Outcome` says where.

    Closed before its Outcome is answered, or where it raises, the step is rolled back. WireError
    for payloads that are not what this rank expects.
    """
    compressor, state = tensor.compressor, tensor.state
    tensor.counters["dense_bytes"] += grad.nbytes
    base = step.base
    if base is not None:
        step, base = _subtract_base(compressor, base, grad, step)
    succeeded = False
    try:
        # For the reducer, which has to have it before ranks agree on anything.
        carrier = None
        if step.clip_norm is not None:
            one = tensor.one()
            squared_norm, handed_over = yield StepNorm(grad, one)
            step = dataclasses.replace(step, scale=step.scale * _clipping(step, squared_norm))
            carrier = one if handed_over else None
        elif not step.dense and tensor.waits(grad):
            # It encodes when all small tensors are there. The reducer has its carrier now.
            carrier = tensor.one()
            yield carrier
        encode = compressor.encode_dense if step.dense else compressor.encode
        encoded = encode(grad, state, step)
        if carrier is None:
            carrier = encoded if isinstance(encoded, ToReducer) else tensor.one()
            yield carrier
        tensor.count(carrier)
        payload = (
            encoded
            if isinstance(encoded, _PAYLOADS)
            else (yield from _rounds(tensor, encoded, step.size))
        )
        final = (
            _NOTHING_MORE
            if payload is carrier
            else Final(_last_request(tensor, payload, grad, step))
        )
        if not tensor.checked:
            _check(tensor, payload, grad, step)
        sent = None if isinstance(payload, ToReducer) else payload.elements
        tensor.counters["elements_sent"] += tensor.numel if sent is None else sent
        reduced, arrived = yield final
        result, finite = _decode(tensor, payload, grad, step, reduced, arrived)
        # Gathered payloads, and kernels on a device, are decoded by a generator.
        if isinstance(finite, GeneratorType):
            finite = yield from finite
        if base is not None:
            result += base
        outcome = [Outcome(result, finite)]
        # The answer comes with the next step: until then these would stay in memory.
        del grad, base, step, encoded, payload, carrier, final, reduced, arrived, result, finite
        yield outcome.pop()
        succeeded = True
    finally:
        end_step(compressor, state, succeeded)


def end_step(compressor: Compressor, state: State, succeeded: bool) -> None:
    """Ends the open step: by `commit` or `rollback`, or after a dense step that succeeded by
    `forget_sent`."""
    if not state.all_sent:
        (compressor.commit if succeeded else compressor.rollback)(state)
    elif succeeded:
        compressor.forget_sent(state)
    state.rollbacks, state.sent, state.all_sent = [], None, False


def _subtract_base(
    compressor: Compressor, base: np.ndarray, grad: np.ndarray, step: Step
) -> Tuple[Step, Optional[np.ndarray]]:
    """Where the compressor does not do so, subtracts from the gradient what it counts from. Returns
    the step, without a base then, and what is to be added to the result."""
    if compressor.traits.takes_base and not step.dense:
        return step, None
    grad -= base
    return dataclasses.replace(step, base=None), base


def commit_or_rollback(step: TensorStep, succeeded: bool) -> None:
    """Ends a tensor's step: goes on after its Outcome, or where it has not succeeded or not come
    that far, rolls it back."""
    if succeeded:
        next(step, None)
    else:
        step.close()


def _rounds(
    tensor: Tensor, encoding: Any, size: int
) -> Generator[Union[Exchanged, DeviceCall], Any, Payload]:
    """Yields what a compressor asks for before it has its payload, counted; returns the payload.
    TypeError for what is neither."""

    def look(request: Any) -> None:
        if not isinstance(request, DeviceCall):
            _check_request(tensor, request, size)
            tensor.count(request)

    if isinstance(encoding, GeneratorType):
        encoding = yield from with_each(encoding, look)
    if not isinstance(encoding, _PAYLOADS):
        raise TypeError(
            f"{tensor.compressor.id}: encode returns Encoded, Allreduce or ToReducer, not an "
            f"object of {type(encoding)}"
        )
    return encoding


def _check_request(tensor: Tensor, request: Any, size: int) -> None:
    """TypeError or ValueError for a request that a compressor may not make before its payload."""
    if not isinstance(request, (Allreduce, Allgather, Alltoall)):
        raise TypeError(
            f"{tensor.compressor.id}: encode yields Allreduce, Allgather or Alltoall, not an "
            f"object of {type(request)}"
        )
    if not tensor.checked and request.collective not in tensor.declared:
        raise ValueError(
            f"{tensor.compressor.id}: encode yields {request.collective}, and `collectives` "
            f"declares {tensor.declared}"
        )
    if isinstance(request, Alltoall) and (
        len(request.splits) != size
        or min(request.splits) < 0
        or sum(request.splits) != request.array.size
    ):
        raise ValueError(
            f"{tensor.compressor.id}: an alltoall of {request.array.size} bytes on {size} "
            f"ranks needs {size} splits that add up to those, "
            f"not {list(request.splits)}"
        )


def _check(tensor: Tensor, payload: Payload, grad: np.ndarray, step: Step) -> None:
    """Raises ValueError where a tensor's first payload is not what its compressor has declared, or
    what all ranks can add to."""
    tensor.checked = True
    found = Collective("allgather", "uint8") if isinstance(payload, Encoded) else payload.collective
    if found != tensor.declared[-1] and not isinstance(payload, (ToReducer, Joint)):
        raise ValueError(
            f"{tensor.compressor.id}: encode returns {found}, and `collectives` declares "
            f"{tensor.declared}"
        )
    if (
        isinstance(payload, (Encoded, Joint))
        and payload.finite
        and (grad.any() if step.base is None else (grad != step.base).any())
    ):
        raise ValueError(
            f"{tensor.compressor.id}: encode must leave the gradient zero, because payloads are "
            f"added to it"
        )


def _last_request(
    tensor: Tensor, payload: Payload, grad: np.ndarray, step: Step
) -> Union[Allreduce, Allgather, Joint]:
    """What moves a payload that is not the carrier, counted where its bytes are known."""
    request: Union[Allreduce, Allgather]
    if isinstance(payload, Joint):
        payload.digest = tensor.digest
        return payload
    if isinstance(payload, Encoded):
        request = Allgather(
            wire.seal(
                payload,
                tensor.compressor.traits.number,
                tensor.digest,
                step.index,
                step.rank,
                wire.exact if tensor.joins else tensor.frame_length,
            )
        )
    else:
        # Transports move what is on the CPU.
        request = (
            payload if isinstance(payload, Allreduce) else Allreduce(np.asarray(payload.array))
        )
    tensor.count(request)
    return request


def _decode(
    tensor: Tensor,
    payload: Payload,
    grad: np.ndarray,
    step: Step,
    reduced: np.ndarray,
    arrived: Any,
) -> Tuple[np.ndarray, Any]:
    """Decodes what the reducer made of the carrier, and what became of the payload where that is
    not the carrier itself. Returns the memory of the result, and whether that is finite, or a
    generator that returns so."""
    compressor, scale = tensor.compressor, step.gain
    if arrived is not None:
        scale *= float(reduced[0]) / step.size
    if isinstance(payload, Encoded):
        return grad, _add_payloads(tensor, arrived, grad, step, scale)
    if not isinstance(payload, ToReducer):
        return grad, compressor.decode(arrived, grad, tensor.state, step, scale)
    summed = reduced if arrived is None else beside(arrived, grad)
    result = summed if summed.dtype == FLOAT32 else grad
    return result, compressor.decode_dense(summed, result, tensor.state, scale)


def _add_payloads(
    tensor: Tensor, arrived: np.ndarray, grad: np.ndarray, step: Step, scale: float
) -> Asking[bool]:
    """Decodes the gathered payloads of all ranks into the gradient's memory, in rank order on every
    rank."""
    compressor = tensor.compressor
    tensor.counters["bytes_received"] += len(arrived)
    bodies, finite = wire.unseal(
        arrived, step.size, compressor.traits.number, tensor.digest, step.index
    )
    if tensor.bits is None and bodies and grad.size:
        note_size(tensor, 8 * sum(map(len, bodies)) / len(bodies) / grad.size, step)
    if not finite:
        grad.fill(np.nan)
    part_of = compressor.part if isinstance(compressor, Wrapper) else None
    for rank, body in enumerate(bodies if finite else ()):
        try:
            part = grad if part_of is None else part_of(grad, rank)
            added: Any = compressor.add(body, part, scale)
            finite &= (yield from added) if isinstance(added, GeneratorType) else added
        except ValueError as error:
            raise wire.WireError(f"payload of rank {rank}: {error}") from None
    return finite


def _clipping(step: Step, squared_norm: float) -> float:
    """What this rank's gradient is multiplied by beside its scale, for independent gradients of N
    ranks to give a result of at most clip_norm: the result is 1/N of the sum over ranks, whose norm
    is √N times one rank's."""
    norm, limit = squared_norm**0.5 * step.scale, step.clip_norm * step.size**0.5
    return limit / norm if limit < norm < float("inf") else 1.0
