"""What the quantizers against a shared scale have in common (Vineeth S, arXiv 2109.12497)."""

import dataclasses
import math
from abc import abstractmethod
from typing import List, Optional, Sequence, Tuple, Union

import numpy as np

from .. import kernels
from ..protocol.requests import Allreduce, Collective
from .base import LARGEST, Asking, Step, result_of
from .globalrandk import SharedCoordinates
from .state import State


@dataclasses.dataclass
class QuantizerState(State):
    """peaks are the bits of the largest magnitude of each 64 values. scales are this rank's words
    that say which scales fit, and levels, with several scales, how many ranks' codes fit each. w is
    the largest norm of all ranks in the open step, infinite where something is not finite."""

    peaks: Optional[np.ndarray] = None
    scales: Optional[np.ndarray] = None
    levels: Optional[np.ndarray] = None
    w: float = 0.0


@dataclasses.dataclass(frozen=True, repr=False)
class SharedScaleQuantizer(SharedCoordinates):
    """Rounds every element at random to one of 2s + 1 values from -w to w, w being the largest norm
    of all ranks. All ranks use the same w, so integer codes add up: sums of N ranks fit fields of
    ⌈log2(2·N·s + 1)⌉ bits, many to a word, and an allreduce adds the words. With several scales
    each element uses the finest scale at which no rank's code is above the largest code of the
    coarsest. The ranks agree on that scale first, by counting."""

    traits = SharedCoordinates.traits._replace(state_type=QuantizerState)

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        spare_and_width = [(0, _width(self.steps, size))]
        if len(self.steps) > 1:
            spare_and_width.insert(0, (1, size.bit_length()))
        words = [
            Collective("allreduce", kernels.word_dtype(width, spare).name, "sum")
            for spare, width in spare_and_width
        ]
        return (Collective("allreduce", "float32", "max"), *words)

    @property
    @abstractmethod
    def steps(self) -> List[float]:
        """s of each scale, ascending. No code of any scale is above the first s."""

    @abstractmethod
    def norm_of(
        self, values: np.ndarray, peaks: Optional[np.ndarray]
    ) -> Union[float, Asking[float]]:
        """This rank's norm; infinity where values are not finite. The shared scale is the largest
        norm of all ranks. With one scale, magnitudes are clipped at this norm. peaks is filled as
        by the kernel `max_abs`, and None with one scale."""

    def encode(self, grad: np.ndarray, state: QuantizerState, step: Step) -> Asking[Allreduce]:
        state.indices, values, finite = self.draw(grad, state, step)
        steps, size = self.steps, step.size
        stretches = -(-values.size // 64)
        if len(steps) > 1 and (state.peaks is None or state.peaks.size != stretches):
            state.peaks = np.empty(stretches, np.uint32)
        peaks = state.peaks
        norm = (yield from result_of(self.norm_of(values, peaks))) if finite else math.inf
        w = state.w = float((yield Allreduce(np.array([norm], np.float32), "max"))[0])
        # On some rank: no rank's gradient is used.
        if not math.isfinite(w):
            w = 0.0
            values.fill(0)
            if peaks is not None:
                peaks.fill(0)
        if len(steps) > 1:
            state.scales = yield from kernels.encode_scales(
                values, peaks, state.scales, w=w, steps=steps, size=size
            )
            state.levels = yield Allreduce(state.scales)
        key = self.key("rounding", state.name, step.index, step.rank)
        width = _width(steps, size)
        words = state.buffer = yield from kernels.quantize(
            values,
            state.levels,
            state.buffer,
            w=w,
            clip=min(norm, w),
            steps=steps,
            width=width,
            size=size,
            key=key,
        )
        if state.rollbacks:
            yield from kernels.dequantize(
                words, state.levels, values, w=w, steps=steps, width=width, size=size, scale=1.0
            )
            # The rounding error, what was drawn less what is sent, goes into the residual.
            (drawn,) = state.rollbacks
            state.arrays["residual"][drawn.indices] += drawn.values - values
            state.rollbacks = [drawn._replace(values=values)]
        return Allreduce(words, elements=values.size)

    def decode(
        self, summed: np.ndarray, out: np.ndarray, state: QuantizerState, step: Step, scale: float
    ) -> Asking[bool]:
        w, indices = state.w, state.indices
        if not math.isfinite(w) or not math.isfinite(scale):
            out.fill(np.nan)
            return False
        values = out if indices is None else np.empty(indices.size, np.float32)
        yield from kernels.dequantize(
            summed,
            state.levels,
            values,
            w=w,
            steps=self.steps,
            width=_width(self.steps, step.size),
            size=step.size,
            scale=scale,
        )
        if indices is not None:
            out[indices] = values
        if w * abs(scale) * step.size < LARGEST:
            return True
        return (yield from kernels.max_abs(out)) < np.inf


def _width(steps: Sequence[float], size: int) -> int:
    """Bits of a field that holds any sum of `size` codes."""
    return (2 * size * int(steps[0])).bit_length()
