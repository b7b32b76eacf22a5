"""UpdateOptimizer's steps in Keras 3, whose variables hold one of TensorFlow each."""

from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf

from .horovod_internals import values_of


class Kept:
    """Variables that an optimizer of Keras 3 keeps, by the methods of Keras 2."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @property
    def iterations(self) -> tf.Variable:
        return self._optimizer._iterations.value

    def variables(self) -> List[tf.Variable]:
        return values_of(self._optimizer.variables)

    def add_variable(self, shape: Any, dtype: Any, initializer: str, name: str) -> tf.Variable:
        dtype, name = tf.as_dtype(dtype).name, name.replace("/", "_")
        return self._optimizer.add_variable(shape, initializer, dtype, name=name).value

    def add_variable_from_reference(
        self, variable: tf.Variable, name: str, initial_value: Any
    ) -> tf.Variable:
        kept = self._optimizer.add_variable_from_reference(variable, name=name).value
        kept.assign(initial_value)
        return kept


def steps_in(base: Any, rounds: Any) -> Dict[str, Any]:
    """Methods of a class derived from `base`, that of an optimizer: its steps are those of `base`
    within rounds."""

    def build(self: Any, variables: Sequence[Any]) -> None:
        base.build(self, variables)
        if rounds.keeps:
            rounds.build(values_of(variables))

    # All ways to take a step lead here.
    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Optional[Any] = None) -> None:
        variables = list(trainable_variables or self._trainable_variables)
        with tf.init_scope():
            if not self.built:
                self.build(variables)
            elif rounds.keeps:
                # It was built before it exchanged.
                rounds.build(values_of(self._trainable_variables))
        pairs = list(zip(grads, values_of(variables)))
        rounds.step(self, lambda: base.apply(self, grads, variables), pairs)
        for variable in variables:
            # Which TensorFlow's variable does not know.
            if getattr(variable, "constraint", None) is not None:
                variable.assign(variable.constraint(variable))

    return {"build": build, "apply": apply}
