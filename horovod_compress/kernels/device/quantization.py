"""Integer codes that many ranks can add up in one word: quantized and packed on the device; the words are on the host."""
from typing import List, Optional

import numpy as np
import torch

from ..reference.quantization import factors, one_of, shape_of
from . import programs
from .array import DeviceArray


def quantize(
    x: DeviceArray, levels: None, spare: Optional[np.ndarray] = None, *, w: float, clip: float, steps: List[float], width: int, size: int, key: int
) -> np.ndarray:
    """As `kernels.reference.quantize`, with one scale. The words are on the host, in `spare` where that is given and as long."""
    largest = one_scale(levels, steps)
    fields, count, dtype = shape_of(x.size, width, 0)
    words = x.tensor.new_empty(count, dtype=torch.int64 if dtype.itemsize == 8 else torch.int32)
    before, (factor,) = factors(w, np.array([largest], np.float32))
    limit = min(np.float32(largest) * np.float32(one_of(largest)), np.float32(clip) * before * factor)
    low, high = np.array([key], "<u8").view("<i4").tolist()
    programs.launch(
        programs.quantize, count, x.tensor, words, x.size, low, high, int(limit.view(np.int32)), float(before), float(factor),
        FRACTION=one_of(largest).bit_length() - 1, WIDTH=width, FIELDS=fields, WORD=programs.WORDS[dtype.itemsize],
        BLOCK=programs.WORD_BLOCK,
    )
    if spare is None or spare.size != count or spare.itemsize != dtype.itemsize:
        return words.cpu().numpy()
    torch.from_numpy(spare).copy_(words)
    return spare


def dequantize(
    words: np.ndarray, levels: None, out: DeviceArray, *, w: float, steps: List[float], width: int, size: int, scale: float
) -> None:
    """As `kernels.reference.dequantize`, with one scale. ValueError for words of another number of elements."""
    step = one_scale(levels, steps)
    fields, count, dtype = shape_of(out.size, width, 0)
    if len(words) != count or words.itemsize != dtype.itemsize:
        raise ValueError("words, for as many elements, must have the same length")
    largest = size * int(step)
    offsets = sum(largest << field * width for field in range(fields))
    unit = np.float32(w / step * scale)
    there = torch.from_numpy(words).to(out.tensor.device)
    programs.launch(
        programs.dequantize, count, there, out.tensor, out.size, float(unit), largest, OFFSETS=_signed(offsets, 8 * dtype.itemsize), WIDTH=width,
        FIELDS=fields, BLOCK=programs.WORD_BLOCK,
    )


def one_scale(levels: None, steps: List[float]) -> float:
    """The only step. ValueError where there are several scales, which there are no programs for."""
    if levels is not None or len(steps) != 1:
        raise ValueError("quantization with several scales is for arrays on the host")
    return steps[0]


def _signed(number: int, bits: int) -> int:
    """The signed number with the same lowest bits."""
    return (number + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
