"""The common part of quantizers against a shared scale (Vineeth S, arXiv 2109.12497)."""

import dataclasses
import math
from abc import abstractmethod
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from .. import kernels
from ..protocol.requests import Allreduce, Collective
from .base import Arrays, Asking, State, Steps, spares
from .globalrandk import SharedCoordinates


@dataclasses.dataclass
class QuantizerState(State):
    """peaks are the bits of the largest magnitude of each 64 values. scales are this rank's words
    that say which scales fit, and levels, with several scales, how many ranks' codes fit each. w,
    an array of one number, is the largest norm of all ranks in the open step, infinite where
    something is not finite."""

    peaks: Optional[np.ndarray] = None
    scales: Optional[np.ndarray] = None
    levels: Optional[np.ndarray] = None
    w: Any = None


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
    def steps(self) -> Tuple[float, ...]:
        """s of each scale, ascending. No code of any scale is above the first s."""

    @abstractmethod
    def norms_of(
        self, values: Arrays, peaks: Optional[List[np.ndarray]]
    ) -> Tuple[List[np.ndarray], Any]:
        """(this rank's norm of each tensor, where magnitudes are clipped). Norms are arrays of one
        number, infinite where values are not finite. A tensor's shared scale is the largest norm of
        all ranks. peaks are filled as by the kernel `norms`, and None with one scale."""

    def encode_all(
        self, grads: Arrays, states: Sequence[QuantizerState], steps: Steps
    ) -> Asking[List[Allreduce]]:
        size, several = steps[0].size, len(self.steps) > 1
        values, finite = self.draw(grads, states, steps)
        # What was drawn may be on the CPU.
        kernel = kernels.of(values[0])
        peaks = _peaks(values, states) if several else None
        norms, clip = self.norms_of(values, peaks)
        for norm, good in zip(norms, finite):
            if not good:
                norm.fill(math.inf)
        largest = yield [Allreduce(norm, "max") for norm in norms]
        for state, w in zip(states, largest):
            state.w = w
        shared = self._shared(states, size)
        if several:
            scales = kernel.encode_scales(
                values,
                peaks,
                spares([state.scales for state in states]),
                w=shared["w"],
                steps=self.steps,
                size=size,
            )
            for state, words in zip(states, scales):
                state.scales = words
            levels = yield [Allreduce(words) for words in scales]
            for state, counts in zip(states, levels):
                state.levels = counts
        words = kernel.quantize(
            values,
            _levels(states, self.steps),
            spares([state.buffer for state in states]),
            clip=clip,
            key=self.rounding_keys(states, steps),
            **shared,
        )
        for state, its in zip(states, words):
            state.buffer = its
        if states[0].rollbacks:
            sent = kernel.dequantize(
                words, _levels(states, self.steps), values, scale=1.0, **shared
            )
            for state, its, good in zip(states, values, sent):
                # The rounding error, what was drawn less what is sent, goes into the residual.
                (drawn,) = state.rollbacks
                if good:
                    state.arrays["residual"][drawn.indices] += drawn.values - its
                    state.rollbacks = [drawn._replace(values=its)]
        return [Allreduce(its, elements=each.size) for its, each in zip(words, values)]

    def decode_all(
        self,
        summed: Arrays,
        outs: Arrays,
        states: Sequence[QuantizerState],
        steps: Steps,
        scale: float,
    ) -> List[bool]:
        size = steps[0].size
        values = [
            out if state.indices is None else np.empty(state.indices.size, np.float32)
            for out, state in zip(outs, states)
        ]
        finite = kernels.of(values[0]).dequantize(
            summed, _levels(states, self.steps), values, scale=scale, **self._shared(states, size)
        )
        if self.sparse:
            for out, state, its, good in zip(outs, states, values, finite):
                if good:
                    out[state.indices] = its
                else:
                    out.fill(np.nan)
        return finite

    def _shared(self, states: Sequence[QuantizerState], size: int) -> Dict[str, Any]:
        """Options of kernels that are alike for the codes of all ranks."""
        return {
            "w": [state.w for state in states],
            "steps": self.steps,
            "width": _width(self.steps, size),
            "size": size,
        }


def _levels(states: Sequence[QuantizerState], steps: Sequence[float]) -> Optional[List[Any]]:
    return [state.levels for state in states] if len(steps) > 1 else None


def _peaks(values: Arrays, states: Sequence[QuantizerState]) -> List[np.ndarray]:
    """The states' memory for peaks of so many values."""
    for each, state in zip(values, states):
        stretches = -(-each.size // 64)
        if state.peaks is None or state.peaks.size != stretches:
            state.peaks = np.empty(stretches, np.uint32)
    return [state.peaks for state in states if state.peaks is not None]


def _width(steps: Sequence[float], size: int) -> int:
    """Bits of a field that holds any sum of `size` codes."""
    return (2 * size * int(steps[0])).bit_length()
