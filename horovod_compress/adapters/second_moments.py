"""A warning for compressions whose gradients mislead an optimizer's second moments."""

from typing import Any

from ..compressors.advice import ADAM
from ..compressors.base import Compressor

# Optimizers that divide by the size of earlier gradients, by the names of their classes.
_DIVIDING = frozenset(
    [
        "adam",
        "adamw",
        "adamax",
        "nadam",
        "radam",
        "sparseadam",
        "lamb",
        "adagrad",
        "adadelta",
        "adafactor",
        "rmsprop",
    ]
)


def _divides(optimizer: Any) -> bool:
    """Whether an optimizer of any framework is one of these, or of a class derived from one."""
    return any(each.__name__.lower() in _DIVIDING for each in type(optimizer).__mro__)


def advice_for(compressor: Compressor, optimizer: Any) -> str:
    """The advice to compress updates, empty where gradients serve as well."""
    if not (compressor.traits.prefers_updates and _divides(optimizer)):
        return ""
    return (
        f"{compressor.id} compresses gradients of {type(optimizer).__name__}, which divides by "
        "their second moments. Entries that come late and large mislead those: trainings ended up "
        "to 16 % above none, some above ranks that exchange nothing. Compress updates in place of "
        f"gradients: UpdateOptimizer(optimizer, …, compression={ADAM.spec!r}), on 2 ranks with "
        f"every={ADAM.every} (docs/guides/updates.md)"
    )
