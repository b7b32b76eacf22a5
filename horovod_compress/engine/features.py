"""The features beside an algorithm, and the tensors that go without it in a step."""

import logging
from typing import Callable, Collection, Dict, List, Sequence

from ..compressors.base import Step
from ..compressors.wrapper import unwrapped
from .debt import Handover
from .dense_policy import go_dense
from .feature import Feature
from .frozen import Frozen
from .group import Group
from .loss_scale import LossScale
from .tensor import Tensor

_log = logging.getLogger("horovod_compress")


class Features(Dict[str, Feature]):
    """Features by name, the innermost first.

    Args:
        dense_alone: where there is one rank only, nothing is held back, because nothing travels.
        go_dense: as of `dense_policy.go_dense`.

    Attributes:
        handover: hands over what a tensor kept under another compressor.
    """

    def __init__(
        self, dense_alone: bool, go_dense: Callable[[Group, Step], Collection[str]] = go_dense
    ) -> None:
        self.handover = Handover()
        super().__init__({"loss scale": LossScale(), "switch": self.handover, "frozen": Frozen()})
        self._dense_alone, self._go_dense = dense_alone, go_dense
        self._dense_was_logged = False

    def concerned(self, tensors: Sequence[Tensor], steps: Sequence[Step]) -> List[Feature]:
        """Those that take part in the steps of these tensors, the innermost first."""
        return [each for each in self.values() if each.concerns(tensors, steps)]

    def apart(self, group: Group, step: Step) -> Collection[str]:
        """The names of a group's tensors that go alone in this step, which are dense in it."""
        if self._dense_alone and step.size == 1:
            return [t.name for t in group.tensors if t.compressor.residual(t.state) is not None]
        dense = self._go_dense(group, step)
        if dense and not self._dense_was_logged:
            self._dense_was_logged = True
            if step.rank == 0:
                _log.warning(
                    "%s: at step %d gathering %s from %d ranks would move more than a dense "
                    "exchange does: it goes dense, and so do other tensors wherever that is so",
                    unwrapped(group.compressor).id,
                    step.index,
                    next(tensor.name for tensor in group.tensors if tensor.name in dense),
                    step.size,
                )
        owing = self.handover.owing(group.tensors)
        return {*dense, *owing} if owing else dense

    def switched(self) -> None:
        """Forgets what was of compressors that were replaced."""
        self["frozen"], self._dense_was_logged = Frozen(), False
