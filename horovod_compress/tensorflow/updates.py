"""Keras optimizers whose ranks exchange what they would add to the variables, compressed, in place
of gradients."""

import contextlib
import functools
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

import horovod.tensorflow as hvd
import tensorflow as tf

from ..compressors.advice import ADAM
from ..protocol.handshake import agree
from ..session.choice import Choice
from ..session.notices import warn_once
from ..session.ranks import is_elastic
from ..session.updates import (
    Nesterov,
    average,
    check_ranks_of_set,
    check_rounds,
    compressor_for_updates,
    make_alike,
    methods_of,
)
from .adam import AdamW
from .checks import check_options
from .graph import Graph, GraphCompression
from .horovod_internals import (
    KERAS,
    is_horovods,
    is_keras3,
    is_optimizer,
    reducing,
    saved_by_keras,
    scaler_around,
    values_of,
)
from .optimizer import Serving, become, build, unwrapped
from .ranks import TensorFlowRanks
from .variables import checksum


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
        ValueError: bad options, an optimizer that exchanges already, or an elastic job.
        TypeError: `optimizer` is no optimizer of Keras, or `outer` no Nesterov.
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
    _refuse_averages(optimizer)
    if keeps and not hasattr(unwrapped(optimizer), "add_variable"):
        raise ValueError(
            "every and outer need one of tf.keras.optimizers, not of tf.keras.optimizers.legacy, "
            "which keeps no variables for them"
        )


def _members(optimizer: Any, rounds: "Rounds") -> Dict[str, Any]:
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


def _steps_in(base: Any, rounds: "Rounds") -> Dict[str, Any]:
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


def _watched(method: Callable[..., Any], rounds: "Rounds") -> Callable[..., Any]:
    """A method of the optimizer's own, after which ranks have the same variables."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with rounds.outside_step(method.__name__):
            return method(self, *args, **kwargs)

    return call


def _steps_in_keras3(base: Any, rounds: "Rounds") -> Dict[str, Any]:
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


class UpdateCompression(GraphCompression):
    """The compression of an UpdateOptimizer. options: what else must be alike on all ranks,
    JSON-able."""

    def __init__(self, spec: Any, options: Dict[str, Any], process_set: Any) -> None:
        self.ranks, self._options = TensorFlowRanks(process_set), options
        super().__init__(Graph(self.ranks, spec, Serving(), self))

    def _choose(self, spec: Any) -> Choice:
        compressor = compressor_for_updates(spec, hvd.rank())
        check_options(compressor)
        return Choice(compressor, compressor, {}, self._options, held=False)

    def _agreed_scaler(self) -> None:
        """None: updates are not scaled, and each rank's loss scale is inside of its optimizer."""

    def mean(self, names: str, tensors: Dict[str, Any]) -> None:
        """As of `session.updates.Mean`."""
        for name, variable in tensors.items():
            wide = tf.cast(variable, _at_least_float32(variable))
            mean = hvd.allreduce(
                wide, name=f"{names}.{name}", op=hvd.Average, process_set=self.ranks.process_set
            )
            variable.assign(tf.cast(mean, variable.dtype))

    def take_from_first(self, variables: List[Any]) -> None:
        """Gives all ranks the values of the first one, in eager code. MismatchError where ranks
        have others."""
        ranks, label = self.ranks, self.ranks.label()
        shapes = [[*variable.shape, variable.dtype.name] for variable in variables]
        agree(ranks.transport, f"{label}.first", {"variables": shapes})
        options = {"root_rank": (ranks.process_set.ranks or [0])[0]}
        options["process_set"] = ranks.process_set

        # Anew each time: the function of hvd.broadcast_variables fails where variables that it was
        # traced with are gone.
        @tf.function(autograph=False)
        def take() -> None:
            for number, variable in enumerate(variables):
                name = f"HorovodBroadcast_{label}.{number}"
                # Horovod's broadcast has no bfloat16.
                wide = tf.float32 if variable.dtype == tf.bfloat16 else variable.dtype
                sent = hvd.broadcast(tf.cast(variable, wide), name=name, **options)
                variable.assign(tf.cast(sent, variable.dtype))

        take()


class Rounds:
    """The rounds of an UpdateOptimizer: `every` local steps each, and the exchange."""

    def __init__(
        self,
        optimizer: Any,
        compression: Any,
        every: int,
        outer: Optional[Nesterov],
        process_set: Any,
    ) -> None:
        self.compression = UpdateCompression(
            compression, {"every": every, "outer": repr(outer)}, process_set
        )
        self._ranks = self.compression.ranks
        self._optimizer, self._every, self._outer = optimizer, every, outer
        # Has variables of ours, with its own.
        self._keeper = unwrapped(optimizer)
        with tf.init_scope():
            self._reduce = reducing(self.compression, self._ranks.process_set)
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
        """True if variables of ours are among the optimizer's."""
        return self._every > 1 or self._outer is not None

    @property
    def local_steps(self) -> int:
        return 0 if self._local_steps is None else int(self._local_steps)

    @property
    def _alone(self) -> bool:
        """True if there is nothing to exchange: a rank alone has its variables already."""
        ranks = self._ranks
        return not ranks.included or self._outer is None and ranks.process_set.size() == 1

    def build(self, variables: Sequence[Any]) -> None:
        """Makes what is kept for the optimizer's variables."""
        if self._shared or self._momenta:
            return
        if self._outer is not None:
            for variable in variables:
                name = f"outer/{variable.name.split(':')[0]}"
                momentum = self._variable(variable.shape, _at_least_float32(variable), name)
                self._momenta[variable.ref()] = momentum
        if self._every > 1:
            self._local_steps = self._variable([], tf.int64, "local_steps")
            for variable in variables:
                kept = self._keeper.add_variable_from_reference(variable, "shared")
                (self._shared[variable.ref()],) = values_of([kept])
                self._shared[variable.ref()].assign(variable)

    def _variable(self, shape: Any, dtype: tf.DType, name: str) -> tf.Variable:
        """A variable of zeros among the optimizer's."""
        if is_keras3(self._keeper):
            name = name.replace("/", "_")
        kept = self._keeper.add_variable(
            shape=shape, dtype=dtype.name, initializer="zeros", name=name
        )
        return values_of([kept])[0]

    def step(
        self, taker: Any, local_step: Callable[[], Any], grads_and_vars: List[Tuple[Any, Any]]
    ) -> Any:
        """A local step, and the exchange where that ends a round. taker: the optimizer that takes
        it."""
        if taker is not self._optimizer:
            raise ValueError(
                "this is a copy of an UpdateOptimizer, such as hvd.DistributedOptimizer makes: use "
                "what UpdateOptimizer has returned"
            )
        _refuse_averages(self._optimizer)
        if scaler_around(self._optimizer) is not None:
            raise ValueError(
                "a LossScaleOptimizer skips the steps of a rank that finds infinite gradients, for "
                "which other ranks would wait. Put it inside: "
                "hvdc.UpdateOptimizer(keras.mixed_precision.LossScaleOptimizer(optimizer))"
            )
        if self._alone:
            with self._at_work():
                return local_step()
        variables = self._begin_alike(grads_and_vars)
        shared = self._begin_round(variables)
        with self._at_work():
            result = local_step()
        if self._every == 1:
            self._exchange(variables, shared)
        else:
            taken = self._local_steps.assign_add(1)
            tf.cond(taken >= self._every, lambda: self._exchange(variables, shared), tf.no_op)
        return result

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Within it the optimizer itself is at work."""
        before, self._inside = self._inside, True
        try:
            yield
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
        before = [checksum(variable) for variable in variables]
        with self._at_work():
            yield
        after = [checksum(variable) for variable in variables]
        if after != before:
            tensors = _numbered(variables)
            make_alike(self._ranks, method, after, tensors, self.compression.mean)

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
                # Schedules of the learning rate follow the steps. In Keras 3 `iterations` counts
                # fewer where gradients add up.
                keeper = self._keeper
                steps = keeper._iterations if is_keras3(keeper) else keeper.iterations
                counted = values_of([steps])
                counted += [] if self._local_steps is None else [self._local_steps]
                self.compression.take_from_first([*new, *kept, *counted])
                if self.local_steps:
                    warn_once(
                        "training goes on in the middle of a round, from rank 0's variables: what "
                        "other ranks' local steps had added is gone. Save where a round has ended, "
                        "as after take_part() or hvdc.ShareUpdates()"
                    )
        self._known.update(variable.ref() for variable in new)
        moving = {variable.ref(): variable for grad, variable in grads_and_vars if grad is not None}
        if self._every > 1 and self._moving and moving.keys() != self._moving.keys():
            names = ", ".join(
                sorted(ref.deref().name for ref in moving.keys() ^ self._moving.keys())
            )
            raise ValueError(
                f"with every={self._every} all steps change the same variables, and {names} had "
                f"gradients in some steps only: make a new UpdateOptimizer for other variables, or "
                f"say every=1"
            )
        self._moving.update(moving)
        return list(moving.values())

    def _begin_round(self, variables: List[Any]) -> List[Any]:
        """Returns what ranks share of the variables, which their next exchange adds to."""
        if self._every == 1:
            return [variable.read_value() for variable in variables]
        shared = [self._shared[variable.ref()] for variable in variables]
        tf.cond(
            tf.equal(self._local_steps, 0),
            lambda: tf.group(*(its.assign(variable) for its, variable in zip(shared, variables))),
            tf.no_op,
        )
        return shared

    def take_part(self) -> None:
        """Exchanges now, with what local steps have added so far, or with nothing. Call it on a
        rank that has no data left, or is behind, when the other ranks end a round. All ranks must
        exchange equally often."""
        if self._alone:
            return
        if not self._moving:
            raise RuntimeError(
                "take_part() comes after the first step, in which all ranks get to know the "
                "variables"
            )
        variables = list(self._moving.values())
        self._exchange(variables, self._begin_round(variables))

    def average_state(self) -> None:
        """Makes what the optimizer keeps for its variables, such as Adam's moments, their mean over
        ranks, which are sent densely. All ranks call it between steps. MismatchError where some
        rank has taken no step yet."""
        # All but what ranks have alike.
        alike = {variable.ref() for variable in (*self._shared.values(), *self._momenta.values())}
        kept = self._keeper.variables
        # A method, in legacy ones.
        kept = values_of(kept() if callable(kept) else kept)
        differ = (v for v in kept if v.dtype.is_floating and v.shape.rank and v.ref() not in alike)
        average(self._ranks, _numbered(differ), self.compression.mean)

    def _exchange(self, variables: List[Any], shared: List[Any]) -> Any:
        """Makes the variables what all ranks shared before, and the mean of what they have added
        since. Returns an operation, as branches of a graph do."""
        shared = [tf.convert_to_tensor(its) for its in shared]
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
        return tf.group(*([] if self._local_steps is None else [self._local_steps.assign(0)]))

    def _moved(self, variable: Any, mean: Any, finite: Any) -> Any:
        """By how much the outer optimizer moves a variable."""
        if self._outer is None:
            return mean
        momentum, mean = self._momenta[variable.ref()], tf.cast(mean, _at_least_float32(variable))
        grown = self._outer.momentum * momentum + mean
        momentum.assign(tf.where(finite, grown, momentum))
        return self._outer.lr * (mean + self._outer.momentum * grown)


def _refuse_averages(optimizer: Any) -> None:
    """ValueError where an optimizer averages variables of this rank alone."""
    if getattr(unwrapped(optimizer), "use_ema", False):
        raise ValueError(
            "use_ema averages this rank's own variables, and would put them in the place of those "
            "that ranks share: leave it out"
        )


def _warn() -> None:
    warn_once(
        "updates were not finite on some rank, so no rank's variables have moved in that step. "
        "Where it goes on so, the moments of some rank's "
        "optimizer are not finite: load what was last saved on all ranks"
    )


def _numbered(variables: Iterable[Any]) -> Dict[str, Any]:
    """Variables by what all ranks can call them, as names need not be alike."""
    return {str(number): variable for number, variable in enumerate(variables)}


def _at_least_float32(variable: Any) -> Any:
    """The type of what is added up of a variable's numbers."""
    return tf.float64 if variable.dtype == tf.float64 else tf.float32
