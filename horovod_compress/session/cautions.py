"""Warnings for compressions that have cost accuracy in the way in which they are used."""

from typing import Any, Iterator

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


def cautions(compressor: Compressor, optimizer: Any) -> Iterator[str]:
    """Advice against compressing gradients of this optimizer so: why, and an alternative."""
    names = {each.__name__.lower() for each in type(optimizer).__mro__}
    if compressor.traits.prefers_updates and names & _DIVIDING:
        yield (
            f"{compressor.id} compresses gradients of {type(optimizer).__name__}, which divides by "
            "their second moments. Entries that come late and large mislead those: trainings ended "
            "up to 66 % above none, some above ranks that exchange nothing. Compress updates in "
            "place of gradients: UpdateOptimizer(optimizer, …, "
            f"compression={ADAM.spec!r}), on 2 ranks with every={ADAM.every} "
            "(docs/guides/updates.md)"
        )
    if "moments" in compressor.config and compressor.policy.moments == "minibatch":
        yield (
            f"{compressor.id} with moments=minibatch takes the gradient of a step for one sample. "
            "That is not the paper's, and trainings (one seed each) ended 1.9 and 2.1 points below "
            "none's accuracy, and 9.4 % above its loss. Give "
            "moments=per_sample (PyTorch), or microbatch with backward_passes_per_step, and an "
            "alpha of 0.5 to 1 (docs/algorithms/variance.md)"
        )
