"""Records of the steps of model.fit, for files, callables and TensorBoard."""

from typing import Any

from ..engine.recording import Destination
from .applied_gradients import TellsOfIdling
from .compression import BoundCompression


class RecordSteps(TellsOfIdling):
    """compression.record(to, every, by_tensor), for model.fit: tells the recorder when a batch has
    ended.

    Where one execution takes several steps (steps_per_execution), the last one counts.

    Args:
        compression: the one that Horovod's optimizer got.
        to: as of `BoundCompression.record`.
        every: as of `BoundCompression.record`.
        by_tensor: as of `BoundCompression.record`.
    """

    def __init__(
        self,
        compression: BoundCompression,
        to: Destination,
        every: int = 10,
        by_tensor: bool = False,
    ) -> None:
        super().__init__(compression)
        self._options = to, every, by_tensor
        # A Recorder, once training has begun.
        self._recorder: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._recorder = self._recorder or self._compression.record(*self._options)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._recorder.step_ended()
