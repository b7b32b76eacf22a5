"""DeMo's payload: the largest coefficients of chunks in the discrete cosine transform (Peng,
Quesnelle, Kingma, arXiv 2411.19870)."""

import dataclasses
import functools
import math
from typing import List, Sequence, Tuple, Union

import numpy as np

from .. import kernels
from ..kernels.reference.sparse import VALUE_BITS
from .base import LOCAL, Arrays, Rollback, States, Steps, Traits
from .options import Auto, Count, Number, OneOf, option
from .powersgd import matrix_of
from .selective import SelectiveCompressor


@dataclasses.dataclass(frozen=True, repr=False)
class DeMo(SelectiveCompressor):
    """Sends the k largest coefficients of each chunk of momentum in the discrete cosine transform,
    and keeps the rest for later steps.

        m ← β·m + g                  β = decay; m as a matrix, in chunks of h × w
        C = D_h · chunk · D_wᵀ       D the orthonormal DCT-II matrix; send the k largest |C| of each
        m ← m − D_hᵀ · sent · D_w    result = mean over ranks of D_hᵀ · sent · D_w

    The residual, DeMo's momentum m, decays in every step, gets the gradient added, and loses what
    its own coefficients decode to. The result is the mean of what all ranks' coefficients decode
    to. DeMo's optimizer applies the sign of that: signs are the optimizer's, not taken here.

    A tensor is taken as a matrix: its first dimensions make rows, the others columns, split where
    rows and columns are fewest together; a vector is one row. A chunk's height and width are the
    largest divisors of the matrix's height and width up to `chunk`.
    """

    id = "demo"
    traits = Traits(
        number=19,
        paper=("Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization, arXiv 2411.19870"),
        takes_scale=True,
    )
    roles = {"residual": LOCAL}

    chunk: int = option(Count(1, 512), 64, "height and width of a chunk, at most")
    k: int = option(Count(1, 2**32 - 1), 32, "coefficients of each chunk")
    decay: float = option(Number(0, 1), 0.999, "factor of the residual a step; 1: nothing is lost")
    values: str = option(
        OneOf(*VALUE_BITS),
        "fp32",
        "coefficients on the wire, as topk's; the residual keeps the error",
    )
    columns: Union[int, str] = option(
        Auto(Count(1, 2**32 - 1)),
        "auto",
        "columns of the matrix that a tensor is taken as; auto: by its shape",
    )

    def adapted(self, shape: Tuple[int, ...]) -> "DeMo":
        rows, columns = matrix_of(shape, 1)
        if self.columns == "auto":
            return dataclasses.replace(self, columns=max(rows if columns == 1 else columns, 1))
        if rows * columns % int(self.columns):
            raise ValueError(
                f"demo: columns={self.columns} does not divide the {rows * columns} elements of a "
                f"tensor of shape {shape}"
            )
        return self

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> List[kernels.Encoded]:
        payloads = kernels.of(grads[0]).encode_dct(
            grads,
            [state.arrays["residual"] for state in states],
            *self._transforms(grads),
            width=int(self.columns),
            k=self.k,
            decay=self.decay,
            scale=steps[0].scale,
            kind=self.values,
        )
        for state, payload in zip(states, payloads):
            state.rollbacks = [Rollback("residual", None, payload.body)]
        return payloads

    def accumulate_all(self, grads: Arrays, states: States, steps: Steps) -> Sequence[bool]:
        for state in states:
            state.arrays["residual"] *= np.float32(self.decay)
        return super().accumulate_all(grads, states, steps)

    def add_all(self, bodies: Arrays, outs: Arrays, scale: float) -> List[bool]:
        return kernels.of(outs[0]).decode_add_dct(
            outs, bodies, *self._transforms(outs), width=int(self.columns), scale=scale
        )

    def _transforms(self, tensors: Arrays) -> Tuple[List[np.ndarray], List[np.ndarray]]:
        """The matrices that transform rows, and those that transform columns, of the chunks that
        tensors are cut into."""
        width = int(self.columns)
        rows = [_dct(_divisor(tensor.size // width, self.chunk)) for tensor in tensors]
        return rows, [_dct(_divisor(width, self.chunk))] * len(tensors)


@functools.lru_cache(maxsize=None)
def _divisor(n: int, most: int) -> int:
    """The largest divisor of n up to `most`."""
    return next(d for d in range(min(max(n, 1), most), 0, -1) if n % d == 0)


@functools.lru_cache(maxsize=None)
def _dct(n: int) -> np.ndarray:
    """The orthonormal DCT-II matrix of n·n floats, a frequency in each row; the same ones on every
    machine."""
    waves = [
        [_cosine((2 * i + 1) * frequency % (4 * n), n) for i in range(n)] for frequency in range(n)
    ]
    norms = [math.sqrt((2 if frequency else 1) / n) for frequency in range(n)]
    return np.array(
        [norm * value for norm, wave in zip(norms, waves) for value in wave], np.float32
    )


def _cosine(parts: int, n: int) -> float:
    """Of so many n-th parts of a right angle. Where it is 0, the library's would be what rounding
    has left of it."""
    return 0.0 if parts % (2 * n) == n else math.cos(math.pi / 2 * parts / n)
