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


def advice_for(compressor: Compressor, optimizer: Any) -> str:
    """The advice to compress updates, empty where gradients serve as well."""
    names = {each.__name__.lower() for each in type(optimizer).__mro__}
    if not (compressor.traits.prefers_updates and names & _DIVIDING):
        return ""
    return (
        f"{compressor.id} compresses gradients of {type(optimizer).__name__}, which divides by "
        "their second moments. Entries that come late and large mislead those: trainings ended up "
        "to 16 % above none, some above ranks that exchange nothing. Compress updates in place of "
        f"gradients: UpdateOptimizer(optimizer, …, compression={ADAM.spec!r}), on 2 ranks with "
        f"every={ADAM.every} (docs/guides/updates.md)"
    )
