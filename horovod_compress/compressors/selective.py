"""The common part of compressors that choose their tensors: options, the dense fallback,
randomness, error feedback."""

import dataclasses
import hashlib
import math
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from ..kernels import Encoded
from .base import (
    LOCAL,
    NO_RATE,
    SHARED,
    Arrays,
    Compressor,
    Rollback,
    State,
    States,
    Step,
    Steps,
    zeros,
)
from .options import Count, Flag, OneOf, Patterns, option

# Of a residual in a step, so that it stays finite.
_MOST_GROWTH = 2.0**100


@dataclasses.dataclass(frozen=True, repr=False)
class SelectiveCompressor(Compressor):
    """A compressor that is not for every tensor: `dense_policy.compressor_for` gives small,
    one-dimensional and excluded ones what `dense` names, or `fallback()`."""

    transport: str = option(
        OneOf("horovod", "mpi"),
        "horovod",
        "what moves payloads: Horovod, while backward goes on; or MPI, all of a step at once",
    )
    seed: int = option(Count(), 0, "of everything that is drawn at random")
    min_numel: int = option(
        Count(),
        1024,
        "tensors with fewer elements, and one-dimensional ones, go dense; 0: every tensor is "
        "compressed",
    )
    exclude: Tuple[str, ...] = option(
        Patterns(), (), "names of tensors that go dense, as shell patterns"
    )
    dense: str = option(
        OneOf("fp32", "fp16", "int8"),
        "fp32",
        "how tensors that go dense travel; int8: rounded at random to 127 levels of the largest "
        "value on any rank",
    )

    def adapted(self, shape: Tuple[int, ...]) -> Optional[Compressor]:
        """This compressor with the options that suit a tensor of that shape, or None where
        compression does not pay."""
        return self

    def fallback(self) -> Optional[Compressor]:
        """The compressor of the tensors that this one does not compress, where that is another than
        `dense` names."""
        return None

    def key(self, *words: Any) -> int:
        """A 64-bit key that follows from the seed and `words`: tensor, step, and rank where ranks
        are to differ."""
        text = "/".join(map(str, (self.seed, *words)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def rounding_keys(self, states: States, steps: Steps) -> List[int]:
        """The keys by which this rank rounds these tensors at random in this step."""
        index, rank = steps[0].index, steps[0].rank
        return [self.key("rounding", state.name, index, rank) for state in states]


@dataclasses.dataclass(frozen=True, repr=False)
class GatheringCompressor(SelectiveCompressor):
    """Adds the option `hosts`, to algorithms whose payloads are gathered."""

    hosts: bool = option(
        Flag(),
        False,
        "first sum gradients within each host, in shared memory; each rank then compresses a part "
        "of the sum",
    )


@dataclasses.dataclass(frozen=True, repr=False)
class ErrorFeedback(GatheringCompressor):
    """A compressor that gathers payloads and keeps their error in `residual`. An optimizer
    multiplies results by the learning rate γ. Without `follow_lr` the residual is a gradient, which
    counts with the γ of the step that sends it. With `follow_lr` it stands for the deferred update
    γ·residual, and is rescaled when γ changes so that this update stays the same."""

    roles = {"residual": LOCAL, "lr": SHARED}
    # An option of some.
    follow_lr = False  # type: Optional[bool]

    def init(self, name: str, shape: Tuple[int, ...]) -> State:
        arrays = {"residual": zeros(math.prod(shape))}
        if self.follow_lr:
            # The γ that the residual is meant for; 0: none yet.
            arrays["lr"] = np.zeros(1)
        return State(name, arrays)

    def growth(self, state: State, step: Step) -> float:
        """The factor by which this step multiplies the residual: γ of the step before over γ of
        this one. At γ = 0 the optimizer applies nothing, so such a step counts as one with the γ
        before. What was kept before the first γ is known, is dropped."""
        if not self.follow_lr or step.lr is None or not step.lr >= NO_RATE:
            return 1.0
        last = state.arrays["lr"]
        before, last[0] = float(last[0]), step.lr
        return min(before / step.lr, _MOST_GROWTH)

    def encode_all(self, grads: Arrays, states: States, steps: Steps) -> List[Encoded]:
        residuals = [state.arrays["residual"] for state in states]
        payloads = self.pack_all(grads, residuals, states, steps)
        for state, payload in zip(states, payloads):
            state.rollbacks.append(Rollback("residual", None, payload.body))
        return payloads

    def accumulate_all(self, grads: Arrays, states: States, steps: Steps) -> Sequence[bool]:
        for state, step in zip(states, steps):
            residual, factor = state.arrays["residual"], self.growth(state, step)
            if factor != 1:
                residual *= np.float32(factor)
                np.clip(residual, -_MOST_GROWTH, _MOST_GROWTH, out=residual)
        return super().accumulate_all(grads, states, steps)

    def pack(self, grad: np.ndarray, residual: np.ndarray, state: State, step: Step) -> Encoded:
        """Adds the gradient to the residual, leaves the gradient zero, encodes the payload and
        subtracts that from the residual. A class overrides this or `pack_all`."""
        raise NotImplementedError(f"{self.id} needs a method pack")

    def pack_all(
        self, grads: Arrays, residuals: Arrays, states: States, steps: Steps
    ) -> List[Encoded]:
        """Packs tensors as `pack` does each of them."""
        return [self.pack(*each) for each in zip(grads, residuals, states, steps)]


def decide_follow_lr(compressor: Compressor, known: bool, default: bool) -> Compressor:
    """The compressor with `follow_lr` decided, by `default` where the user left it open. known:
    whether every step will have a learning rate. Raises ValueError where `follow_lr` needs one and
    there is none."""
    follow_lr = compressor.policy.follow_lr
    if follow_lr and not known:
        raise ValueError(
            f"{compressor.id}: follow_lr needs the optimizer, whose learning rate it follows"
        )
    # An option only of some.
    return (
        dataclasses.replace(compressor, **{"follow_lr": default})
        if follow_lr is None
        else compressor
    )
