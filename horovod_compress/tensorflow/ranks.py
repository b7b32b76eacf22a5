"""Horovod's ranks in TensorFlow, and its collectives outside of graphs."""

import functools
from typing import Any, Callable

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from ..session.process_sets import HorovodRanks, ProcessSetRanks
from ..transport.loopback import Loopback


class TensorFlowRanks(HorovodRanks):
    """The ranks of a process set of horovod.tensorflow. Payloads are moved by operations of
    graphs; the transport is for what ranks compare outside of those."""

    def __init__(self, process_set: Any) -> None:
        super().__init__(hvd, process_set, "variables need not be named in TensorFlow, and ")

    def transport_of(self, compressor: Any) -> Any:
        return Eager(self.process_set) if self.active else Loopback.group(1)[0]


class Eager(ProcessSetRanks):
    """Horovod's collectives while no graph runs: for what ranks compare before they exchange
    gradients, and for portable states. They go through graphs all the same: eagerly Horovod ignores
    names, and threads that trace at once would get each other's messages."""

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        return self._run(hvd.allgather, name, payload)

    def allreduce(self, name: str, array: np.ndarray) -> Callable[[], np.ndarray]:
        return self._run(functools.partial(hvd.allreduce, op=hvd.Sum), name, array)

    def _run(
        self, collective: Callable[..., Any], name: str, array: np.ndarray
    ) -> Callable[[], np.ndarray]:
        with tf.init_scope(), tf.device("/cpu:0"):
            sent = tf.constant(array)
            collective = functools.partial(
                collective, name=name, ignore_name_scope=True, process_set=self._process_set
            )
            try:
                return (
                    tf.function(collective, autograph=False).get_concrete_function(sent)(sent).numpy
                )
            except tf.errors.UnknownError as error:
                raise HorovodInternalError(str(error)) from error
