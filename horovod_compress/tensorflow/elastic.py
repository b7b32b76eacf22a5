"""Elastic jobs, in which ranks come and go: nothing that ranks have not sent yet is lost. See
`horovod_compress.session.elastic`.

    compression = hvdc.Compression.dgc()
    model.compile(hvd.DistributedOptimizer(optimizer, compression=compression), loss)
    state = hvdc.elastic.TensorFlowKerasState(model, compression=compression, epoch=0, batch=0)

    @hvdc.elastic.run
    def train(state): ...

Functions that were traced stay in use: Horovod's operations look at the number of ranks whenever
they run, and so do those of a compression.
"""

import functools
from typing import Any, Callable, Dict, List, Sequence

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from ..session.elastic import Entry, Kept, evening_out
from .compression import BoundCompression
from .graph import GraphCompression
from .horovod_internals import is_keras3
from .optimizer import build, unwrapped
from .unbound import UnboundCompression

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class _KeptGraph(Kept):
    """As of `Kept`, of gradients in graphs."""

    def go_back_to(self, state: Dict[str, Any]) -> None:
        super().go_back_to(state)
        self._session.port.variables.begin_anew(state["step"])


class _Keeping:
    """A mixin for Horovod's states: keywords that are compressions are not broadcast from rank 0,
    but kept as `Entry` says."""

    def _take(
        self, keywords: Dict[str, Any], bind: Callable[[UnboundCompression], BoundCompression]
    ) -> Dict[str, Any]:
        """Makes attributes of the compressions among the keywords, bound by `bind` where they are
        not yet; returns the others."""
        compressions = {
            name: value if isinstance(value, GraphCompression) else bind(value)
            for name, value in keywords.items()
            if isinstance(value, (GraphCompression, UnboundCompression))
        }
        vars(self).update(compressions)
        self._entries: List[Entry] = [
            Entry(_KeptGraph(compression._session)) for compression in compressions.values()
        ]
        return {name: value for name, value in keywords.items() if name not in compressions}

    def save(self) -> None:
        super().save()  # type: ignore[misc]
        for entry in self._entries:
            entry.save()

    def restore(self) -> None:
        for entry in self._entries:
            entry.restore()
        super().restore()  # type: ignore[misc]

    def sync(self) -> None:
        super().sync()  # type: ignore[misc]
        for entry in self._entries:
            entry.sync()
            entry.save()


class TensorFlowKerasState(_Keeping, hvd.elastic.TensorFlowKerasState):
    """hvd.elastic.TensorFlowKerasState, which is also horovod.tensorflow.keras' KerasState, for
    models whose optimizers compress.

    Args:
        model: built.
        optimizer: Horovod's; default: the one that the model was compiled with. It gets its
            variables here, because new ranks take no step before they have the others' state.
        **keywords: as for Horovod's, and compressions, by any name: compression=compression.
    """

    def __init__(self, model: tf.keras.Model, optimizer: Any = None, **keywords: Any) -> None:
        if is_keras3(optimizer or model.optimizer):
            raise ValueError(
                "Horovod's state of a model is for Keras 2: say TensorFlowState(variables), or "
                "have Keras 2, by TF_USE_LEGACY_KERAS=1 in the environment and pip install tf_keras"
            )
        keywords = self._take(
            keywords, lambda compression: compression.bind(unwrapped(optimizer or model.optimizer))
        )
        if model.built:
            build(optimizer or model.optimizer, model.trainable_variables)
        super().__init__(model, optimizer, **keywords)


class TensorFlowState(_Keeping, hvd.elastic.TensorFlowState):
    """hvd.elastic.TensorFlowState, for training loops of one's own with optimizers or tapes that
    compress.

    Args:
        variables: the model's and the optimizer's, whose values all ranks get from rank 0.
        **keywords: as for Horovod's, and compressions, by any name.

    Raises:
        ValueError: no variables.
    """

    def __init__(self, variables: Sequence[tf.Variable], **keywords: Any) -> None:
        if not variables:
            raise ValueError(
                "TensorFlowState needs the variables to keep: those of the model, and of the "
                "optimizer after optimizer.build()"
            )
        # Horovod's own broadcasts them here, where ranks that stay do not, and not in `sync`, where
        # they do: new ranks would wait for ever.
        super().__init__(**self._take(keywords, UnboundCompression.bind_in_reach))
        self.variables = list(variables)
        self._save_model()

    def sync(self) -> None:
        hvd.broadcast_variables(self.variables, root_rank=0)
        super().sync()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """hvd.elastic.run, for a function whose first argument is one of the states here: where hosts
    come or go in good order, no rank that leaves takes anything with it. (With hvd.elastic.run
    itself what it has not sent yet is lost, and an error of an operation that is not Horovod's ends
    training as if it were over.)"""
    evened = evening_out(func, lambda state: state._entries)

    @functools.wraps(func)
    def failing(*args: Any, **keywords: Any) -> Any:
        try:
            return evened(*args, **keywords)
        except tf.errors.UnknownError as error:
            # Which Horovod's drops, where it does not know the operation.
            known = any(
                f"Horovod{verb}" in error.message
                for verb in ("Allreduce", "Allgather", "Alltoall", "Broadcast")
            )
            raise (HorovodInternalError if known else RuntimeError)(error.message) from error

    return hvd.elastic.run(failing)
