"""All that relies on how Horovod 0.28 is written inside, and nowhere says so: which gradients, of which variables, it reduces, and how."""
import functools
from typing import Any, Callable, Dict, Sequence, Tuple

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf

from ..binding import callers, check_version

check_version(horovod.__version__)
_FACTORS = ("process_set", "op", "prescale_factor", "postscale_factor")


def is_horovods(optimizer: Any) -> bool:
    """Whether this is what hvd.DistributedOptimizer makes."""
    return isinstance(optimizer, (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer)) and hasattr(optimizer, "_allreduce_grads")


def loss_scaler() -> Any:
    """The LossScaleOptimizer that scales the gradients which are being reduced: where it wraps Horovod's optimizer it is among the callers; else
    None. What it is given to apply it has unscaled already."""
    computing = (frame.f_locals.get("self") for frame in callers() if frame.f_code.co_name in ("compute_gradients", "_compute_gradients"))
    return next((owner for owner in computing if isinstance(owner, tf.keras.mixed_precision.LossScaleOptimizer)), None)


def _factor(known: Dict[str, Any]) -> float:
    ranks = known["process_set"].size() if known.get("op") == hvd.Sum else 1  # whose number may change while a trace is used
    return known.get("prescale_factor", 1.0) * known.get("postscale_factor", 1.0) * ranks


def traced(tensor: Any) -> Tuple[Sequence[Any], Sequence[Any], Callable[[], float], Any]:
    """(gradients, variables, a function that says what Horovod makes of a 1 on each rank, Horovod's optimizer or None) of the exchange in which
    this gradient is compressed. Horovod says neither, but has them in reach, in a function that reduces `grads` of `vars` by `op`."""
    found = None
    for known in (frame.f_locals for frame in callers()):
        grads, variables = known.get("grads"), known.get("vars")
        if found is None and isinstance(grads, (list, tuple)) and variables is not None and any(grad is tensor for grad in grads):
            found = grads, variables, functools.partial(_factor, {key: known[key] for key in _FACTORS if key in known})
        if found and is_horovods(known.get("self")):
            return *found, known["self"]
    if found:
        return *found, None
    raise ValueError(
        "this compression is for hvd.DistributedOptimizer and hvd.DistributedGradientTape of Horovod 0.28, which reduce the gradients "
        f"of variables; here comes a tensor of shape {tensor.shape} alone"
    )
