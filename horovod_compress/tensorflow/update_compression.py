"""The exchange of what ranks' optimizers would add to the variables, between the ranks'
UpdateOptimizers."""

from typing import Any, Dict

import horovod.tensorflow as hvd
import tensorflow as tf

from ..adapters.updates import Averaging, compressor_for_updates
from .compression import BoundCompression


class UpdateCompression(Averaging, BoundCompression):
    """The exchange of an UpdateOptimizer. options: what else must be alike on all ranks,
    JSON-able."""

    def __init__(self, spec: Any, options: Dict[str, Any], process_set: Any) -> None:
        self._options = options
        super().__init__(spec, process_set=process_set)
        self.bind(None)

    def _description(self) -> Dict[str, Any]:
        return {**super()._description(), **self._options}

    def _average(self, names: str, tensors: Dict[str, Any]) -> None:
        for name, variable in tensors.items():
            wide = tf.cast(variable, at_least_float32(variable))
            mean = hvd.allreduce(
                wide, name=f"{names}.{name}", op=hvd.Average, process_set=self._process_set
            )
            variable.assign(tf.cast(mean, variable.dtype))

    def switch(self, spec: Any) -> None:
        """Another compression from the next exchange on; see `BoundCompression.switch`."""
        super().switch(compressor_for_updates(spec, hvd.rank()))


def at_least_float32(variable: Any) -> Any:
    """The type of what is added up of a variable's numbers."""
    return tf.float64 if variable.dtype == tf.float64 else tf.float32
