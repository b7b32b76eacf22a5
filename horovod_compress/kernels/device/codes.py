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
    blocks = launches.blocks_of(halves)
    peaks = blocks.new()
    rows = [(half.numel(), half, call.out.tensor) for half, call in zip(halves, calls)]
    launches.launch(programs.from_float16, halves[0].device, rows, peaks)
    return [launches.largest_of(bits) for bits in blocks.largest(peaks).tolist()]


@Kernel
def encode_bf16(calls: List[Any]) -> List[Encoded]:
    """As `kernels.reference.encode_bf16`. The body comes to the CPU, into `spare` where that is
    given."""
    tensors = [call.grad.tensor for call in calls]
    blocks, starts, device = (
        launches.blocks_of(tensors),
        starts_of([tensor.numel() for tensor in tensors]),
        tensors[0].device,
    )
    codes, peaks = torch.empty(starts[-1], dtype=torch.int16, device=device), blocks.new()
    rows = [(tensor.numel(), tensor, start) for tensor, start in zip(tensors, starts)]
    launches.launch(programs.to_bfloat16, device, rows, codes, peaks)
    encoded = []
    for call, finite, start, end in zip(
        calls, are_finite(blocks.largest(peaks)), starts, starts[1:]
    ):
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
    device, starts, blocks = (
        calls[0].out.tensor.device,
        starts_of(sizes),
        launches.blocks(sizes, calls[0].out.tensor.device),
    )
    codes, peaks = (
        launches.copied(
            [np.frombuffer(call.body[: 2 * size], np.int16) for call, size in zip(calls, sizes)],
            device,
        ),
        blocks.new(),
    )
    rows = [
        (size, call.out.tensor, float(call.scale), start)
        for size, call, start in zip(sizes, calls, starts)
    ]
    launches.launch(programs.add_bfloat16, device, rows, codes, peaks)
    return [
        finite
        if size == call.out.size
        else ValueError(f"{len(call.body)} bytes, not {2 * call.out.size}")
        for size, call, finite in zip(sizes, calls, are_finite(blocks.largest(peaks)))
    ]
