"""Keras optimizers whose ranks exchange what they would add to the variables, compressed, in place
of gradients."""

import contextlib
import functools
import zlib
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

import horovod.tensorflow as hvd
import tensorflow as tf

from ..binding import is_elastic, warn_once
from ..deprecated import by_name
from ..handshake import agree
from ..updates import (
    Nesterov,
    check_ranks_of_set,
    check_rounds,
    compressor_for_updates,
    differing,
    methods_of,
)
from .adam import AdamW
from .compression import BoundCompression
from .horovod_internals import is_horovods, is_optimizer, reducing, scaler_around
from .optimizer import become, build, unwrapped


@by_name
def UpdateOptimizer(
    optimizer: Any,
    compression: Any = "topk:ratio=0.01",
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

        optimizer = hvdc.UpdateOptimizer(keras.optimizers.AdamW(1e-3), "topk:ratio=0.01")
        model.compile(optimizer, loss)

    It takes the place of hvd.DistributedOptimizer: Horovod reduces no gradients, and tapes stay as
    they are. Returns the optimizer itself, changed: its `compression` has stats(), switch() and all
    else that a BoundCompression has. Variables are bit-identical on all ranks after each exchange,
    and rank 0's before the first step; the optimizer's own state is each rank's. Where an update is
    not finite on some rank, no rank's variables move, and what was to be sent waits for the next
    exchange, where a residual is kept of it.

    optimizer: a Keras optimizer; one that scales losses (mixed precision) goes in as
    keras.mixed_precision.LossScaleOptimizer(optimizer). With
        `every` or `outer` it keeps the variables that all ranks share, and the outer momentum,
        among its own, with which Keras saves them.
    compression: a spec, as for horovod_compress.get_compressor, or hvdc.Compression.topk(…). dgc
    selects as topk does here. every: how many local steps come before each exchange (H of DiLoCo,
    arXiv 2311.08105). In between ranks' variables differ: `ShareUpdates` makes
        them alike before the model is evaluated or saved.
    outer: what is done with the mean update; default: it is added. `hvdc.Nesterov()` is DiLoCo's.
    process_set: the ranks that exchange; default: all.

    Raises ValueError for bad options and in elastic jobs, TypeError for what is no optimizer. The
    first step raises MismatchError, on all ranks, where ranks were started differently.
    """
    check_rounds(every, outer)
    if isinstance(unwrapped(optimizer), AdamW):
        check_ranks_of_set(unwrapped(optimizer).ranks, process_set)
    _check(optimizer, every > 1 or outer is not None)
    become(
        optimizer,
        _exchanging(optimizer, _Rounds(optimizer, compression, every, outer, process_set)),
    )
    return optimizer


def _check(optimizer: Any, keeps: bool) -> None:
    """Raises what UpdateOptimizer does. keeps: whether the optimizer has to keep variables of
    ours."""
    if not is_optimizer(optimizer):
        raise TypeError(
            f"UpdateOptimizer needs a Keras optimizer, not an object of {type(optimizer)}"
        )
    if is_horovods(unwrapped(optimizer)) or hasattr(optimizer, "take_part"):
        raise ValueError(
            f"{type(optimizer).__name__} exchanges already: give UpdateOptimizer the optimizer "
            f"itself"
        )
    if is_elastic():
        raise ValueError(
            "in elastic jobs UpdateOptimizer needs PyTorch: here let hvd.DistributedOptimizer "
            "compress gradients"
        )
    if getattr(optimizer, "use_ema", False):
        raise ValueError(
            "use_ema averages this rank's own variables, and would put them in the place of those "
            "that ranks share: leave it out"
        )
    if keeps and not hasattr(unwrapped(optimizer), "add_variable"):
        raise ValueError(
            "every and outer need one of tf.keras.optimizers, not of tf.keras.optimizers.legacy, "
            "which keeps no variables for them"
        )


def _exchanging(optimizer: Any, rounds: "_Rounds") -> Any:
    """A class for the optimizer, whose steps are those of its own class within rounds."""
    base: Any = type(optimizer)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        if self is not optimizer:
            raise ValueError(
                "this is a copy of an UpdateOptimizer, such as hvd.DistributedOptimizer makes: use "
                "what UpdateOptimizer has returned"
            )
        pairs = list(grads_and_vars)
        if rounds.keeps:
            # As Keras does within its own step, which is too late for the values that are shared.
            with tf.name_scope(unwrapped(self).name), tf.init_scope():
                build(self, [variable for _, variable in pairs])
        step = functools.partial(super(changed, self).apply_gradients, pairs, *args, **kwargs)
        return rounds.step(step, pairs)

    def build_variables(self: Any, var_list: Any) -> None:
        super(changed, self).build(var_list)
        rounds.build(var_list)

    def take_part(self: Any) -> None:
        """Exchanges now, with what local steps have added so far, or with nothing: for a rank
        without data or late, while others come to the end of their steps. All ranks must exchange
        equally often."""
        rounds.take_part()

    def average_state(self: Any) -> None:
        """Makes what the optimizer keeps for its variables, such as Adam's moments, their mean over
        ranks, which are sent densely. All ranks call it between steps. MismatchError where some
        rank has taken no step yet."""
        rounds.average_state()

    members = {
        "apply_gradients": apply_gradients,
        "take_part": take_part,
        "average_state": average_state,
    }
    members.update({"build": build_variables} if rounds.keeps else {})
    of_all = {*dir(tf.keras.optimizers.Optimizer), *dir(tf.keras.optimizers.legacy.Optimizer)}
    for name in methods_of(base, of_all, ("keras", "tensorflow", "horovod", "horovod_compress")):
        members[name] = _watched(getattr(base, name), rounds)
    members.update(
        compression=property(lambda self: rounds.compression),
        local_steps=property(lambda self: rounds.local_steps),
    )
    changed = type(base)(base.__name__, (base,), members)
    return changed


def _watched(method: Callable[..., Any], rounds: "_Rounds") -> Callable[..., Any]:
    """A method of the optimizer's own, after which ranks have the same variables."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rounds.outside_step(method.__name__):
            return method(self, *args, **kwargs)

    return call


class ShareUpdates(tf.keras.callbacks.Callback):
    """Has ranks exchange what local steps have added since the last exchange of an UpdateOptimizer
    before the model is evaluated, and at the end of each epoch: what is measured and saved are then
    variables that all ranks share. For `every` above 1; before callbacks that save, in their
    list."""

    def _share(self) -> None:
        optimizer = self.model.optimizer
        if optimizer.local_steps:  # alike on all ranks
            optimizer.take_part()

    def on_test_begin(self, logs: Any = None) -> None:
        self._share()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._share()


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
            wide = tf.cast(variable, _at_least_float32(variable))
            mean = hvd.allreduce(
                wide, name=f"{names}.{i}", op=hvd.Average, process_set=self._process_set
            )
            variable.assign(tf.cast(mean, variable.dtype))

    def switch(self, spec: Any) -> None:
        """Another compression from the next exchange on; see `BoundCompression.switch`."""
        super().switch(compressor_for_updates(spec, hvd.rank()))


class _Rounds:
    """What an UpdateOptimizer does beside its local steps. A round is `every` of them and the
    exchange."""

    def __init__(
        self,
        optimizer: Any,
        compression: Any,
        every: int,
        outer: Optional[Nesterov],
        process_set: Any,
    ) -> None:
        options = {"every": every, "outer": repr(outer)}
        self.compression = UpdateCompression(
            compressor_for_updates(compression, hvd.rank()), options, process_set
        )
        self._process_set = self.compression._process_set
        self._optimizer, self._every, self._outer = optimizer, every, outer
        with tf.init_scope():
            self._reduce = reducing(self.compression, self._process_set)
        # References to variables that all ranks began with alike.
        self._known: Set[Any] = set()
        # Variables whose updates are exchanged, by reference.
        self._moving: Dict[Any, Any] = {}
        # For each variable the value that all ranks share, where a round has several steps.
        self._shared: Dict[Any, Any] = {}
        # Of the outer optimizer, for each variable.
        self._momenta: Dict[Any, Any] = {}
        # Since the last exchange, where a round has several.
        self._local_steps: Any = None
        # Whether the optimizer itself is at work.
        self._inside = False

    @property
    def keeps(self) -> bool:
        """Whether variables of ours are among the optimizer's."""
        return self._every > 1 or self._outer is not None

    @property
    def local_steps(self) -> int:
        return 0 if self._local_steps is None else int(self._local_steps)

    def build(self, variables: Sequence[Any]) -> None:
        """Makes what is kept for the optimizer's variables."""
        if self._shared or self._momenta:
            return
        owner = unwrapped(self._optimizer)
        if self._outer is not None:
            self._momenta = {
                v.ref(): owner.add_variable(
                    v.shape, _at_least_float32(v), "zeros", f"outer/{v.name.split(':')[0]}"
                )
                for v in variables
            }
        if self._every > 1:
            self._local_steps = owner.add_variable([], tf.int64, "zeros", "local_steps")
            self._shared = {
                v.ref(): owner.add_variable_from_reference(v, "shared", initial_value=v)
                for v in variables
            }

    def step(self, local_step: Callable[[], Any], grads_and_vars: List[Tuple[Any, Any]]) -> Any:
        """A local step, and the exchange where that ends a round."""
        if scaler_around(self._optimizer) is not None:
            raise ValueError(
                "a LossScaleOptimizer skips the steps of a rank that finds infinite gradients, for "
                "which other ranks would wait. Put it inside: "
                "hvdc.UpdateOptimizer(keras.mixed_precision.LossScaleOptimizer(optimizer))"
            )
        if (
            not self._process_set.included()
            or self._outer is None
            and self._process_set.size() == 1
        ):
            # A rank alone has its variables already.
            return self._own(local_step)
        variables = self._begin_alike(grads_and_vars)
        if self._every == 1:
            shared = [variable.read_value() for variable in variables]
            result = self._own(local_step)
            self._exchange(variables, shared)
            return result
        self._begin_round(variables)
        result = self._own(local_step)
        taken = self._local_steps.assign_add(1)
        tf.cond(taken >= self._every, lambda: self._end_round(variables), tf.no_op)
        return result

    def _own(self, local_step: Callable[[], Any]) -> Any:
        before, self._inside = self._inside, True
        try:
            return local_step()
        finally:
            self._inside = before

    @contextlib.contextmanager
    def outside_step(self, method: str) -> Iterator[None]:
        """Around a method of the optimizer's own. What that makes of variables depends on what the
        optimizer keeps, which is each rank's own: all ranks take the mean of what they have
        then."""
        if self._inside or not tf.executing_eagerly():
            yield
            return
        variables = [ref.deref() for ref in self._moving]
        before = [_checksum(variable) for variable in variables]
        self._inside = True
        try:
            yield
        finally:
            self._inside = False
        after = [_checksum(variable) for variable in variables]
        if after != before:
            self.compression.make_alike(method, after, variables)

    def _begin_alike(self, grads_and_vars: List[Tuple[Any, Any]]) -> List[Any]:
        """Gives all ranks rank 0's values of variables that have not been here before, and of what
        is kept for them, because rank 0 alone may have loaded a state. Returns those that have
        gradients, whose updates are exchanged."""
        new = [variable for _, variable in grads_and_vars if variable.ref() not in self._known]
        if new:
            with tf.init_scope():
                self.compression.handshake()
                refs = [variable.ref() for variable in new]
                both = (self._shared, self._momenta)
                kept = [its[ref] for its in both for ref in refs if ref in its]
                counted = [] if self._local_steps is None else [self._local_steps]
                root = (self._process_set.ranks or [0])[0]
                hvd.broadcast_variables([*new, *kept, *counted], root, self._process_set)
        self._known.update(variable.ref() for variable in new)
        moving = {variable.ref(): variable for grad, variable in grads_and_vars if grad is not None}
        if self._every > 1 and self._moving and moving.keys() != self._moving.keys():
            names = ", ".join(
                sorted(ref.deref().name for ref in moving.keys() ^ self._moving.keys())
            )
            raise ValueError(
                f"with every={self._every} all steps change the same variables, and {names} had "
                f"gradients in some steps only"
            )
        self._moving.update(moving)
        return list(moving.values())

    def _begin_round(self, variables: List[Any]) -> None:
        def begin() -> Any:
            return tf.group(
                *(self._shared[variable.ref()].assign(variable) for variable in variables)
            )

        tf.cond(tf.equal(self._local_steps, 0), begin, tf.no_op)

    def _end_round(self, variables: List[Any]) -> Any:
        self._exchange(
            variables, [self._shared[variable.ref()].read_value() for variable in variables]
        )
        return tf.group(self._local_steps.assign(0))

    def take_part(self) -> None:
        """An exchange of what local steps have added so far."""
        if not self._moving:
            raise RuntimeError(
                "take_part() comes after the first step, in which all ranks get to know the "
                "variables"
            )
        variables = list(self._moving.values())
        if self._every == 1:
            self._exchange(variables, [variable.read_value() for variable in variables])
        else:
            self._begin_round(variables)
            self._end_round(variables)

    def average_state(self) -> None:
        """Averages what the optimizer keeps over ranks, but for what they have alike."""
        alike = {variable.ref() for variable in (*self._shared.values(), *self._momenta.values())}
        kept = unwrapped(self._optimizer).variables()
        self.compression.average(
            [v for v in kept if v.dtype.is_floating and v.shape.rank and v.ref() not in alike]
        )

    def _exchange(self, variables: List[Any], shared: List[Any]) -> None:
        """Makes the variables what all ranks shared before, and the mean of what they have added
        since."""
        means = self._reduce(
            [variable.read_value() - before for variable, before in zip(variables, shared)],
            variables,
        )
        # Of all variables, and alike on all ranks.
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(mean)) for mean in means])
        tf.cond(finite, tf.no_op, lambda: tf.group(tf.numpy_function(_warn, [], [], stateful=True)))
        for variable, before, mean in zip(variables, shared, means):
            value = before + tf.cast(self._moved(variable, mean, finite), variable.dtype)
            if variable.constraint is not None:
                value = variable.constraint(value)
            variable.assign(tf.where(finite, value, before))

    def _moved(self, variable: Any, mean: Any, finite: Any) -> Any:
        """By how much the outer optimizer moves a variable."""
        if self._outer is None:
            return mean
        momentum, mean = self._momenta[variable.ref()], tf.cast(mean, _at_least_float32(variable))
        grown = self._outer.momentum * momentum + mean
        momentum.assign(tf.where(finite, grown, momentum))
        return self._outer.lr * (mean + self._outer.momentum * grown)


def _at_least_float32(variable: Any) -> Any:
    """The type of what is added up of a variable's numbers."""
    return tf.float64 if variable.dtype == tf.float64 else tf.float32


def _warn() -> None:
    warn_once(
        "updates were not finite on some rank, so no rank's variables have moved in that step. "
        "Where it goes on so, the moments of some rank's "
        "optimizer are not finite: load what was last saved on all ranks"
    )


def _checksum(variable: Any) -> int:
    return zlib.crc32(variable.numpy().tobytes())
