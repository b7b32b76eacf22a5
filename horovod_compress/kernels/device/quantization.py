"""Integer codes that many ranks can add up in one word: quantized and packed on the device; the words are on the host."""
from typing import Any, List, Optional, Tuple

import numpy as np
import torch

from ..reference.quantization import factors, one_of, shape_of
from . import programs
from .array import DeviceArray


def quantize(
    x: DeviceArray, levels: Optional[np.ndarray], spare: Optional[np.ndarray] = None, *, w: float, clip: float, steps: List[float],
    width: int, size: int, key: int,
) -> np.ndarray:
    """As `kernels.reference.quantize`; levels and words are on the host, these in `spare` where that is given and as long."""
    largest = steps[0]
    fields, count, dtype = shape_of(x.size, width, 0)
    words = _new_words(x.tensor, count, dtype)
    before, each = factors(w, np.array(steps, np.float32))
    limit = np.float32(largest) * np.float32(one_of(largest))
    if len(steps) == 1:
        limit = min(limit, np.float32(clip) * before * each[0])
    low, high = np.array([key], "<u8").view("<i4").tolist()
    programs.launch(
        programs.quantize, count, x.tensor, words, *_by_element(x, levels, each, size), x.size, low, high, _bits(limit), float(before),
        FRACTION=one_of(largest).bit_length() - 1, WIDTH=width, FIELDS=fields, WORD=programs.WORDS[dtype.itemsize], SCALES=len(steps) > 1,
        BLOCK=programs.WORD_BLOCK,
    )
    return _on_host(words, spare)


def dequantize(
    words: np.ndarray, levels: Optional[np.ndarray], out: DeviceArray, *, w: float, steps: List[float], width: int, size: int, scale: float
) -> None:
    """As `kernels.reference.dequantize`; words and levels are on the host. ValueError for words of another number of elements."""
    fields, count, dtype = shape_of(out.size, width, 0)
    largest = size * int(steps[0])
    offsets = sum(largest << field * width for field in range(fields))
    units = (w / np.array(steps) * scale).astype(np.float32)
    programs.launch(
        programs.dequantize, count, _words_on(out, words, count, dtype), out.tensor, *_by_element(out, levels, units, size), out.size, largest,
        OFFSETS=_signed(offsets, 8 * dtype.itemsize), WIDTH=width, FIELDS=fields, SCALES=len(steps) > 1, BLOCK=programs.WORD_BLOCK,
    )


def encode_scales(
    x: DeviceArray, peaks: np.ndarray, spare: Optional[np.ndarray] = None, *, w: float, steps: List[float], size: int
) -> np.ndarray:
    """As `kernels.reference.encode_scales`; the words are on the host, in `spare` where that is given and as long. `peaks` are not used."""
    width, largest = size.bit_length(), steps[0]
    fields, count, dtype = shape_of(x.size, width, 1)
    before, each = factors(w, np.array(steps, np.float32))
    limit = _bits(np.float32(largest) * np.float32(one_of(largest)))
    words = _new_words(x.tensor, (len(steps) - 1) * count, dtype)
    for its, factor in zip(words.split(max(count, 1)), each[1:]):
        programs.launch(
            programs.count_fits, count, x.tensor, its, x.size, limit, float(before), float(factor),
            WIDTH=width, FIELDS=fields, WORD=programs.WORDS[dtype.itemsize], BLOCK=programs.WORD_BLOCK,
        )
    return _on_host(words, spare)


def _by_element(array: DeviceArray, levels: Optional[np.ndarray], numbers: np.ndarray, size: int) -> Tuple[torch.Tensor, Any]:
    """(each element's scale, the scales' numbers); with a single scale (the array, its number)."""
    if len(numbers) == 1:
        return array.tensor, float(numbers[0])
    width = size.bit_length()
    fields, count, dtype = shape_of(array.size, width, 1)
    words = _words_on(array, levels, (len(numbers) - 1) * count, dtype)
    finest = torch.zeros_like(array.tensor, dtype=torch.int8)
    for scale, its in enumerate(words.split(max(count, 1)), 1):
        programs.launch(
            programs.find_scales, count, its, finest, array.size, scale, size, WIDTH=width, FIELDS=fields, BLOCK=programs.WORD_BLOCK
        )
    return finest, torch.from_numpy(numbers).to(array.tensor.device)


def _new_words(beside: torch.Tensor, count: int, dtype: np.dtype) -> torch.Tensor:
    return beside.new_empty(count, dtype=torch.int64 if dtype.itemsize == 8 else torch.int32)


def _words_on(array: DeviceArray, words: Optional[np.ndarray], count: int, dtype: np.dtype) -> torch.Tensor:
    """Words beside an array. ValueError for another number of them."""
    if words is None or len(words) != count or words.itemsize != dtype.itemsize:
        raise ValueError("words, for as many elements, must have the same length")
    return torch.from_numpy(words).to(array.tensor.device)


def _on_host(words: torch.Tensor, spare: Optional[np.ndarray]) -> np.ndarray:
    if spare is None or spare.size != words.numel() or spare.itemsize != words.itemsize:
        return words.cpu().numpy()
    torch.from_numpy(spare).copy_(words)
    return spare


def _bits(magnitude: np.float32) -> int:
    return int(magnitude.view(np.int32))


def _signed(number: int, bits: int) -> int:
    """The signed number with the same lowest bits."""
    return (number + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
