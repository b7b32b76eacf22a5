"""bfloat16: float32's range with 8 bits of precision."""

import dataclasses
from typing import List

from .. import kernels
from .base import Arrays, Compressor, States, Steps, Traits, spares


@dataclasses.dataclass(frozen=True, repr=False)
class BFloat16(Compressor):
    """Gathers bfloat16 and sums it in float32: Horovod's MPI and Gloo backends do not reduce
    bfloat16.

    Two ranks move half the bytes of float32. An allgather's bytes grow with the ranks, so for many
    of them fp16 moves less. Elements are rounded to nearest, ties to even; those beyond bfloat16's
    range become its largest finite value.
    """

    id = "bf16"
    traits = Traits(
        number=16,
        paper="-",
        on_device=True,
        element_bits=16,
    )

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> List[kernels.Encoded]:
        buffers = spares([state.buffer for state in states])
        payloads = kernels.of(grads[0]).encode_bf16(grads, buffers)
        # A device does not use it again.
        for state, payload in zip(states, payloads) if isinstance(payloads, list) else ():
            state.buffer = payload.buffer
        return payloads

    def add_all(self, bodies: Arrays, outs: Arrays, scale: float) -> List[bool]:
        return kernels.of(outs[0]).decode_add_bf16(outs, bodies, scale=scale)
