"""Whole tensors in narrower numbers: 16-bit floats."""
from typing import Optional

import numpy as np
import torch

from ..encoded import HEADROOM, Encoded
from . import programs
from .array import DeviceArray
from .dense import are_finite, largest_of, peaks_beside, same_length


def encode_float16(x: DeviceArray, half: DeviceArray) -> float:
    """As `kernels.reference.encode_float16`; half is float16 or its bits. ValueError where lengths differ."""
    same_length(x=x, half=half)
    peaks = peaks_beside(x.tensor, x.size)
    programs.launch(programs.to_float16, x.size, x.tensor, half.tensor.view(torch.int16), peaks)
    return largest_of(peaks)


def decode_float16(half: DeviceArray, out: DeviceArray) -> float:
    """As `kernels.reference.decode_float16`; half is float16 or its bits. ValueError where lengths differ."""
    same_length(half=half, out=out)
    peaks = peaks_beside(out.tensor, out.size)
    programs.launch(programs.from_float16, out.size, half.tensor.view(torch.int16), out.tensor, peaks)
    return largest_of(peaks)


def encode_bf16(grad: DeviceArray, spare: Optional[np.ndarray] = None) -> Encoded:
    """As `kernels.reference.encode_bf16`. The body comes to the host, into `spare` where that is given."""
    codes, peaks = grad.tensor.new_empty(grad.size, dtype=torch.int16), peaks_beside(grad.tensor, grad.size)
    programs.launch(programs.to_bfloat16, grad.size, grad.tensor, codes, peaks)
    buffer = np.zeros(HEADROOM + codes.nbytes + 1, np.uint8) if spare is None else spare
    encoded = Encoded(buffer, grad.size, are_finite(peaks))
    torch.from_numpy(encoded.body).copy_(codes.view(torch.uint8))
    return encoded


def decode_add_bf16(out: DeviceArray, body: np.ndarray, *, scale: float) -> bool:
    """As `kernels.reference.decode_add_bf16`. ValueError for a body of another length."""
    if len(body) != 2 * out.size:
        raise ValueError(f"{len(body)} bytes, not {2 * out.size}")
    codes, peaks = torch.from_numpy(np.frombuffer(body, np.int16).copy()).to(out.tensor.device), peaks_beside(out.tensor, out.size)
    programs.launch(programs.add_bfloat16, out.size, out.tensor, codes, peaks, scale)
    return are_finite(peaks)
