"""Operations on whole tensors: norms, finiteness, momentum after averaging, 16-bit floats."""

import functools
from typing import Any, List, Sequence

import numpy as np
import torch

from ..encoded import HEADROOM, Encoded
from ..lists import Late
from . import launches
from .array import DeviceArray
from .programs import dense as programs
from .shared import kernel, same_length, starts_of

_HEADROOM = HEADROOM // 2  # in codes


@kernel
def max_abs(calls: List[Any]) -> Sequence[float]:
    """max |x|; infinity where anything is infinite or NaN, 0 for no elements."""
    return launches.magnitudes(largest_magnitudes([call.x for call in calls]))


@kernel
def squared_norm(calls: List[Any]) -> Sequence[float]:
    """Σ x², in float64, to rounding what the CPU's kernels find."""
    norms = [torch.linalg.vector_norm(call.x.tensor, dtype=torch.float64) for call in calls]
    return launches.late(torch.stack(norms), lambda found: [norm**2 for norm in found])


@functools.partial(kernel, key=lambda call: call.nesterov)
def apply_momentum(calls: List[Any]) -> Sequence[bool]:
    """new_u ← m·u + out, then out ← new_u, or out + m·new_u for Nesterov. Where `out` is not finite
    everywhere, nothing is written. Returns whether out, before and after, and new_u are finite.
    ValueError where lengths differ."""
    for call in calls:
        same_length(out=call.out, u=call.u, new_u=call.new_u)
    before = largest_magnitudes([call.out for call in calls])
    rows = [
        (call.out.size, call.out.tensor, call.u.tensor, call.new_u.tensor, float(call.momentum))
        for call in calls
    ]
    return are_finite(
        launches.largest(programs.average_momentum, rows, before, NESTEROV=calls[0].nesterov)
    )


def largest_magnitudes(arrays: Sequence[DeviceArray]) -> torch.Tensor:
    """Of each array the largest magnitude, as bits, on the device."""
    return launches.largest(programs.find_largest, [(each.size, each.tensor) for each in arrays])


def are_finite(largest: torch.Tensor) -> Sequence[bool]:
    """Returns whether largest magnitudes, as bits, are of finite numbers."""
    return launches.late(largest, lambda found: [bits < launches.INFINITY for bits in found])


@kernel
def decode_float16(calls: List[Any]) -> Sequence[float]:
    """As `kernels.reference.decode_float16`; half is float16 or its bits. ValueError where lengths
    differ."""
    for call in calls:
        same_length(**call._asdict())
    halves = [call.half.tensor.view(torch.int16) for call in calls]
    rows = [(half.numel(), half, call.out.tensor) for half, call in zip(halves, calls)]
    return launches.magnitudes(launches.largest(programs.from_float16, rows))


@kernel
def encode_bf16(calls: List[Any]) -> Late:
    """As `kernels.reference.encode_bf16`. Buffers come to the CPU as they are on the device;
    `spare` is not used."""
    sizes = [call.grad.size for call in calls]
    # Of each buffer, in codes of two bytes, of which the last has the byte behind the body.
    starts = starts_of([_HEADROOM + size + 1 for size in sizes])
    codes = torch.zeros(starts[-1], dtype=torch.int16, device=calls[0].grad.device)
    rows = [
        (size, call.grad.tensor, _HEADROOM + start)
        for size, call, start in zip(sizes, calls, starts)
    ]
    finite = are_finite(launches.largest(programs.to_bfloat16, rows, codes))
    landed = launches.landing(codes.view(torch.uint8))

    def encoded() -> List[Encoded]:
        buffers = landed()
        return [
            Encoded(buffers[2 * start : 2 * end - 1], size, its)
            for start, end, size, its in zip(starts, starts[1:], sizes, finite)
        ]

    return Late(encoded)


@kernel
def decode_add_bf16(calls: List[Any]) -> Sequence[bool]:
    """As `kernels.reference.decode_add_bf16`. ValueError, and nothing added, for a body of another
    length."""
    sizes = [call.out.size for call in calls]
    for call, size in zip(calls, sizes):
        if len(call.body) != 2 * size:
            raise ValueError(f"{len(call.body)} bytes, not {2 * size}")
    codes = launches.copied(
        [np.frombuffer(call.body, np.int16) for call in calls], calls[0].out.device
    )
    rows = [
        (size, call.out.tensor, float(call.scale), start)
        for size, call, start in zip(sizes, calls, starts_of(sizes))
    ]
    return are_finite(launches.largest(programs.add_bfloat16, rows, codes))
