"""AdaComp (Chen, Choi, Brand, Agrawal, Zhang, Gopalakrishnan, AAAI 2018, arXiv 1712.02679)."""

import dataclasses
from typing import List, Sequence, Tuple, Union

import numpy as np

from .. import kernels
from .base import LOCAL, Arrays, State, Steps, Traits
from .options import Auto, Count, Number, option
from .selective import GatheringCompressor

_CONVOLUTION, _FULLY_CONNECTED = 50, 500
_NOTHING = np.empty(0, np.uint32), 0.0


@dataclasses.dataclass
class AdaCompState(State):
    """pending is (indices, scale) of the last payload, still to be subtracted from the residual."""

    pending: Tuple[np.ndarray, float] = _NOTHING


@dataclasses.dataclass(frozen=True, repr=False)
class AdaComp(GatheringCompressor):
    """Cuts a tensor into bins, and sends of each bin the elements whose
    |residual + scale_factor·gradient| is at least the largest |residual + gradient|.

        G = residual + g,  H = residual + scale_factor·g
        of each bin of bin_length elements: gmax = max |G|; an element is sent where |H| ≥ gmax > 0
        sent = sign(G)·scale,  scale = mean of gmax over the tensor's bins;  residual ← G − sent

    What was sent is subtracted in the next step's pass
    over the residual. How many elements are sent adapts to the layer and the phase of training, so
    there is no warm-up. The ordinary optimizer works on the mean; with Adam compress its updates
    instead (UpdateOptimizer).
    """

    id = "adacomp"
    traits = Traits(
        number=4,
        paper=(
            "Chen et al., AdaComp: Adaptive Residual Gradient Compression, AAAI 2018, arXiv "
            "1712.02679"
        ),
        on_device=True,
        state_type=AdaCompState,
        prefers_updates=True,
    )
    roles = {"residual": LOCAL}

    bin_length: Union[int, str] = option(
        Auto(Count(1, 2**32 - 1)),
        "auto",
        "elements of a bin; auto: 50 for what has a convolution's shape, 500 for all else",
    )
    scale_factor: float = option(Number(1), 2.0, "of the newest gradient in H: the soft threshold")

    def adapted(self, shape: Tuple[int, ...]) -> "AdaComp":
        length = _CONVOLUTION if _is_convolution(shape) else _FULLY_CONNECTED
        return dataclasses.replace(self, bin_length=length) if self.bin_length == "auto" else self

    def encode_all(
        self, grads: Arrays, states: Sequence[AdaCompState], steps: Steps
    ) -> List[kernels.Encoded]:
        payloads = kernels.of(grads[0]).encode_adacomp(
            grads,
            [state.arrays["residual"] for state in states],
            [state.pending[0] for state in states],
            sent_scale=[state.pending[1] for state in states],
            bin_length=self.bin_length,
            scale_factor=self.scale_factor,
        )
        for state in states:
            # The kernel has subtracted it.
            state.pending = _NOTHING

        def noted(payloads: Sequence[kernels.Encoded]) -> List[kernels.Encoded]:
            for state, payload in zip(states, payloads):
                state.sent = payload.undo
            return list(payloads)

        return kernels.then(payloads, noted)

    def commit(self, state: AdaCompState) -> None:
        if state.sent is not None:
            state.pending = state.sent

    def apply_pending(self, state: AdaCompState) -> None:
        (indices, scale), state.pending = state.pending, _NOTHING
        residual = state.arrays["residual"]
        residual[indices] -= np.copysign(np.float32(scale), residual[indices])


def _is_convolution(shape: Tuple[int, ...]) -> bool:
    """Returns whether a tensor has the shape of a convolution's kernel: two dimensions of channels,
    and small extents in space, which come last (PyTorch) or first (Keras). Two or three extents
    count as small up to 32 each. Attention kernels of as many dimensions, (d, 3, heads, key), have
    no such end where the key size is larger. A single extent can look like the heads or the key
    size of an attention kernel, (d, heads, key) or (heads, key, d). So it must be odd and from 3 to
    63, which heads and key sizes hardly ever are, or come last and be at most 15, which is below
    key sizes. A shape with heads·key = d is attention."""
    extents = len(shape) - 2
    if extents < 1:
        return False
    if extents > 1:
        return max(shape[:extents]) <= 32 or max(shape[-extents:]) <= 32
    first, middle, last = shape
    if first == middle * last or first * middle == last:
        return False
    return 2 <= last <= 15 or any(extent % 2 == 1 and 3 <= extent <= 63 for extent in (first, last))
