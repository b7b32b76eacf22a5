"""Elastic jobs, in which ranks come and go: nothing that ranks have not sent yet is lost. See
`horovod_compress.session.elastic`.

    compression = hvdc.Compression.dgc(ratio=0.01)
    # An UpdateOptimizer needs no compression=.
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, compression=compression, epoch=0
    )

    @hvdc.elastic.run
    def train(state): ...
"""

import copy
from typing import Any, Callable, Dict, Iterator

import horovod.torch as hvd
import torch
from horovod.torch.elastic.state import (
    OptimizerStateHandler,
    StateHandler,
    TorchState,
    get_handler_registry,
)

from ..protocol.handshake import gather
from ..session.elastic import Entry, Kept, evening_out
from ..torch_common.optimizers import GradScaler
from ..torch_common.steps import Steps
from . import horovod_internals
from .compression import BoundCompression
from .unbound import UnboundCompression, compression_of
from .updates import KeptUpdates, UpdateOptimizer

__all__ = ["run"]


class _KeptSteps(Kept):
    """As of `Kept`, of gradients."""

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps.session)
        self._steps = steps

    def go_back_to(self, state: Dict[str, Any]) -> None:
        super().go_back_to(state)
        self._steps.takeover.restore()

    def sync(self) -> None:
        self._steps.options_agreed = False
        scaler, ranks = self._steps.grad_scaler, self._session.ranks
        # Its scale is one of those that all ranks must have alike.
        if scaler is not None:
            states = gather(ranks.transport, "hvdc.elastic.scaler", scaler.state_dict())
            scaler.load_state_dict(states[0])
        super().sync()


class CompressionHandler(Entry, StateHandler):
    """The handler of a compression in hvd.elastic.TorchState(compression=…), and of an
    UpdateOptimizer, whose optimizer's state is each rank's own, in place of broadcasting rank
    0's."""

    def __init__(self, value: Any) -> None:
        self.set_value(value)

    def set_value(self, value: Any) -> None:
        """Holds another compression or UpdateOptimizer from now on."""
        self.value = value.the_only() if isinstance(value, UnboundCompression) else value
        is_optimizer = isinstance(value, UpdateOptimizer)
        kept = KeptUpdates(value) if is_optimizer else _KeptSteps(self.value._steps)
        Entry.__init__(self, kept)


class _Compressing(type):
    """The metaclass of a class whose instances are all optimizers of Horovod's that have a
    compression of ours."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.optim.Optimizer) and compression_of(instance) is not None


class CompressingOptimizer(metaclass=_Compressing):
    """The class by which elastic states know such optimizers."""


class OptimizerHandler(OptimizerStateHandler):
    """As Horovod's own. But the state of an SGD whose momentum is taken over has fewer tensors on
    ranks that have trained than on new ones."""

    def sync(self) -> None:
        """Rank 0's state becomes that of all ranks."""
        horovod_internals.prepare_to_broadcast(self.value)
        super().sync()

    def restore(self) -> None:
        """Goes back to the last copy, and keeps that: PyTorch's optimizers go on in the tensors
        that they are given."""
        self.value.load_state_dict(copy.deepcopy(self._saved_optimizer_state))


class ScalerHandler(OptimizerStateHandler):
    """A GradScaler that an elastic state is given stays the object which it is, as an optimizer
    does, because compressions and training loops look at it."""

    def sync(self) -> None:
        """Rank 0's state becomes that of all ranks."""
        self.value.load_state_dict(hvd.broadcast_object(self.value.state_dict(), root_rank=0))
        self.save()


def _entries_of(state: TorchState) -> Iterator[Entry]:
    return (
        handler for handler in horovod_internals.handlers_of(state) if isinstance(handler, Entry)
    )


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """hvd.elastic.run, for a function whose first argument is a TorchState that has compressions:
    where hosts come or go in good order, no rank that leaves takes anything with it. (With
    hvd.elastic.run itself what it has not sent yet is lost.)"""
    return hvd.elastic.run(evening_out(func, _entries_of))


get_handler_registry()[:0] = [
    ((BoundCompression, UnboundCompression, UpdateOptimizer), CompressionHandler),
    (CompressingOptimizer, OptimizerHandler),
    (GradScaler, ScalerHandler),
]
