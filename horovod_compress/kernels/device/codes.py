"""Whole tensors in narrower numbers: 16-bit floats."""

from typing import Any, List

import numpy as np
import torch

from ..encoded import HEADROOM, Encoded
from . import launches
from .dense import are_finite
from .programs import codes as programs
from .shared import kernel, same_length, starts_of


@kernel
def decode_float16(calls: List[Any]) -> List[float]:
    """As `kernels.reference.decode_float16`; half is float16 or its bits. ValueError where lengths
    differ."""
    for call in calls:
        same_length(**call._asdict())
    halves = [call.half.tensor.view(torch.int16) for call in calls]
    rows = [(half.numel(), half, call.out.tensor) for half, call in zip(halves, calls)]
    bits = launches.largest(programs.from_float16, rows)
    return list(map(launches.largest_of, bits.tolist()))


@kernel
def encode_bf16(calls: List[Any]) -> List[Encoded]:
    """As `kernels.reference.encode_bf16`. The body comes to the CPU, into `spare` where that is
    given."""
    starts = starts_of([call.grad.size for call in calls])
    codes = torch.empty(starts[-1], dtype=torch.int16, device=calls[0].grad.device)
    rows = [(call.grad.size, call.grad.tensor, start) for call, start in zip(calls, starts)]
    largest = launches.largest(programs.to_bfloat16, rows, codes)
    encoded = []
    for call, finite, start, end in zip(calls, are_finite(largest), starts, starts[1:]):
        buffer = (
            np.zeros(HEADROOM + 2 * (end - start) + 1, np.uint8)
            if call.spare is None
            else call.spare
        )
        encoded.append(Encoded(buffer, end - start, finite))
    launches.brought(
        [codes[start:end].view(torch.uint8) for start, end in zip(starts, starts[1:])],
        [each.body for each in encoded],
    )
    return encoded


@kernel
def decode_add_bf16(calls: List[Any]) -> List[bool]:
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
