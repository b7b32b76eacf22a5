"""What compressors share that choose their tensors: the common options, the fallback, randomness, error feedback."""
import dataclasses
import fnmatch
import hashlib
import math
from abc import abstractmethod

from .base import Compressor, State, zeros
from .fp16 import Float16
from .none import NoCompression
from .options import Choice, Count, Patterns, option

DENSE = {"fp32": NoCompression(), "fp16": Float16()}


@dataclasses.dataclass(frozen=True, repr=False)
class SelectiveCompressor(Compressor):
    """A compressor that leaves small, one-dimensional and excluded tensors to another one, `fallback()`."""

    transport: str = option(
        Choice("horovod", "mpi"), "horovod", "what moves payloads: Horovod, while backward goes on; or MPI, all of a step at once"
    )
    seed: int = option(Count(), 0, "of everything that is drawn at random")
    min_numel: int = option(
        Count(), 1024, "tensors with fewer elements, and one-dimensional ones, go dense; 0: every tensor is compressed"
    )
    exclude: tuple = option(Patterns(), (), "names of tensors that go dense, as shell patterns")
    dense: str = option(Choice("fp32", "fp16"), "fp32", "how tensors that go dense travel")

    def for_tensor(self, name, shape):
        excluded = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)
        small = self.min_numel and (len(shape) < 2 or math.prod(shape) < self.min_numel)
        return self.fallback() if excluded or small else self

    def fallback(self):
        """The compressor of the tensors that this one leaves alone."""
        return DENSE[self.dense]

    def key(self, *words):
        """64 bits that follow from the seed and `words`: tensor, step, and rank where ranks are to differ."""
        text = "/".join(map(str, (self.seed, *words)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclasses.dataclass(frozen=True, repr=False)
class ErrorFeedback(SelectiveCompressor):
    """A compressor that gathers payloads and keeps in `residual` what they do not say."""

    def init(self, name, shape):
        return State(name, {"residual": zeros(math.prod(shape))})

    def encode(self, grad, state, step):
        state.taken = self.pack(grad, state.arrays["residual"], state, step)
        return state.taken

    @abstractmethod
    def pack(self, grad, residual, state, step):
        """Adds the gradient to the residual, leaves it zero, and takes the Gathered payload out of the residual."""

    def rollback(self, state):
        if state.taken is not None:
            self.add(state.taken.body, state.arrays["residual"], 1.0)
        state.taken = None
