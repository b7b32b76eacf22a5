"""What the quantizers against a shared scale have in common (Vineeth S, arXiv 2109.12497)."""
import dataclasses
import math
from abc import abstractmethod

import numpy as np

from .. import kernels
from ..requests import Allreduce, Collective
from .base import LARGEST
from .globalrandk import SharedCoordinates


@dataclasses.dataclass(frozen=True, repr=False)
class SharedScaleQuantizer(SharedCoordinates):
    """Rounds every element at random to one of 2s + 1 values from -w to w, w being the largest norm of all ranks.

    All ranks use the same w, so integer codes add up: N ranks' sums fit fields of ⌈log2(2·N·s + 1)⌉ bits, many to a word, and an
    allreduce adds the words. With several scales each element takes the finest at which its code is at most that of the
    coarsest on every rank; the ranks agree on that first, by counting.
    """


    def collectives(self, size):
        nothing = np.empty(0, np.float32)
        k = kernels.of(nothing)
        codes = k.quantize(nothing, None, w=1.0, clip=1.0, steps=self.steps[:1], width=_width(self.steps, size), size=size, key=0)
        levels = []
        if len(self.steps) > 1:
            levels = [k.encode_scales(nothing, nothing.view(np.uint32), w=1.0, steps=self.steps, size=size)]
        words = [Collective("allreduce", words.dtype.name, "sum") for words in (*levels, codes)]
        return (Collective("allreduce", "float32", "max"), *words)

    @property
    @abstractmethod
    def steps(self):
        """s of each scale, ascending; codes of all of them are at most the first."""

    @abstractmethod
    def norm_of(self, values, peaks):
        """What the shared scale is the largest of, and with one scale this rank's values are clipped at, in magnitude; infinity
        where values are not finite. peaks: with several scales, what `max_abs` is to fill; else None."""

    def encode(self, grad, state, step):
        k = kernels.of(grad)
        indices, values, finite = self.draw(grad, state, step)
        steps = self.steps
        peaks = state.scratch.get("peaks")
        stretches = -(-values.size // 64)
        if len(steps) > 1 and (peaks is None or peaks.size != stretches):
            peaks = state.scratch["peaks"] = np.empty(stretches, np.uint32)
        norm = self.norm_of(values, peaks) if finite else math.inf
        w = float((yield Allreduce(np.array([norm], np.float32), "max"))[0])
        if not math.isfinite(w):  # on some rank: no rank's gradient is used
            values.fill(0)
            if peaks is not None:
                peaks.fill(0)
        state.scratch["drawn"] = drawn = _Drawn(indices, w if math.isfinite(w) else 0.0, step.size, steps)
        if len(steps) > 1:
            fine = k.encode_scales(values, peaks, state.scratch.get("fine"), w=drawn.w, steps=steps, size=step.size)
            state.scratch["fine"] = fine
            drawn.levels = yield Allreduce(fine)
        key = self.key("rounding", state.name, step.index, step.rank)
        spare = state.scratch.get("words")
        words = k.quantize(
            values, drawn.levels, spare, w=drawn.w, clip=min(norm, drawn.w), steps=steps, width=drawn.width, size=step.size, key=key
        )
        state.scratch["words"] = words
        if state.taken is not None:
            drawn.dequantize(words, values, 1.0)
            self.put_back(state, values)
        drawn.finite = math.isfinite(w)
        return Allreduce(words)

    def decode(self, summed, out, state, step, scale):
        drawn = state.scratch["drawn"]
        if not drawn.finite or not math.isfinite(scale):
            out.fill(np.nan)
            return False
        if drawn.indices is None:
            drawn.dequantize(summed, out, scale)
        else:
            values = np.empty(drawn.indices.size, np.float32)
            drawn.dequantize(summed, values, scale)
            out[drawn.indices] = values
        return drawn.w * abs(scale) * drawn.size < LARGEST or kernels.of(out).max_abs(out) < np.inf


@dataclasses.dataclass
class _Drawn:
    """What encode knows of a step's codes and decode needs."""

    indices: np.ndarray
    w: float
    size: int
    steps: list
    levels: np.ndarray = None  # with several scales, how many ranks' codes fit each
    finite: bool = True

    @property
    def width(self):
        return _width(self.steps, self.size)

    def dequantize(self, words, out, scale):
        kernels.of(out).dequantize(
            words, self.levels, out, w=self.w, steps=self.steps, width=self.width, size=self.size, scale=scale
        )


def _width(steps, size):
    """Bits of a field that holds any sum of `size` codes."""
    return (2 * size * int(steps[0])).bit_length()
