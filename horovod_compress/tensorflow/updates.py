"""Keras optimizers whose ranks exchange what they would add to the variables, compressed, in place
of gradients."""

import functools
from typing import Any, Callable, Dict, Optional, Sequence

import tensorflow as tf

from ..compressors.advice import ADAM
from ..session.notices import warn_once
from ..session.ranks import is_elastic
from ..session.updates import Nesterov, check_ranks_of_set, check_rounds, methods_of
from .adam import AdamW
from .horovod_internals import (
    KERAS,
    is_horovods,
    is_keras3,
    is_optimizer,
    saved_by_keras,
    values_of,
)
from .optimizer import become, build, unwrapped
from .update_rounds import Rounds, refuse_averages


def UpdateOptimizer(
    optimizer: Any,
    compression: Any = ADAM.spec,
    *,
    every: int = 1,
    outer: Optional[Nesterov] = None,
    process_set: Any = None,
) -> Any:
    """Makes a Keras optimizer a compressed one.

    Each rank takes its own step with its own gradients. What the step adds to the variables is
    compressed with error feedback and exchanged, and all ranks add the mean. So the optimizer's
    momentum, second moments, weight decay and learning rate are inside what is sent, and nothing is
    taken over from it.

        optimizer = hvdc.UpdateOptimizer(
            keras.optimizers.AdamW(1e-3), "adacomp:bin_length=64,dense=fp16"
        )
        model.compile(optimizer, loss)

    It takes the place of hvd.DistributedOptimizer: Horovod reduces no gradients, and tapes stay as
    they are. Variables are bit-identical on all ranks after each exchange,
    and rank 0's before the first step; the optimizer's own state is each rank's. Where an update is
    not finite on some rank, no rank's variables move, and what was to be sent waits for the next
    exchange, where a residual is kept of it.

    Args:
        optimizer: an optimizer of Keras 2 or 3; one that scales losses (mixed precision) goes in as
            keras.mixed_precision.LossScaleOptimizer(optimizer). With `every` or `outer` it keeps
            the variables that all ranks share, and the outer momentum, among its own, with which
            Keras saves them.
        compression: a spec, as for `horovod_compress.get_compressor`, or
            hvdc.Compression.adacomp(…); default: what is advised for Adam. dgc selects as topk
            does here.
        every: how many local steps come before each exchange (H of DiLoCo, arXiv 2311.08105). In
            between ranks' variables differ: `ShareUpdates` makes them alike before the model is
            evaluated or saved.
        outer: what is done with the mean update; default: it is added. `hvdc.Nesterov()` is
            DiLoCo's.
        process_set: the ranks that exchange; default: all.

    Returns:
        The optimizer itself, changed: its `compression` has stats(), switch() and all else that a
        BoundCompression has.

    Raises:
        ValueError: bad options, or an elastic job.
        TypeError: what is no optimizer.
        MismatchError: at the first step, on all ranks: they were started differently.
    """
    check_rounds(every, outer)
    if isinstance(unwrapped(optimizer), AdamW):
        check_ranks_of_set(unwrapped(optimizer).ranks, process_set)
    _check(optimizer, every > 1 or outer is not None)
    rounds = Rounds(optimizer, compression, every, outer, process_set)
    become(optimizer, type(optimizer), **_members(optimizer, rounds))
    return optimizer


def _check(optimizer: Any, keeps: bool) -> None:
    """Raises what UpdateOptimizer does. keeps: whether the optimizer has to keep variables of
    ours."""
    if not is_optimizer(optimizer):
        raise TypeError(
            f"UpdateOptimizer needs a Keras optimizer of tf.keras, which is Keras {KERAS}, not an "
            f"object of {type(optimizer)}. With TF_USE_LEGACY_KERAS=1 in the environment tf.keras "
            f"is tf_keras"
        )
    if is_keras3(optimizer) and tf.keras.backend.backend() != "tensorflow":
        raise ValueError("UpdateOptimizer is for Keras on TensorFlow: set KERAS_BACKEND=tensorflow")
    if is_horovods(unwrapped(optimizer)) or hasattr(optimizer, "take_part"):
        raise ValueError(
            f"{type(optimizer).__name__} is one of Horovod's, or exchanges already: give "
            f"UpdateOptimizer the optimizer itself"
        )
    if is_elastic():
        raise ValueError(
            "in elastic jobs UpdateOptimizer needs PyTorch: here let hvd.DistributedOptimizer "
            "compress gradients"
        )
    refuse_averages(optimizer)
    if keeps and not hasattr(unwrapped(optimizer), "add_variable"):
        raise ValueError(
            "every and outer need one of tf.keras.optimizers, not of tf.keras.optimizers.legacy, "
            "which keeps no variables for them"
        )


def _members(optimizer: Any, rounds: Rounds) -> Dict[str, Any]:
    """Members of a class for the optimizer, whose steps are those of its own class within
    rounds."""
    base: Any = type(optimizer)
    of_all = {*dir(tf.keras.optimizers.Optimizer), *dir(tf.keras.optimizers.legacy.Optimizer)}
    frameworks = ("keras", "tf_keras", "tensorflow", "horovod", "horovod_compress")

    def get_config(self: Any) -> Dict[str, Any]:
        if saved_by_keras():
            warn_once(
                "a saved model's optimizer exchanges nothing when it is loaded: give it to "
                "hvdc.UpdateOptimizer again, or make model and optimizer as before and load "
                "weights. What ranks have not sent yet is in compression.state_dict()"
            )
        return base.get_config(self)

    others = methods_of(base, of_all, frameworks)
    return {
        **(_steps_in_keras3 if is_keras3(optimizer) else _steps_in)(base, rounds),
        "take_part": rounds.take_part,
        "average_state": rounds.average_state,
        **{name: _watched(getattr(base, name), rounds) for name in others},
        "get_config": get_config,
        "compression": property(lambda self: rounds.compression),
        "local_steps": property(lambda self: rounds.local_steps),
    }


def _steps_in(base: Any, rounds: Rounds) -> Dict[str, Any]:
    """As of `_steps_in_keras3`, for Keras 2."""

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if rounds.keeps:
            # As Keras does within its own step, which is too late for the values that are shared.
            with tf.name_scope(unwrapped(self).name), tf.init_scope():
                build(self, [variable for _, variable in pairs])
        step = functools.partial(base.apply_gradients, self, pairs, *args, **kwargs)
        return rounds.step(self, step, pairs)

    def build_variables(self: Any, var_list: Any) -> None:
        base.build(self, var_list)
        rounds.build(var_list)

    return {
        "apply_gradients": apply_gradients,
        **({"build": build_variables} if rounds.keeps else {}),
    }


def _watched(method: Callable[..., Any], rounds: Rounds) -> Callable[..., Any]:
    """A method of the optimizer's own, after which ranks have the same variables."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rounds.outside_step(method.__name__):
            return method(self, *args, **kwargs)

    return call


def _steps_in_keras3(base: Any, rounds: Rounds) -> Dict[str, Any]:
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
