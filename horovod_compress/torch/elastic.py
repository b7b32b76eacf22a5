"""Elastic jobs, in which ranks come and go: nothing that ranks have not sent yet is lost.

    compression = hvdc.Compression.dgc(optimizer, model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression, epoch=0)

    @hvdc.elastic.run
    def train(state): ...

What training is owed is the mean over ranks of what they have not sent. Ranks that stay keep theirs and new ones get the mean of those, so
the mean stays. Where ranks leave in good order, `run` has all ranks take the mean before; after a crash it is that of those that are left.
"""
import functools
from typing import Any, Callable, Dict, Optional

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HostsUpdatedInterrupt
from horovod.torch.elastic.state import OptimizerStateHandler, StateHandler, TorchState, get_handler_registry

from .. import checkpoint
from . import horovod_internals
from .compression import BoundCompression


class CompressionHandler(StateHandler):
    """What hvd.elastic.TorchState(compression=…) does with a compression, in place of broadcasting rank 0's."""

    def __init__(self, compression: BoundCompression) -> None:
        super().__init__(compression)
        self._saved: Optional[Dict[str, Any]] = None
        self.save()

    def save(self) -> None:
        """Copies the state, into the memory of the last copy."""
        self._saved = self.value._exchange.state_dict(into=self._saved)

    def restore(self) -> None:
        """Goes back to the last copy. What is under way is given up, and not waited for."""
        self.value._go_back_to(self._saved)

    def sync(self) -> None:
        """All ranks go on from rank 0's step, as `checkpoint.synced` says."""
        self.value._sync()

    def set_value(self, value: BoundCompression) -> None:
        """Another compression takes the place of this one."""
        self._saved = None
        super().set_value(value)

    def even_out(self) -> None:
        """Gives all ranks the mean of what they keep, now and in their last copies, so that it does not matter who leaves."""
        compression, saved = self.value, self._saved
        compression._exchange.abandon()
        compression._go_back_to(_evened(compression, compression._exchange.state_dict()))
        self._saved = _evened(compression, saved)


class _Compressing(type):
    """The metaclass of a class whose instances are all optimizers of Horovod's that have a compression of ours."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.optim.Optimizer) and isinstance(horovod_internals.compression_of(instance), BoundCompression)


class CompressingOptimizer(metaclass=_Compressing):
    """What elastic states know such optimizers by."""


class OptimizerHandler(OptimizerStateHandler):
    """As Horovod's own. But the state of an SGD whose momentum is taken over has fewer tensors on ranks that have trained than on new ones."""

    def sync(self) -> None:
        """Rank 0's state becomes that of all ranks."""
        horovod_internals.prepare_to_broadcast(self.value)
        super().sync()


def _evened(compression: BoundCompression, state: Any) -> Dict[str, Any]:
    return checkpoint.synced(state, compression._transport, compression._label, even=True)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """hvd.elastic.run, for a function whose first argument is a TorchState that has compressions: where hosts come or go in good order, no rank
    that leaves takes anything with it. (With hvd.elastic.run itself what it has not sent yet is lost.)"""

    @functools.wraps(func)
    def evened(state: TorchState, *args: Any, **keywords: Any) -> Any:
        try:
            return func(state, *args, **keywords)
        except HostsUpdatedInterrupt:  # raised at the same call on all ranks, which are all still here
            for handler in horovod_internals.handlers_of(state):
                if isinstance(handler, CompressionHandler):
                    handler.even_out()
            raise

    return hvd.elastic.run(evened)


get_handler_registry()[:0] = [(BoundCompression, CompressionHandler), (CompressingOptimizer, OptimizerHandler)]
