"""bfloat16: float32's range with 8 bits of precision."""

import dataclasses

import numpy as np

from .. import kernels
from .base import Asking, Compressor, Decoded, Step, Traits
from .state import State


@dataclasses.dataclass(frozen=True, repr=False)
class BFloat16(Compressor):
    """Gathers bfloat16 and sums it in float32: Horovod's MPI and Gloo backends do not reduce
    bfloat16.

    Two ranks move half the bytes of float32. An allgather's bytes grow with the ranks, so for many
    of them fp16 moves less. Nothing finite becomes infinite. Elements are rounded to nearest, ties
    to even.
    """

    id = "bf16"
    traits = Traits(
        number=16,
        paper="-",
        on_device=True,
    )

    def payload_bits(self, numel: int, step: Step) -> float:
        return 16

    def encode(self, grad: np.ndarray, state: State, step: Step) -> Asking[kernels.Encoded]:
        encoded = yield from kernels.encode_bf16(grad, state.buffer)
        state.buffer = encoded.buffer
        return encoded

    def add(self, body: np.ndarray, out: np.ndarray, scale: float) -> Decoded:
        # Plainly on the CPU, because this comes for every payload of every rank.
        if isinstance(out, np.ndarray):
            return kernels.cpu.decode_add_bf16(out, body, scale=scale)
        return kernels.decode_add_bf16(out, body, scale=scale)
