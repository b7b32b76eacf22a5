"""Keras optimizers that a compression serves: what it asks of them, and how it sees their passes
and what they apply."""

from typing import Any, Callable, Dict, List, Optional, Type

import tensorflow as tf

from ..session.callers import callers
from ..session.notices import warn_once
from .horovod_internals import (
    change_class_below,
    class_below,
    is_horovods,
    is_keras3,
    is_optimizer,
    momentum_to_restore,
    saved_by_keras,
    values_of,
)

# Packages whose functions have no optimizers of users in reach.
_NO_USERS = ("horovod", "horovod_compress", "keras", "tensorflow", "tf_keras")
SGD = (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD)


def check(optimizer: Any) -> None:
    """Raises where an optimizer cannot be bound."""
    if not is_optimizer(optimizer):
        raise ValueError(
            f"a compression is bound to a Keras optimizer, or to None; not to an object of "
            f"{type(optimizer)}"
        )
    if is_horovods(optimizer):
        raise ValueError(
            "bind the compression to the optimizer itself, and wrap that in "
            "hvd.DistributedOptimizer afterwards"
        )
    if hasattr(optimizer, "inner_optimizer"):
        raise ValueError(
            "bind the inner optimizer, wrap that in hvd.DistributedOptimizer, and the result in "
            "LossScaleOptimizer (model.compile "
            "does the last by itself under a mixed_float16 policy)"
        )


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that a LossScaleOptimizer wraps; others as they are."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def optimizers_in_reach() -> List[Any]:
    """The Keras optimizers that a user's function can name, of the nearest caller that has any:
    among its variables, those around it, the attributes of `self`, and the globals that it
    mentions."""
    for frame in callers():
        if str(frame.f_globals.get("__name__")).split(".")[0] in _NO_USERS:
            continue
        # A notebook's has all that was ever made.
        known = {} if frame.f_locals is frame.f_globals else frame.f_locals
        mentioned = (frame.f_globals.get(name) for name in frame.f_code.co_names)
        attributes = getattr(known.get("self"), "__dict__", {})
        found = list(filter(is_optimizer, [*known.values(), *mentioned, *attributes.values()]))
        if found:
            return found
    return []


def name_of(optimizer: Any) -> str:
    """The name of a new or legacy optimizer."""
    legacy = isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer)
    return str(optimizer._name if legacy else optimizer.name)


def options_of(sgd: Any) -> Dict[str, Any]:
    """The configuration of an SGD, also while a function is traced, with the momentum that the user
    gave it."""
    changed = momentum_to_restore()
    with tf.init_scope():
        return sgd.get_config() if changed is None else {**sgd.get_config(), "momentum": changed}


def learning_rate_of(optimizer: Any) -> Any:
    """The learning rate, a tensor, that an optimizer will apply in the step whose gradients are
    being traced; NaN where the optimizer is not known, or has none."""
    if "learning_rate" in getattr(optimizer, "_hyper", ()):  # a legacy one
        steps_of(optimizer)
        return optimizer._decayed_lr(tf.float32)
    rate = getattr(optimizer, "_learning_rate", None)
    if rate is None:
        return tf.constant(float("nan"))
    # The value that the optimizer has computed from a schedule is that of the step before.
    return tf.cast(rate(optimizer.iterations) if callable(rate) else rate, tf.float32)


def steps_of(optimizer: Any) -> Any:
    """How many steps an optimizer has taken, a tensor."""
    # The legacy one makes its variable when it is asked for the first time.
    with tf.init_scope():
        taken = optimizer.iterations
    return tf.convert_to_tensor(taken)


def watch_passes(optimizer: Any, observe: Callable[[Any], Any]) -> None:
    """Has observe(gradients and variables) called in every backward pass, ahead of Horovod's
    aggregation."""
    if is_keras3(optimizer):
        raise ValueError(
            "moments=microbatch has to see every backward pass, which Keras 3 does not show: say "
            "moments=minibatch"
        )
    own: Any = own_class(optimizer)
    method = (
        "_compute_gradients"
        if isinstance(optimizer, tf.keras.optimizers.legacy.Optimizer)
        else "compute_gradients"
    )

    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        return observe(getattr(own, method)(self, *args, **kwargs))

    become(optimizer, own, **{method: compute})


def before_applying(optimizer: Any, change: Callable[[Any, Any], Any]) -> Type:
    """From now on this optimizer, Horovod's or what Horovod makes of it, applies what
    change(optimizer, gradients and variables) returns. Horovod's says once that it is saved without
    its compression. Returns the class of both."""
    base: Any = class_below(optimizer)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        return base.apply_gradients(self, change(self, grads_and_vars), *args, **kwargs)

    # To which Keras 3's apply_gradients() comes, too.
    @tf.autograph.experimental.do_not_convert
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        variables = list(trainable_variables or self._trainable_variables)
        changed = change(self, zip(grads, values_of(variables)))
        base.apply(self, [grad for grad, _ in changed], variables)

    def get_config(self: Any) -> Dict[str, Any]:
        if is_horovods(self) and saved_by_keras():
            warn_once(
                "a saved model's optimizer has no compression: hvd.load_model(path, "
                "compression=compression) gives it one again, and without compression= "
                "training goes on uncompressed. What ranks have not sent yet is in "
                "compression.state_dict()"
            )
        return base.get_config(self)

    step = {"apply": apply} if is_keras3(optimizer) else {"apply_gradients": apply_gradients}
    return become(optimizer, base, get_config=get_config, **step)


def build(optimizer: Any, variables: Any) -> None:
    """Makes the variables that an optimizer keeps for these, which it else makes in its first
    step."""
    (optimizer.build if hasattr(optimizer, "build") else optimizer._create_all_weights)(variables)


def own_class(optimizer: Any) -> Type:
    """The class of an optimizer, as it was before an earlier binding changed it."""
    cls: Any = class_below(optimizer)
    while "_bound_to_compression" in vars(cls):
        cls = cls.__base__
    return cls


def become(optimizer: Any, base: Any, **members: Any) -> Type:
    """Changes the class to one derived from `base`, with more members, because Horovod makes its
    own optimizer from that and the configuration, or Horovod's base, where it has made its own.
    Under the old names, by which Keras saves it. Returns the class."""
    cls = type(base)(base.__name__, (base,), {"_bound_to_compression": True, **members})
    for name in (
        "__qualname__",
        "__module__",
        "__doc__",
        *(key for key in vars(base) if key.startswith("_keras_api_names")),
    ):
        setattr(cls, name, getattr(base, name))
    registered = tf.keras.utils.get_registered_name(base)
    if registered != base.__name__:  # by a user, or by us
        package, _, name = registered.rpartition(">")
        # The last one is what Keras makes when it loads that name.
        for each in (cls, tf.keras.utils.get_registered_object(registered)):
            tf.keras.utils.register_keras_serializable(package, name)(each)
    change_class_below(optimizer, cls)
    return cls


class Serving:
    """The optimizers that a compression serves.

    Attributes:
        bound: the one that it is bound to; where a tape brings gradients, the one that applies
            them.
        is_bound: True once that is known, also where nobody knows it.
        horovods: Horovod's, where gradients come from that.
        cls: the class of optimizers that tell what they apply, and can leave momentum to the
            compression.
        watches: True where backward passes can be seen.
        takes_over: True where an SGD's momentum is taken over.
        lives_on: True where momentum that an SGD has gathered by itself still moves variables,
            though it is taken over.
        factor: returns what Horovod makes of a 1 on each rank; None until that is known.
    """

    def __init__(self) -> None:
        self.bound: Any = None
        self.is_bound = False
        self.horovods: Any = None
        self.cls: Optional[Type] = None
        self.watches = self.takes_over = self.lives_on = False
        self.factor: Callable[[], Any] = lambda: None

    @property
    def stepping(self) -> Any:
        """The one that takes steps; None where it is not known."""
        return self.horovods or self.bound

    def gain(self, takes_over: bool) -> float:
        """The sum that the optimizer's own momentum makes of a result of 1: 1/(1 − m), and 1
        where it is taken over."""
        optimizer = self.stepping
        momentum = (
            float(options_of(optimizer)["momentum"])
            if isinstance(optimizer, SGD) and not takes_over
            else 0.0
        )
        return 1 / (1 - momentum) if momentum < 1 else 1.0

    def check(self, optimizer: Any, elastic: bool) -> None:
        """ValueError where the compression is bound to another optimizer than Horovod's that
        reduces."""
        if optimizer is None or isinstance(optimizer, self.cls or ()):
            return
        if self.takes_over:
            raise ValueError(
                "this compression has taken over the momentum of another optimizer than the one it "
                "serves, which would apply its own besides: "
                "bind it to the optimizer that hvd.DistributedOptimizer gets, and make a new one "
                "for each"
            )
        if elastic and self.cls:
            raise ValueError(
                "this compression is bound to another optimizer than the one it serves, which "
                "would not apply what a rank that is left alone holds "
                "back: bind it to the optimizer that hvd.DistributedOptimizer gets"
            )
