"""The exchange of what ranks' optimizers would add to the variables, between the ranks'
UpdateOptimizers."""

from typing import Any, Dict, List, Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from ..handshake import agree
from ..updates import compressor_for_updates, differing
from .compression import BoundCompression


class UpdateCompression(BoundCompression):
    """The exchange of an UpdateOptimizer. options: what else must be alike on all ranks,
    JSON-able."""

    def __init__(self, spec: Any, options: Dict[str, Any], process_set: Any) -> None:
        self._options = options
        super().__init__(spec, process_set=process_set)
        self.bind(None)

    def _description(self) -> Dict[str, Any]:
        return {**super()._description(), **self._options}

    def average(self, variables: Sequence[Any]) -> None:
        """Makes variables their mean over ranks, which all have as many of the same shapes.
        MismatchError where they have not."""
        if not self._active:
            return
        names = f"{self._label}.state"
        advice = "Where a rank has taken no step yet, call average_state() later"
        agree(
            self._transport,
            names,
            [variable.shape.as_list() for variable in variables],
            "called average_state()",
            advice,
        )
        self._mean(names, variables)

    def make_alike(self, method: str, sums: List[int], variables: Sequence[Any]) -> None:
        """Makes variables their mean over ranks where they differ. method: what all ranks have
        called; sums: a checksum of each variable."""
        if not self._active:
            return
        which = differing(self._transport, self._label, method, sums)
        self._mean(f"{self._label}.{method}", [variables[i] for i in which])

    def _mean(self, names: str, variables: Sequence[Any]) -> None:
        for i, variable in enumerate(variables):
            wide = tf.cast(variable, at_least_float32(variable))
            mean = hvd.allreduce(
                wide, name=f"{names}.{i}", op=hvd.Average, process_set=self._process_set
            )
            variable.assign(tf.cast(mean, variable.dtype))

    def switch(self, spec: Any) -> None:
        """Another compression from the next exchange on; see `BoundCompression.switch`."""
        super().switch(compressor_for_updates(spec, hvd.rank()))


def at_least_float32(variable: Any) -> Any:
    """The type of what is added up of a variable's numbers."""
    return tf.float64 if variable.dtype == tf.float64 else tf.float32
