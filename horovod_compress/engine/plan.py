"""Which compressor each tensor gets: the configured one, or a dense one for small, one-dimensional
and excluded tensors."""

import fnmatch
import math
from typing import Tuple

from ..compressors.base import Compressor
from ..compressors.dense import dense_compressor
from ..compressors.selective import SelectiveCompressor

# Where torch.compile puts a model: no module of a user's is called so.
_COMPILED = "_orig_mod"


def without_compiled(name: str) -> str:
    """A parameter's name as it is where its model, or the part that it is in, is not compiled."""
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def compressor_for(compressor: Compressor, name: str, shape: Tuple[int, ...]) -> Compressor:
    """The compressor of a tensor of this name and shape, where `compressor` is configured."""
    if not isinstance(compressor, SelectiveCompressor):
        return compressor
    names = {name, without_compiled(name)}
    excluded = any(
        fnmatch.fnmatchcase(name, pattern) for name in names for pattern in compressor.exclude
    )
    small = compressor.min_numel and (len(shape) < 2 or math.prod(shape) < compressor.min_numel)
    adapted = None if excluded or small else compressor.adapted(shape)
    return adapted or compressor.fallback() or dense_compressor(compressor.dense, compressor.seed)
