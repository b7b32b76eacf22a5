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
        codes = kernels.quantize(nothing, None, 1.0, 1.0, self.steps[:1], _width(self.steps, size), size, 0)
        levels = [kernels.fine_enough(nothing, nothing.view(np.uint32), 1.0, self.steps, size)] if len(self.steps) > 1 else []
        words = [Collective("allreduce", words.dtype.name, "sum") for words in (*levels, codes)]
        return (Collective("allreduce", "float32", "max"), *words)

    @property
    @abstractmethod
    def steps(self):
        """s of each scale, ascending; codes of all of them are at most the first."""

    @abstractmethod
    def norm_of(self, values, peaks):
        """What the shared scale is the largest of, and with one scale this rank's values are clipped at, in magnitude; infinity
        where values are not finite. peaks: with several scales, what `kernels.largest` is to fill; else None."""

    def encode(self, grad, state, step):
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
            state.scratch["fine"] = fine = kernels.fine_enough(values, peaks, drawn.w, steps, step.size, state.scratch.get("fine"))
            drawn.levels = yield Allreduce(fine)
        key = self.key("rounding", state.name, step.index, step.rank)
        spare = state.scratch.get("words")
        words = kernels.quantize(values, drawn.levels, drawn.w, min(norm, drawn.w), steps, drawn.width, step.size, key, spare)
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
        return drawn.w * abs(scale) * drawn.size < LARGEST or kernels.largest(out) < np.inf


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
        kernels.dequantize(words, self.levels, out, self.w, self.steps, self.width, self.size, scale)


def _width(steps, size):
    """Bits of a field that holds any sum of `size` codes."""
    return (2 * size * int(steps[0])).bit_length()
