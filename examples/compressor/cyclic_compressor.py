"""A compressor in a package of its own: `pip install ./examples/compressor`, and "cyclic:every=10"
is a spec like any other.

The entry point in pyproject.toml is all that horovod_compress needs to find it, in PyTorch,
TensorFlow, `simulate` and `hvdcompress`.
"""

import dataclasses
import struct

import numpy as np

from horovod_compress import kernels
from horovod_compress.compressors.base import Traits
from horovod_compress.compressors.options import Count, option
from horovod_compress.compressors.selective import ErrorFeedback


@dataclasses.dataclass(frozen=True, repr=False)
class Cyclic(ErrorFeedback):
    """Sends every n-th element of the accumulated gradient, beginning one further in each step, and
    keeps the others.

    After n steps each element was sent once. The body of a payload: the first index, 4 bytes, then
    float32 values.
    """

    id = "cyclic"
    traits = Traits(paper="none: an example")

    every: int = option(Count(low=1), 10, "n: one of so many elements is sent in a step")

    def payload_bits(self, numel, step):
        return 32 / self.every

    def pack(self, grad, residual, state, step):
        # Into the residual; the gradient is zero then.
        finite = self.accumulate(grad, state, step)
        first = step.index % self.every
        values = residual[first :: self.every].copy()
        residual[first :: self.every] = 0
        return kernels.Encoded(
            kernels.new_body(struct.pack("<I", first), values), values.size, finite
        )

    def add(self, body, out, scale):
        first, values = (
            int.from_bytes(body[:4].tobytes(), "little"),
            np.frombuffer(body[4:].tobytes(), np.float32),
        )
        its = out[first :: self.every]
        if first >= self.every or values.size != its.size:
            raise ValueError("not a first index and the values of every n-th element from there")
        its += np.float32(scale) * values
        return bool(np.isfinite(its).all())
