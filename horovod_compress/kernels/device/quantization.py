"""Integer codes that many ranks can add up in one word: quantized and packed on the device, many
tensors at once; the words are on the CPU."""

import functools
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import torch

from ..reference.quantization import factors, shape_of
from ..reference.random import one_of
from . import launches
from .array import DeviceArray
from .programs import quantization as programs
from .shared import kernel, starts_of


class _Words:
    """The words of tensors, `spare` bits of each not used: how many fields a word has, their type,
    how many each tensor has, where those begin."""

    def __init__(
        self, arrays: Sequence[DeviceArray], width: int, spare: int, rows: int = 1
    ) -> None:
        shapes = [shape_of(array.size, width, spare) for array in arrays]
        self.fields, _, self.dtype = shapes[0]
        self.device, self.width = arrays[0].device, width
        self.counts = [count for _, count, _ in shapes]
        self.starts = starts_of([rows * count for count in self.counts])

    def new(self) -> torch.Tensor:
        return torch.empty(
            self.starts[-1],
            dtype=torch.int64 if self.dtype.itemsize == 8 else torch.int32,
            device=self.device,
        )

    def launch(
        self, program: Any, rows: Sequence[Tuple[Any, ...]], *shared: Any, **constants: Any
    ) -> None:
        """A program whose table has these words as elements."""
        table = [(count, *row) for count, row in zip(self.counts, rows)]
        launches.launch(
            program,
            table,
            *shared,
            WIDTH=self.width,
            FIELDS=self.fields,
            BLOCK=launches.WORD_BLOCK,
            **constants,
        )

    def there(self, words: Sequence[Optional[np.ndarray]]) -> torch.Tensor:
        """Tensors' words, on the device. ValueError for another number of them."""
        found = [np.empty(0, self.dtype) if its is None else its for its in words]
        if any(
            len(its) != end - start or its.itemsize != self.dtype.itemsize
            for its, start, end in zip(found, self.starts, self.starts[1:])
        ):
            raise ValueError("words, for as many elements, must have the same length")
        return launches.copied(found, self.device)

    def here(self, words: torch.Tensor, spares: Sequence[Optional[np.ndarray]]) -> List[np.ndarray]:
        """Tensors' words, on the CPU, in the spare memory of those that have as much."""
        found = [
            spare
            if spare is not None
            and spare.size == end - start
            and spare.itemsize == self.dtype.itemsize
            else launches.pinned(end - start, words.dtype, self.device)
            for spare, start, end in zip(spares, self.starts, self.starts[1:])
        ]
        launches.brought(
            [words[start:end] for start, end in zip(self.starts, self.starts[1:])], found
        )
        return found


def _packed_alike(call: Any) -> Tuple[int, int, Tuple[float, ...]]:
    """Alike for calls that one launch can make."""
    return call.width, call.size, tuple(call.steps)


@functools.partial(kernel, key=_packed_alike)
def quantize(calls: List[Any]) -> List[np.ndarray]:
    """As `kernels.reference.quantize`; levels and words are on the CPU, these in `spare` where
    that is given and as long."""
    steps, arrays = calls[0].steps, [call.x for call in calls]
    words = _Words(arrays, calls[0].width, 0)
    scales, starts = _scales_of(calls, arrays)
    found = words.new()
    befores, each = zip(*(factors(call.w, np.array(steps, np.float32)) for call in calls))
    most = _largest_code(steps)
    # The largest magnitudes before rounding.
    clips = [
        min(most, np.float32(call.clip) * before * its[0]) if len(steps) == 1 else most
        for call, before, its in zip(calls, befores, each)
    ]
    keys = [divmod(call.key, 1 << 32) for call in calls]
    rows = [
        (
            call.x.tensor,
            call.x.size,
            start,
            at,
            i * len(steps),
            low,
            high,
            _bits(clip),
            float(before),
        )
        for i, (call, start, at, (high, low), clip, before) in enumerate(
            zip(calls, starts, words.starts, keys, clips, befores)
        )
    ]
    words.launch(
        programs.quantize,
        rows,
        found,
        scales,
        launches.copied(each, words.device),
        FRACTION=one_of(steps[0]).bit_length() - 1,
        WORD=programs.WORDS[words.dtype.itemsize],
        SCALES=len(steps) > 1,
    )
    return words.here(found, [call.spare for call in calls])


@functools.partial(kernel, key=_packed_alike)
def dequantize(calls: List[Any]) -> List[None]:
    """As `kernels.reference.dequantize`; words and levels are on the CPU. ValueError for words of
    another number of elements."""
    steps, arrays = calls[0].steps, [call.out for call in calls]
    words, largest = _Words(arrays, calls[0].width, 0), calls[0].size * int(steps[0])
    sums = words.there([call.words for call in calls])
    scales, starts = _scales_of(calls, arrays)
    units = [(call.w / np.array(steps) * call.scale).astype(np.float32) for call in calls]
    rows = [
        (array.tensor, array.size, start, at, i * len(steps), largest)
        for i, (array, start, at) in enumerate(zip(arrays, starts, words.starts))
    ]
    offsets = sum(largest << field * words.width for field in range(words.fields))
    words.launch(
        programs.dequantize,
        rows,
        sums,
        scales,
        launches.copied(units, words.device),
        OFFSETS=int(words.dtype.type(offsets).view(f"i{words.dtype.itemsize}")),
        SCALES=len(steps) > 1,
    )
    return [None] * len(calls)


@functools.partial(kernel, key=lambda call: (call.size, tuple(call.steps)))
def encode_scales(calls: List[Any]) -> List[np.ndarray]:
    """As `kernels.reference.encode_scales`; the words are on the CPU, in `spare` where that is
    given and as long. `peaks` are not used."""
    steps = calls[0].steps
    words, limit = (
        _Words([call.x for call in calls], calls[0].size.bit_length(), 1, len(steps) - 1),
        _bits(_largest_code(steps)),
    )
    found = words.new()
    numbers = [factors(call.w, np.array(steps, np.float32)) for call in calls]
    for scale in range(1, len(steps)):
        rows = [
            (
                call.x.tensor,
                call.x.size,
                start + (scale - 1) * count,
                limit,
                float(before),
                float(each[scale]),
            )
            for call, start, count, (before, each) in zip(
                calls, words.starts, words.counts, numbers
            )
        ]
        words.launch(programs.count_fits, rows, found, WORD=programs.WORDS[words.dtype.itemsize])
    return words.here(found, [call.spare for call in calls])


def _scales_of(
    calls: Sequence[Any], arrays: Sequence[DeviceArray]
) -> Tuple[torch.Tensor, Sequence[int]]:
    """(each element's scale, where those of each tensor begin); with a single scale nothing that is
    used."""
    scales, size, device = len(calls[0].steps), calls[0].size, arrays[0].device
    if scales == 1:
        return torch.empty(0, dtype=torch.int8, device=device), [0] * len(calls)
    words = _Words(arrays, size.bit_length(), 1, scales - 1)
    sums, starts = (
        words.there([call.levels for call in calls]),
        starts_of([array.size for array in arrays]),
    )
    finest = torch.zeros(starts[-1], dtype=torch.int8, device=device)
    for scale in range(1, scales):
        rows = [
            (at + (scale - 1) * count, array.size, start, scale, size)
            for array, at, count, start in zip(arrays, words.starts, words.counts, starts)
        ]
        words.launch(programs.find_scales, rows, sums, finest)
    return finest, starts


def _largest_code(steps: Sequence[float]) -> np.float32:
    return np.float32(steps[0]) * np.float32(one_of(steps[0]))


def _bits(magnitude: np.float32) -> int:
    return int(np.float32(magnitude).view(np.int32))
