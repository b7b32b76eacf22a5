"""Top-k with error feedback (Aji, Heafield, EMNLP 2017, arXiv 1704.05021; Stich, Cordonnier, Jaggi,
NeurIPS 2018)."""

import dataclasses
import functools
import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from .. import kernels
from ..kernels.reference.sparse import VALUE_BITS
from .base import LOCAL, Arrays, State, States, Step, Steps, Traits
from .options import Auto, Count, Number, OneOf, option
from .selective import GatheringCompressor

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
        "with exchange=split, entries that come back to every rank, as a multiple of those that it "
        "sends; auto: 4, at most half the ranks",
    )
    decay: float = option(Number(0, 1), 1.0, "factor of the residual a step; 1: nothing is lost")

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

    def stage(self, index: int) -> float:
        return self.density(index)

    def entries(self, numel: int, step: int) -> Tuple[int, int]:
        """(chunk, k): how many elements k entries are the largest of, in a tensor of numel elements
        at this step."""
        sizes = self._sizes[numel, self.density(step)]
        return sizes.chunk, sizes.k

    @functools.cached_property
    def _sizes(self) -> "_Sizes":
        return _Sizes(self)

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> List[kernels.Encoded]:
        return self.select(grads, states, steps)

    def commit(self, state: State) -> None:
        # Not in `encode`: a step that is undone leaves the residual as it was.
        if self.decay != 1:
            state.arrays[self.traits.accumulator] *= np.float32(self.decay)

    def select(
        self,
        grads: Arrays,
        states: States,
        steps: Steps,
        momentum: float = 0.0,
        nesterov: bool = False,
        masks: Sequence[bool] = (),
    ) -> List[kernels.Encoded]:
        """Adds gradients to momenta u, where momentum is above 0, and to residuals, and moves the
        largest entries into payloads. Notes in each state's `rollbacks` what was taken out of it.

        Args:
            grads: of tensors; they are left zero, or as their step's base.
            states: theirs.
            steps: theirs.
            momentum: m of u.
            nesterov: u ← m·(u + g), as SGD's.
            masks: of each tensor whether u becomes 0 where an entry is sent, unless its whole chunk
                is; default: of none.

        Returns:
            Of each tensor the encoded entries; late on a device, and so are the notes.
        """
        first, array, density = steps[0], self.traits.accumulator, self.density(steps[0].index)
        vs = [state.arrays[array] for state in states]
        sizes = [self._sizes[v.size, density] for v in vs]
        # Some have one, as parameters of an UpdateOptimizer that need no copy.
        bases = [step.base for step in steps]
        payloads = kernels.of(grads[0]).encode_topk(
            grads,
            [state.arrays["u"] for state in states] if momentum else None,
            vs,
            base=bases if any([base is not None for base in bases]) else None,
            momentum=momentum,
            nesterov=nesterov,
            scale=first.scale,
            kind=self.values,
            masked=[size.late if mask else 0 for size, mask in zip(sizes, masks)] if masks else 0,
            k=[size.k for size in sizes],
            samples=[int(self.sample_ratio * v.size) + 256 for v in vs],
            offset=first.index,
            chunk=[size.chunk for size in sizes] if self.chunk else 0,
        )
        # Entries may be out of a device's states before they have come here.
        if isinstance(payloads, kernels.Late):
            for i, state in enumerate(states):
                state.undo = kernels.Late(functools.partial(_undo_of, payloads, i))
        else:
            for state, payload in zip(states, payloads):
                state.undo = payload.undo
        return payloads

    def rollback(self, state: State) -> None:
        state.restore(self.traits.accumulator, "u")


def _undo_of(payloads: Sequence[kernels.Encoded], number: int) -> tuple:
    return payloads[number].undo


class _Size(NamedTuple):
    """k entries are the largest of chunk elements; late: of how many elements, from the first on,
    chunks are longer than k."""

    chunk: int
    k: int
    late: int


class _Sizes(Dict[Tuple[int, float], _Size]):
    """By the elements of a tensor and the density, where reading what was there before is no
    call."""

    def __init__(self, topk: TopK) -> None:
        self._topk = topk

    def __missing__(self, key: Tuple[int, float]) -> _Size:
        (numel, density), topk = key, self._topk
        chunk = min(topk.chunk or numel, numel)
        least = 1 if topk.chunk else max(1, min(topk.min_k, numel // _MIN_SHARE))
        k = min(topk.k or max(least, math.ceil(density * chunk - 1e-6)), chunk)
        rest = numel if k == chunk else numel % chunk
        self[key] = size = _Size(chunk, k, numel - rest if rest <= k or k == chunk else numel)
        return size
