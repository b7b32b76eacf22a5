"""AdamW for Keras on ranks that see a part of each batch."""

from typing import Any, Dict, Optional, Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from ..session.updates import AVERAGED, check_ranks
from .horovod_internals import is_horovods


@tf.keras.utils.register_keras_serializable("horovod_compress")
class AdamW(tf.keras.optimizers.AdamW):  # type: ignore[misc]
    """AdamW whose steps are as large on a rank's part of each batch as on the whole of it, for
    `UpdateOptimizer`: as of `horovod_compress.torch.AdamW`, which says how.

        spec = "adacomp:bin_length=64,dense=fp16"
        optimizer = hvdc.UpdateOptimizer(hvdc.AdamW(1e-3), spec, every=2)

    With ranks=1 its steps are those of keras.optimizers.AdamW. Another variable is kept for each
    one that is trained.

    Args:
        learning_rate: as of keras.optimizers.AdamW.
        weight_decay: as of keras.optimizers.AdamW.
        ranks: on how many ranks' samples each exchange's mean rests; default: hvd.size().
        name: as of keras.optimizers.AdamW.
        **options: as of keras.optimizers.AdamW, but for amsgrad.

    Raises:
        ValueError: bad options, or the first step under hvd.DistributedOptimizer.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        weight_decay: float = 0.004,
        *,
        ranks: Optional[int] = None,
        name: str = "AdamW",
        **options: Any,
    ) -> None:
        check_ranks(ranks)
        super().__init__(learning_rate, weight_decay, name=name, **options)
        if self.amsgrad:
            raise ValueError("hvdc.AdamW has no amsgrad: leave it out")
        self.ranks = ranks

    def build(self, var_list: Sequence[Any]) -> None:
        """Makes the variables that are kept: means, mean squares, and squared signals."""
        built = getattr(self, "built", getattr(self, "_built", False))
        super().build(var_list)
        if not built:
            self._signals = [
                self.add_variable_from_reference(variable, "q") for variable in var_list
            ]

    def update_step(self, gradient: Any, variable: Any, *rate: Any) -> None:
        """A step with this rank's gradient. rate: the learning rate, in Keras 3."""
        if is_horovods(self):
            raise ValueError(AVERAGED)
        places = getattr(self, "_trainable_variables_indices", None) or self._index_dict
        index, dtype = places[self._var_key(variable)], variable.dtype
        mean, square, signal = self._momentums[index], self._velocities[index], self._signals[index]
        grad, before = tf.convert_to_tensor(gradient), tf.cast(self.iterations, dtype)
        beta1, beta2 = tf.cast(self.beta_1, dtype), tf.cast(self.beta_2, dtype)
        square.assign_add((tf.square(grad) - square) * (1 - beta2))
        # Of the gradients before this one.
        unbiased = tf.math.divide_no_nan(mean, 1 - beta1**before)
        known = tf.reduce_any(tf.not_equal(signal, 0))
        signal.assign(tf.where(known, signal + (grad * unbiased - signal) * (1 - beta2), square))
        mean.assign_add((grad - mean) * (1 - beta1))
        share = tf.cast(1 / (self.ranks or hvd.size()), dtype)
        root = tf.sqrt(share * square + (1 - share) * tf.maximum(signal, 0))
        rate = (
            tf.cast(self.learning_rate, dtype)
            * tf.sqrt(1 - beta2 ** (before + 1))
            / (1 - beta1 ** (before + 1))
        )
        variable.assign_sub(mean * rate / (root + self.epsilon))

    def get_config(self) -> Dict[str, Any]:
        """As of Keras's, with ranks."""
        config = {**super().get_config(), "ranks": self.ranks}
        del config["amsgrad"]
        return config
