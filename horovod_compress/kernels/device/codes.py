"""Whole tensors in narrower numbers: 16-bit floats."""

from typing import Any, List, Union

import numpy as np
import torch

from ..encoded import HEADROOM, Encoded
from . import launches
from .dense import are_finite
from .programs import codes as programs
from .shared import Kernel, same_length, starts_of


@Kernel
def decode_float16(calls: List[Any]) -> List[float]:
    """As `kernels.reference.decode_float16`; half is float16 or its bits. ValueError where lengths
    differ."""
    for call in calls:
        same_length(**call._asdict())
    halves = [call.half.tensor.view(torch.int16) for call in calls]
    rows = [(half.numel(), half, call.out.tensor) for half, call in zip(halves, calls)]
    bits = launches.largest(programs.from_float16, rows)
    return list(map(launches.largest_of, bits.tolist()))


@Kernel
def encode_bf16(calls: List[Any]) -> List[Encoded]:
    """As `kernels.reference.encode_bf16`. The body comes to the CPU, into `spare` where that is
    given."""
    starts = starts_of([call.grad.size for call in calls])
    codes = torch.empty(starts[-1], dtype=torch.int16, device=calls[0].grad.tensor.device)
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


@Kernel
def decode_add_bf16(calls: List[Any]) -> List[Union[bool, ValueError]]:
    """As `kernels.reference.decode_add_bf16`. ValueError for a body of another length."""
    sizes = [call.out.size if len(call.body) == 2 * call.out.size else 0 for call in calls]
    codes = launches.copied(
        [np.frombuffer(call.body[: 2 * size], np.int16) for call, size in zip(calls, sizes)],
        calls[0].out.tensor.device,
    )
    rows = [
        (size, call.out.tensor, float(call.scale), start)
        for size, call, start in zip(sizes, calls, starts_of(sizes))
    ]
    largest = launches.largest(programs.add_bfloat16, rows, codes)
    return [
        finite
        if size == call.out.size
        else ValueError(f"{len(call.body)} bytes, not {2 * call.out.size}")
        for size, call, finite in zip(sizes, calls, are_finite(largest))
    ]
