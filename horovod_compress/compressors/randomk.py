"""Random-k with error feedback (Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018,
arXiv 1809.07599)."""

import dataclasses
import math
import struct
from typing import List

import numpy as np

from .. import kernels
from .base import LOCAL, Arrays, Rollback, States, Step, Steps, Traits
from .options import Number, option
from .selective import GatheringCompressor


@dataclasses.dataclass(frozen=True, repr=False)
class RandomK(GatheringCompressor):
    """Sends ratio·d entries of the accumulated gradient, each rank its own random ones, and keeps
    the others in a residual.

        v ← residual + g;  send v at ⌈ratio·d⌉ random places;  residual ← v − sent

    Only values travel, and the key from which receivers draw the same indices. It is the baseline
    for topk. Where all ranks should draw the same indices, so that payloads add up, see
    globalrandk.
    """

    id = "randomk"
    traits = Traits(
        number=7,
        paper=(
            "Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018, arXiv 1809.07599"
        ),
        takes_scale=True,
    )
    roles = {"residual": LOCAL}

    ratio: float = option(
        Number(0, 1, low_open=True), 0.01, "share of a tensor's elements sent in a step"
    )

    def payload_bits(self, numel: int, step: Step) -> float:
        return 32 * self.ratio

    def stage(self, index: int) -> None:
        return None

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> List[kernels.Encoded]:
        residuals = [state.arrays["residual"] for state in states]
        finite = self.accumulate_all(grads, states, steps)
        keys = [
            self.key("own", state.name, step.index, step.rank) for state, step in zip(states, steps)
        ]
        drawn = [
            _drawn(key, residual.size, self._count(residual.size) if good else 0)
            for key, residual, good in zip(keys, residuals, finite)
        ]
        taken = kernels.of(grads[0]).take_entries(drawn, residuals, None, kind="fp32", masked=0)
        payloads = []
        for state, key, good, (indices, _, values, _) in zip(states, keys, finite, taken):
            state.rollbacks.append(Rollback("residual", indices, values))
            body = kernels.new_body(struct.pack("<Q", key), values)
            payloads.append(kernels.Encoded(body, len(values), good))
        return payloads

    def _count(self, numel: int) -> int:
        return max(min(1, numel), math.ceil(self.ratio * numel - 1e-6))

    def add_all(self, bodies: Arrays, outs: Arrays, scale: float) -> List[bool]:
        for body, out in zip(bodies, outs):
            if len(body) < 8 or (len(body) - 8) % 4 or (len(body) - 8) // 4 > out.size:
                raise ValueError(
                    "not a key and values for at most as many elements as the tensor has"
                )
        values = [np.frombuffer(body[8:].tobytes(), np.float32) for body in bodies]
        drawn = [
            _drawn(int.from_bytes(body[:8].tobytes(), "little"), out.size, its.size)
            for body, out, its in zip(bodies, outs, values)
        ]
        return kernels.of(outs[0]).scatter_add(outs, drawn, values, scale=scale)


def _drawn(key: int, numel: int, count: int) -> np.ndarray:
    """The places of `count` entries, of a tensor of numel elements, that follow from a key."""
    return kernels.cpu.draw_coordinates(key=key, numel=numel, first=0, count=count)
