"""The base of the features beside an algorithm, which look at the steps of a driver's tensors, or
change them."""

from typing import Any, Sequence

from ..compressors.base import Step
from .tensor import Tensor


class Feature:
    """A feature beside the algorithm.

    A driver holds one for each feature, by the feature's name. Later ones are around earlier ones:
    they begin first, and end last. The methods change nothing unless a subclass overrides them.
    """

    def concerns(self, tensors: Sequence[Tensor], steps: Sequence[Step]) -> bool:
        """Returns whether the steps of tensors that go together have to do with the feature."""
        return True

    def begin(
        self, tensors: Sequence[Tensor], grads: Sequence[Any], steps: Sequence[Step]
    ) -> Sequence[Step]:
        """Begins the steps of tensors that go together.

        Args:
            tensors: whose steps begin.
            grads: their flat gradients of this rank, which may be changed in place.
            steps: what is known of each.

        Returns:
            What is to be known of each.
        """
        return steps

    def encoded(self, tensors: Sequence[Tensor], payloads: Sequence[Any]) -> None:
        """Called with the payloads, which may be changed, before they travel."""

    def decoded(
        self, tensors: Sequence[Tensor], results: Sequence[Any], finite: Sequence[bool]
    ) -> Sequence[bool]:
        """Called with the results, which may be changed.

        Args:
            tensors: as of `begin`.
            results: flat float32.
            finite: of each, whether it is.

        Returns:
            Of each, whether it is finite now.
        """
        return finite

    def ended(self, tensors: Sequence[Tensor], succeeded: bool) -> None:
        """Called when steps are committed or rolled back."""

    def step_ended(self) -> None:
        """Called after a step of all tensors, where the driver knows of its end."""
