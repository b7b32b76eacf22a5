"""Half precision, summed as such by the reducer: what Horovod's own Compression.fp16 does."""

import dataclasses
import warnings
from typing import List, Sequence, Tuple

import numpy as np

from .. import kernels
from ..protocol.requests import FLOAT32, Collective, ToReducer
from .base import Arrays, State, States, Step, Traits
from .none import NoCompression

_LARGEST = 65504
# Halfway to the next: what is as large rounds to infinity.
_INFINITE = 65520


@dataclasses.dataclass(frozen=True, repr=False)
class Float16(NoCompression):
    """Dense float16, summed over ranks in float16.

    A finite number that rounds beyond 65504 becomes infinity, as in Horovod's own. Then no rank's
    result is finite, a GradScaler skips the step, and `stats()["overflows"]` counts each such
    tensor. The first time there is a warning.
    """

    id = "fp16"
    traits = Traits(
        number=2,
        paper="-",
        on_device=True,
    )

    def collectives(self, size: int) -> Tuple[Collective, ...]:
        return (Collective("reducer", "float16"),)

    def encode(self, grad: np.ndarray, state: State, step: Step) -> ToReducer:
        if step.scale != 1:
            grad *= np.float32(step.scale)
        half = state.buffer = (
            np.empty_like(grad, dtype=np.float16)
            if state.buffer is None
            else kernels.beside(state.buffer, grad)
        )
        if isinstance(grad, np.ndarray):
            largest = kernels.of(grad).encode_float16([grad], [half.view(np.uint16)])
            _count_overflows([state], largest)
        else:
            # Horovod needs it at once. Overflow is looked for in `decode_dense_all`, before results
            # take the gradients' place.
            np.copyto(half, grad)
        return ToReducer(half)

    def decode_dense_all(
        self, reduced: Arrays, outs: Arrays, states: States, scale: float
    ) -> List[bool]:
        if isinstance(outs[0], np.ndarray) or reduced[0].dtype == FLOAT32:
            return super().decode_dense_all(reduced, outs, states, scale)
        largest = kernels.of(outs[0]).max_abs(outs)
        finite = super().decode_dense_all(reduced, outs, states, scale)

        def counted(its: Sequence[bool]) -> List[bool]:
            _count_overflows(states, largest)
            return list(its)

        return kernels.then(finite, counted)


def _count_overflows(states: States, largest: Sequence[float]) -> None:
    """Counts gradients, by their largest magnitudes, that are finite, and not in float16."""
    for state, its in zip(states, largest):
        if _INFINITE <= its < np.inf:
            if not state.overflows:
                warnings.warn(
                    f"horovod_compress: {state.name} has elements beyond {_LARGEST}, which are "
                    "infinite in float16: scale the loss down, or leave this tensor out with "
                    "another compression's exclude=",
                    RuntimeWarning,
                    stacklevel=1,
                )
            state.overflows += 1
