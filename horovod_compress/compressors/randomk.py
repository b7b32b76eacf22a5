"""Random-k with error feedback (Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018,
arXiv 1809.07599)."""

import dataclasses
import math
import struct

import numpy as np

from .. import kernels
from .base import Step, Traits
from .options import Number, option
from .selective import GatheringCompressor
from .state import LOCAL, Rollback, State


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

    def encode(self, grad: np.ndarray, state: State, step: Step) -> kernels.Encoded:
        residual = state.arrays["residual"]
        finite = self.accumulate(grad, state, step)
        count = (
            max(min(1, residual.size), math.ceil(self.ratio * residual.size - 1e-6))
            if finite
            else 0
        )
        key = self.key("own", state.name, step.index, step.rank)
        indices = kernels.cpu.draw_coordinates(key=key, numel=residual.size, first=0, count=count)
        values = kernels.of(grad).take_entries(indices, residual, None, kind="fp32", masked=0)[2]
        state.rollbacks.append(Rollback("residual", indices, values))
        return kernels.Encoded(kernels.new_body(struct.pack("<Q", key), values), count, finite)

    def add(self, body: np.ndarray, out: np.ndarray, scale: float) -> bool:
        if len(body) < 8 or (len(body) - 8) % 4 or (len(body) - 8) // 4 > out.size:
            raise ValueError("not a key and values for at most as many elements as the tensor has")
        (key,) = struct.unpack_from("<Q", body.data)
        values = np.frombuffer(body[8:].tobytes(), np.float32)
        indices = kernels.cpu.draw_coordinates(key=key, numel=out.size, first=0, count=len(values))
        return kernels.of(out).scatter_add(out, indices, values, scale=scale)
