"""An SGD whose momentum a momentum-correcting compression takes over."""

import logging
from typing import Any, Callable, Optional

import horovod.tensorflow as hvd
import tensorflow as tf

from .horovod_internals import class_below
from .optimizer import SGD, become, options_of, own_class

_log = logging.getLogger("horovod_compress")


def is_plain_sgd(optimizer: Any) -> bool:
    """Returns whether this is an SGD without momentum: it adds the learning rate times the result
    to variables."""
    return isinstance(optimizer, SGD) and not options_of(optimizer)["momentum"]


def own_step_of(sgd: Any) -> str:
    """The method in which an SGD's class takes steps, where that is not Keras's, so that its
    momentum cannot be taken over; else empty."""
    own: Any = own_class(sgd)
    known = next(cls for cls in SGD if issubclass(own, cls))
    method = "update_step" if hasattr(known, "update_step") else "_resource_apply_dense"
    return "" if getattr(own, method) is getattr(known, method) else f"{own.__name__}.{method}"


def leave_momentum(
    optimizer: Any, covers: Callable[[Any], bool], lives_on: Callable[[], bool]
) -> None:
    """From now on this SGD, Horovod's or what Horovod makes of it, leaves momentum to the
    compression where that covers a variable, which is asked in each trace: then dense gradients
    take plain steps. lives_on: whether what SGD's own momentum has gathered before still moves
    variables. Its configuration stays the user's, decoupled weight decay stays with it."""
    # Another compression's, where that serves other variables.
    base: Any = class_below(optimizer)

    # rate: the learning rate, in Keras 3.
    def update_step(self: Any, gradient: Any, variable: Any, *rate: Any) -> None:
        if isinstance(gradient, tf.IndexedSlices) or not covers(variable):
            return base.update_step(self, gradient, variable, *rate)
        if lives_on():
            base.update_step(self, tf.zeros_like(gradient), variable, *rate)
        variable.assign_sub(gradient * tf.cast(self.learning_rate, variable.dtype))

    # The legacy optimizer's.
    def _resource_apply_dense(
        self: Any, grad: Any, var: Any, apply_state: Optional[dict] = None
    ) -> Any:
        if not covers(var):
            return base._resource_apply_dense(self, grad, var, apply_state)
        if lives_on():
            base._resource_apply_dense(self, tf.zeros_like(grad), var, apply_state)
        key = var.device, var.dtype.base_dtype
        rate = ((apply_state or {}).get(key) or self._fallback_apply_state(*key))["lr_t"]
        return tf.raw_ops.ResourceApplyGradientDescent(var=var.handle, alpha=rate, delta=grad)

    become(optimizer, base, update_step=update_step, _resource_apply_dense=_resource_apply_dense)


def tell_of_takeover(optimizer: Any, id: str, momentum: float, nesterov: bool) -> None:
    """Has rank 0 say that an SGD's momentum is taken over."""
    clips = [
        key
        for key in ("clipnorm", "clipvalue", "global_clipnorm")
        if getattr(optimizer, key, None) is not None
    ]
    if hvd.rank() == 0:
        _log.warning(
            "%s applies momentum=%g%s in place of SGD%s",
            id,
            momentum,
            " (nesterov)" if nesterov else "",
            f"; {', '.join(clips)} will see gradients with momentum, consider clip_norm instead"
            if clips
            else "",
        )
