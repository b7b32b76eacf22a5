"""The two decisions to send a tensor densely.

By its name and shape: small, one-dimensional and excluded tensors get a dense compressor. By bytes:
a step goes dense where payloads of all ranks would be more than a dense exchange.
"""

import fnmatch
import math
from typing import Collection, Sequence, Tuple

from ..compressors.base import Compressor, Step
from ..compressors.dense import dense_compressor
from ..compressors.selective import SelectiveCompressor
from .group import Group
from .names import bare_name
from .tensor import Tensor

# Of measured payloads that were too large: what trying again costs is at most one part in so many.
_TRIES = 16


def compressor_for(compressor: Compressor, name: str, shape: Tuple[int, ...]) -> Compressor:
    """The compressor of a tensor of this name and shape, where `compressor` is configured. Whether
    it compresses does not depend on how the tensor is cut, so that states can be cut anew."""
    if not isinstance(compressor, SelectiveCompressor):
        return compressor
    # A shard's has the tensor's own beside it (`ShardShape` of torch_common/shards.py).
    names, whole = {name, bare_name(name)}, getattr(shape, "whole", shape)
    excluded = any(
        fnmatch.fnmatchcase(name, pattern) for name in names for pattern in compressor.exclude
    )
    small = compressor.min_numel and (len(whole) < 2 or math.prod(whole) < compressor.min_numel)
    adapted = None if excluded or small else compressor.adapted(whole)
    if adapted and whole is not shape:
        adapted = compressor.adapted(shape) or adapted
    return adapted or compressor.fallback() or dense_compressor(compressor.dense, compressor.seed)


def go_dense(group: Group, step: Step) -> Collection[str]:
    """The names of a group's tensors of which gathering this step's payloads would bring a rank
    more than a ring allreduce of the tensor does: by what the compressor knows beforehand, or by
    the size of the last gathered payloads. Alike on all ranks."""
    stage = group.compressor.stage(step.index), step.size
    if stage not in group.dense:
        bits = [t.compressor.payload_bits(t.numel, step) for t in group.tensors]
        group.measured = None in bits
        group.dense.clear()
        group.dense[stage] = frozenset(
            tensor.name
            for tensor, its in zip(group.tensors, bits)
            if its is not None and times_dense(its, step.size) > 1
        )
    if group.measured:
        late = [t.name for t in group.tensors if step.index < t.dense_until]
        return group.dense[stage].union(late) if late else group.dense[stage]
    return group.dense[stage]


def note_sizes(tensors: Sequence[Tensor], lengths: Sequence[int], step: Step) -> None:
    """Decides from the bytes of all ranks' payloads of a step, alike on all ranks, whether the next
    ones go dense. For compressors that do not know it beforehand."""
    for tensor, length in zip(tensors, lengths):
        # As many payloads of their mean size.
        if 8 * length > 64 * tensor.numel > 0:
            times = 8 * length / step.size / tensor.numel
            tensor.dense_until = step.index + 1 + math.ceil(_TRIES * times_dense(times, step.size))


def times_dense(bits: float, payloads: float) -> float:
    """The bits that an exchange of payloads brings a rank, over those of a dense exchange.

    A ring allreduce of float32 brings 2·(N−1)/N·32 bits an element. Payloads of `bits` an element
    bring (N−1)·bits where N are gathered, and (N−1)/N·payloads·bits where they are split.
    """
    return payloads * bits / 64
