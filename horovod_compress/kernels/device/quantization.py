"""Integer codes that many ranks can add up in one word, quantized and packed for many tensors at
once. Words, and the numbers that ranks share, stay on the device: nothing waits for them."""

import functools
import math
from typing import Any, List, Sequence, Tuple

import numpy as np
import torch

from ..reference.quantization import shape_of
from ..reference.random import one_of
from . import launches
from .array import DeviceArray
from .dense import largest_magnitudes
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
        self,
        program: Any,
        rows: Sequence[Tuple[Any, ...]],
        *shared: Any,
        start: Any = None,
        BLOCK: int = launches.WORD_BLOCK,
        **constants: Any,
    ) -> Any:
        """`launches.launch`, or `start`, of a program whose table has these words as elements."""
        table = [(count, *row) for count, row in zip(self.counts, rows)]
        return (start or launches.launch)(
            program,
            table,
            *shared,
            WIDTH=self.width,
            FIELDS=self.fields,
            BLOCK=BLOCK,
            **constants,
        )

    def there(self, words: Sequence[Any]) -> torch.Tensor:
        """Tensors' words, on the device. ValueError for another number of them."""
        if any(
            its is None or its.size != end - start or its.dtype.itemsize != self.dtype.itemsize
            for its, start, end in zip(words, self.starts, self.starts[1:])
        ):
            raise ValueError("words, for as many elements, must have the same length")
        return launches.there(words, self.device)

    def parts(self, words: torch.Tensor) -> List[DeviceArray]:
        """The words of each tensor."""
        return [DeviceArray(words[i:end]) for i, end in zip(self.starts, self.starts[1:])]


@functools.partial(kernel, key=lambda call: call.l2)
def norms(calls: List[Any]) -> List[DeviceArray]:
    """As `kernels.reference.norms`. `peaks`, which save the CPU a pass, are not filled."""
    if not calls[0].l2:
        bits = largest_magnitudes([call.x for call in calls])
        found = bits.clamp(max=launches.INFINITY).view(torch.float32)
    else:
        each = [torch.linalg.vector_norm(call.x.tensor, dtype=torch.float64) for call in calls]
        found = torch.stack(each).float()
        found = found.where(found < float("inf"), float("inf"))
    return [DeviceArray(its) for its in found.split(1)]


def _packed_alike(call: Any) -> Tuple[int, int, Tuple[float, ...]]:
    """Alike for calls that one launch can make."""
    return call.width, call.size, tuple(call.steps)


@functools.partial(kernel, key=_packed_alike)
def quantize(calls: List[Any]) -> List[DeviceArray]:
    """As `kernels.reference.quantize`. No |x| is above w: `clip` is not used."""
    steps, arrays = calls[0].steps, [call.x for call in calls]
    words = _Words(arrays, calls[0].width, 0)
    scales, starts = _scales_of(calls, arrays)
    found = words.new()
    keys = [divmod(call.key, 1 << 32) for call in calls]
    rows = [
        (call.x.tensor, call.x.size, start, at, low, high, *map(float, steps))
        for call, start, at, (high, low) in zip(calls, starts, words.starts, keys)
    ]
    words.launch(
        programs.quantize,
        rows,
        found,
        scales,
        _shared_norms(calls, words.device),
        FRACTION=one_of(steps[0]).bit_length() - 1,
        WORD=programs.WORDS[words.dtype.itemsize],
        SCALES=len(steps),
        # Half as many take half the registers.
        BLOCK=launches.WORD_BLOCK // (1 if len(steps) == 1 else 2),
    )
    return words.parts(found)


@functools.partial(kernel, key=_packed_alike)
def dequantize(calls: List[Any]) -> Sequence[bool]:
    """As `kernels.reference.dequantize`. ValueError for words of another number of elements."""
    steps, arrays = calls[0].steps, [call.out for call in calls]
    words, largest = _Words(arrays, calls[0].width, 0), calls[0].size * int(steps[0])
    sums = words.there([call.words for call in calls])
    scales, starts = _scales_of(calls, arrays)
    rows = [
        (array.tensor, array.size, start, at, largest, _bits(call.scale), *map(_bits, steps))
        for call, array, start, at in zip(calls, arrays, starts, words.starts)
    ]
    offsets = sum(largest << field * words.width for field in range(words.fields))
    norms = _shared_norms(calls, words.device)
    peaks = words.launch(
        programs.dequantize,
        rows,
        sums,
        scales,
        norms,
        start=launches.largest,
        OFFSETS=int(words.dtype.type(offsets).view(f"i{words.dtype.itemsize}")),
        SCALES=len(steps),
    )
    # Also of a tensor without elements.
    finite = [math.isfinite(call.scale) for call in calls]
    return launches.late(
        torch.maximum(peaks, norms.view(torch.int32)),
        lambda found: [bits < launches.INFINITY and its for bits, its in zip(found, finite)],
    )


@functools.partial(kernel, key=lambda call: (call.size, tuple(call.steps)))
def encode_scales(calls: List[Any]) -> List[DeviceArray]:
    """As `kernels.reference.encode_scales`. `peaks` are not used."""
    steps = calls[0].steps
    words = _Words([call.x for call in calls], calls[0].size.bit_length(), 1, rows=len(steps) - 1)
    found, w = words.new(), _shared_norms(calls, words.device)
    for scale in range(1, len(steps)):
        rows = [
            (
                call.x.tensor,
                call.x.size,
                start + (scale - 1) * count,
                float(steps[0]),
                float(steps[scale]),
            )
            for call, start, count in zip(calls, words.starts, words.counts)
        ]
        words.launch(
            programs.count_fits,
            rows,
            found,
            w,
            FRACTION=one_of(steps[0]).bit_length() - 1,
            WORD=programs.WORDS[words.dtype.itemsize],
        )
    return words.parts(found)


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


def _shared_norms(calls: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Their w, one behind the other."""
    return launches.there([call.w for call in calls], device)


def _bits(number: float) -> int:
    """Those of a float64."""
    return int(np.float64(number).view(np.int64))
