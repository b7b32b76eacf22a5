"""Top-k with error feedback (Aji, Heafield, EMNLP 2017, arXiv 1704.05021; Stich, Cordonnier, Jaggi,
NeurIPS 2018)."""

import dataclasses
import functools
import math
from typing import Optional, Tuple, Union

import numpy as np

from .. import kernels
from ..kernels.reference.sparse import VALUE_BITS
from .base import Asking, Encoding, Step, Traits
from .options import Auto, Count, Number, OneOf, option
from .selective import GatheringCompressor
from .state import LOCAL, Rollback, State

# One in so many elements is the largest share that min_k makes a tensor send.
_MIN_SHARE = 32


@functools.lru_cache(maxsize=None)
def _entry_bits(density: float, values: str) -> float:
    """Bits of an entry: its value, and the entropy of its index."""
    return VALUE_BITS[values] + math.log2(1 / density) + 1.44


@dataclasses.dataclass(frozen=True, repr=False)
class TopK(GatheringCompressor):
    """Sends the ratio·d entries of largest accumulated gradient and keeps the others in a residual
    for later steps.

        v ← β·residual + g;  send v at the k largest |v|, k = ⌈ratio·d⌉, or min_k    β = decay
        residual ← v − sent

    The ordinary optimizer works on the mean; with Adam compress its updates instead
    (UpdateOptimizer). A dense step sends the residual of all elements. With `chunk` the entries are
    those of each chunk of so many elements, as in SparseLoCo (arXiv 2508.15706), whose code for
    values is `values=2bit`, and whose residual decays.
    """

    id = "topk"
    traits = Traits(
        number=6,
        paper=(
            "Aji, Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017, "
            "arXiv 1704.05021"
        ),
        on_device=True,
        takes_base=True,
        takes_scale=True,
        prefers_updates=True,
    )
    roles = {"residual": LOCAL}

    ratio: float = option(
        Number(0, 1, low_open=True), 0.001, "share of a tensor's elements sent in a step"
    )
    sample_ratio: float = option(
        Number(0, 1, low_open=True), 0.01, "share of elements sampled for the threshold"
    )
    values: str = option(
        OneOf(*VALUE_BITS),
        "fp32",
        "values on the wire; power: sign and 3-bit exponent; 2bit: means of four bins; sign: a "
        "mean; the residual keeps the error",
    )
    chunk: Optional[int] = option(
        Count(1, 2**32 - 1, optional=True),
        None,
        "the largest are chosen of each chunk of so many elements, exactly; none: of a tensor",
    )
    k: Optional[int] = option(
        Count(1, 2**32 - 1, optional=True),
        None,
        "entries of each chunk, or tensor, instead of a ratio",
    )
    min_k: int = option(
        Count(1, 2**32 - 1),
        32,
        "entries of a tensor at least, where ratio says fewer, up to a share of 1/32; not of "
        "chunks",
    )
    exchange: str = option(
        OneOf("gather", "split"),
        "gather",
        "gather: every rank gets all ranks' entries; split: their sums are made by a rank for each "
        "part of the model, which sends the largest to all",
    )
    accept: Union[float, str] = option(
        Auto(Number(1)),
        "auto",
        "with exchange=split, how many times the entries that a rank sends all ranks get; auto: 4, "
        "at most half the ranks",
    )
    decay: float = option(Number(0, 1), 1.0, "of the residual, a step; 1: nothing is lost")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hosts and self.exchange == "split":
            raise ValueError(f"{self.id}: give hosts=true or exchange=split, not both")

    def density(self, step: int) -> float:
        """The share of elements sent at this step."""
        return self.ratio

    def payload_bits(self, numel: int, step: Step) -> Optional[float]:
        chunk, k = self.entries(numel, step.index)
        return k / chunk * _entry_bits(k / chunk, self.values) if chunk else 0.0

    def entries(self, numel: int, step: int) -> Tuple[int, int]:
        """(chunk, k): how many elements k entries are the largest of, in a tensor of numel elements
        at this step."""
        chunk = min(self.chunk or numel, numel)
        least = 1 if self.chunk else max(1, min(self.min_k, numel // _MIN_SHARE))
        return chunk, min(self.k or max(least, math.ceil(self.density(step) * chunk - 1e-6)), chunk)

    def encode(self, grad: np.ndarray, state: State, step: Step) -> Encoding:
        return self.select(grad, state, step)

    def commit(self, state: State) -> None:
        super().commit(state)
        # Not in `encode`: a step that is undone leaves the residual as it was.
        if self.decay != 1:
            state.arrays[self.traits.accumulator] *= np.float32(self.decay)

    def select(
        self,
        grad: np.ndarray,
        state: State,
        step: Step,
        momentum: float = 0.0,
        nesterov: bool = False,
        masked: int = 0,
    ) -> Encoding:
        """Adds the gradient to momentum u, where it is above 0, and to the residual, and moves the
        selection into a payload. masked: u becomes 0 where an element below is sent."""
        v = state.arrays[self.traits.accumulator]
        chunk, k = self.entries(v.size, step.index)
        # Plainly on the CPU, because this comes for every tensor.
        plainly = isinstance(grad, np.ndarray)
        encoded = (kernels.cpu.encode_topk if plainly else kernels.encode_topk)(
            grad,
            state.arrays.get("u") if momentum else None,
            v,
            base=step.base,
            momentum=momentum,
            nesterov=nesterov,
            scale=step.scale,
            kind=self.values,
            masked=masked,
            k=k,
            samples=int(self.sample_ratio * v.size) + 256,
            offset=self.key(state.name, step.index) & 0xFFFFFFFF,
            chunk=chunk if self.chunk else 0,
        )
        return self._selected(encoded, state) if plainly else self._asked(encoded, state)

    def _asked(self, asking: Asking[kernels.Encoded], state: State) -> Asking[kernels.Encoded]:
        return self._selected((yield from asking), state)

    def _selected(self, encoded: kernels.Encoded, state: State) -> kernels.Encoded:
        """Notes how a rollback restores what was selected."""
        indices, rows = encoded.undo
        state.rollbacks = [Rollback(self.traits.accumulator, indices, rows[0], True)]
        if len(rows) > 1:
            state.rollbacks.append(Rollback("u", indices, rows[1], True))
        return encoded
