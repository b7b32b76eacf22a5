"""All that relies on how Horovod 0.28 and TensorFlow are written inside, and nowhere says so: which
gradients, of which variables, are reduced, and how; how Horovod's optimizers are made; which
function is traced."""

import functools
import inspect
import weakref
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Type,
)

import horovod
import horovod.tensorflow as hvd
import tensorflow as tf

from ..session.callers import callers, owners
from ..session.versions import check_version

check_version("horovod", horovod.__version__)
check_version("tensorflow", tf.__version__)

# What another version may not have comes after the warning.
from tensorflow.python.eager.polymorphic_function.polymorphic_function import (  # noqa: E402
    Function,
)
from tensorflow.python.framework.func_graph import FuncGraph  # noqa: E402
from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # noqa: E402
from tensorflow.python.trackable.base import Trackable  # noqa: E402

# Of tf.keras, which the environment may choose. Keras 2's does not say.
KERAS = getattr(tf.keras, "__version__", "2")


def is_optimizer(value: Any) -> bool:
    """Returns whether this is an optimizer of Keras, new or legacy."""
    return isinstance(value, (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer))


def is_keras3(optimizer: Any) -> bool:
    """Returns whether this is an optimizer of Keras 3."""
    return is_optimizer(optimizer) and hasattr(optimizer, "apply")


def values_of(variables: Iterable[Any]) -> List[tf.Variable]:
    """TensorFlow's variables, those of Keras 3 that hold one each or as they are."""
    return [each if isinstance(each, tf.Variable) else each.value for each in variables]


def is_horovods(optimizer: Any) -> bool:
    """Returns whether hvd.DistributedOptimizer has made this."""
    return is_optimizer(optimizer) and hasattr(optimizer, "register_local_var")


def loss_scaler() -> Any:
    """The LossScaleOptimizer that scales the gradients which are being reduced: where it wraps
    Horovod's optimizer it is among the callers; else None. What it is given to apply it has
    unscaled already."""
    return next(filter(is_scaler, owners("compute_gradients", "_compute_gradients")), None)


def is_scaler(value: Any) -> bool:
    """Returns whether this is a LossScaleOptimizer."""
    return isinstance(value, tf.keras.mixed_precision.LossScaleOptimizer)


def loss_scale_of(scaler: Any) -> Any:
    """The factor of losses, and so of gradients, of a LossScaleOptimizer in the step that is being
    traced."""
    if hasattr(scaler, "loss_scale"):
        return scaler.loss_scale
    # Keras 3's has a variable once it knows the model's.
    return scaler.dynamic_scale if scaler.built else scaler.initial_scale


def _factor(process_set: Any, op: Any, prescale: float, postscale: float) -> float:
    # Whose number may change while a trace is used.
    ranks = process_set.size() if op == hvd.Sum else 1
    return prescale * postscale * ranks


class Reduction(NamedTuple):
    """Gradients that Horovod reduces together. factor: returns the factor of a 1 on each rank in
    the result; optimizer: Horovod's, None for a tape; reduce: makes what Horovod makes of a
    gradient."""

    grads: Sequence[Any]
    variables: Sequence[Any]
    factor: Callable[[], float]
    process_set: Any
    optimizer: Any
    reduce: Callable[..., Any]


def reduction_of(tensor: Any) -> Reduction:
    """The reduction in which this gradient is compressed. Horovod does not say, but has all of it
    in reach, in a function that reduces `grads` of `vars` by `op`. ValueError for a tensor that is
    in none."""
    for known in (frame.f_locals for frame in callers()):
        grads, variables = known.get("grads"), known.get("vars")
        if (
            isinstance(grads, (list, tuple))
            and variables is not None
            and any(grad is tensor for grad in grads)
        ):
            process_set, op = known.get("process_set"), known.get("op")
            if op == hvd.Adasum:
                raise ValueError(
                    "op=Adasum is not supported: it takes each gradient by itself. Say hvd.Average "
                    "or hvd.Sum"
                )
            scales = {key: known.get(key, 1.0) for key in ("prescale_factor", "postscale_factor")}
            factor = functools.partial(_factor, process_set, op, *scales.values())
            reduce = functools.partial(hvd.allreduce, op=op, **scales)
            optimizer = next(filter(is_horovods, owners()), None)
            return Reduction(grads, variables, factor, process_set, optimizer, reduce)
    raise ValueError(
        "this compression is for hvd.DistributedOptimizer and hvd.DistributedGradientTape of "
        "Horovod 0.28, which reduce the gradients "
        f"of variables; here comes a tensor of shape {tensor.shape} alone"
    )


def divisor_of(optimizer: Any) -> int:
    """The number by which Horovod's optimizer divides gradients after it has reduced them, those of
    several backward passes; 1 for others."""
    helper = getattr(optimizer, "_agg_helper", None)
    if helper is None or not helper.average_aggregated_gradients:
        return 1
    return helper.backward_passes_per_step


def compression_given_to(optimizer: Any) -> Any:
    """The compression that hvd.DistributedOptimizer was given, which lives in a function that it
    has made; None for optimizers that are not Horovod's."""
    if not hasattr(optimizer, "_allreduce_grads"):
        return None
    reduce = getattr(optimizer._allreduce_grads, "python_function", optimizer._allreduce_grads)
    return inspect.getclosurevars(reduce).nonlocals.get("compression")


def reducing(
    compression: Any, process_set: Any
) -> Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]:
    """A function of tensors, and of the variables that they belong to, which brings their means
    over ranks, as hvd.DistributedOptimizer gets those of gradients."""
    return hvd._make_allreduce_grads_fn(
        "UpdateOptimizer",
        "",
        "",
        compression,
        False,
        hvd.Average,
        1.0,
        None,
        process_set=process_set,
    )


def scaler_around(optimizer: Any) -> Any:
    """The LossScaleOptimizer that wraps this optimizer and is applying gradients; None where none
    is."""
    return next((each for each in filter(is_scaler, owners()) if each is not optimizer), None)


def saved_by_keras() -> bool:
    """Returns whether Keras is saving a model."""
    saving = (frame for frame in callers() if frame.f_code.co_name == "save_model")
    return any(
        str(frame.f_globals.get("__name__")).startswith(("keras.", "tf_keras.")) for frame in saving
    )


def optimizer_under_construction() -> Any:
    """The optimizer that is being made; None where none is."""
    return next(filter(is_optimizer, owners("__init__")), None)


def has_reduced(optimizer: Any) -> bool:
    """Returns whether Horovod's optimizer has ever reduced gradients, or traced that."""
    return bool(optimizer._aggregated_gradients)


def kept_local(optimizer: Any) -> Set[Hashable]:
    """References to the variables whose gradients Horovod's optimizer leaves as they are."""
    keepers = (optimizer, getattr(optimizer, "_agg_helper", None))
    return set().union(*(getattr(keeper, "_local_vars", ()) for keeper in keepers))


def local_sources() -> Set[Hashable]:
    """References to the variables whose gradients the tape of Horovod's that is at work, if one
    is, leaves as they are."""
    tapes = [owner for owner in owners() if isinstance(owner, tf.GradientTape)]
    return set().union(*(getattr(tape, "_local_sources", None) or () for tape in tapes))


def reduced_by_horovod(grad: Any) -> bool:
    """Returns whether a gradient in a graph comes from an operation of Horovod's, with any
    compression. Of eager ones nobody knows."""
    seen, waiting = set(), [grad.op] if tf.is_symbolic_tensor(grad) else []
    while waiting:
        operation = waiting.pop()
        if "_Allreduce/" in operation.name or operation.type.startswith("Horovod"):
            return True
        if operation not in seen:
            seen.add(operation)
            waiting.extend(tensor.op for tensor in operation.inputs)
    return False


def momentum_to_restore() -> Optional[float]:
    """The momentum that a callback of Horovod's has changed for the batch under way
    (`momentum_correction`) and will restore; None where none has."""
    lists = (frame.f_locals.get("callbacks") for frame in callers())
    kept = (
        getattr(callback, "restore_momentum", None)
        for given in lists
        for callback in getattr(given, "callbacks", ())
    )
    return next((momentum for momentum in kept if momentum is not None), None)


def class_below(optimizer: Any) -> Type:
    """The class of an optimizer; of Horovod's, which are made one class each, the one that it
    extends."""
    return type(optimizer).__mro__[1] if is_horovods(optimizer) else type(optimizer)


def change_class_below(optimizer: Any, cls: Type) -> None:
    """Makes `cls` that class. Horovod's methods ask for the base of the object's own class, so its
    class stays the last, and is made again."""
    own: Any = type(optimizer)
    optimizer.__class__ = (
        type(own)(own.__name__, (cls,), dict(vars(own))) if is_horovods(optimizer) else cls
    )


def lasting_variable(shape: Sequence[int], dtype: tf.DType) -> tf.Variable:
    """A variable of zeros on the CPU. In any trace: a tf.Variable only in a function's first."""
    with tf.init_scope(), tf.device("/cpu:0"):
        return ResourceVariable(tf.zeros(shape, dtype), trainable=False)


class OfSavedModels(Trackable):
    """Holds a variable that SavedModels keep, for functions that capture it, and checkpoints do
    not: these fit with and without a compression, before and after its first step."""

    def __init__(self, variable: tf.Variable) -> None:
        self._variable = variable

    def _trackable_children(self, save_type: str = "checkpoint", **_: Any) -> Dict[str, Any]:
        return {"variable": self._variable} if save_type == "savedmodel" else {}


def when_differentiated(result: Any, hook: Callable[[], None]) -> None:
    """Has hook() called where TensorFlow traces the gradient of an operation that has none: where a
    function takes it, and in eager code where a tape records, for which it is made ahead."""

    def no_gradient(operation: Any, *_: Any) -> List[None]:
        hook()
        return [None] * len(operation.inputs)

    result.op._gradient_function = no_gradient


def trace_under_way() -> Tuple[Any, Any]:
    """(the tf.function that is being traced, or None; the graph that its trace makes)."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and type(graph) is not FuncGraph:  # in branches and loops
        graph = getattr(graph, "outer_graph", None)
    return (None if graph is None else next(iter(functions_under_trace()), None)), graph


def functions_under_trace() -> List[Any]:
    """Each tf.function whose trace has led here, the innermost first."""
    if tf.executing_eagerly():
        return []
    return [owner for owner in owners() if isinstance(owner, Function)]


def call_before(function: Any, owner: Hashable, hook: Callable[[], None]) -> None:
    """Has hook() called before each call of a tf.function. An owner has one hook."""
    hooks = vars(function).setdefault("_called_before", {})
    if not hooks:
        call = function._call

        def after_hooks(*args: Any, **kwargs: Any) -> Any:
            for each in list(hooks.values()):
                each()
            return call(*args, **kwargs)

        function._call = after_hooks
    hooks[owner] = hook


class Traces:
    """The traced functions of a compression.

    Attributes:
        generation: how often traces have become void.
    """

    def __init__(self) -> None:
        self._functions: "weakref.WeakSet[Any]" = weakref.WeakSet()
        self.generation = 0

    def note(self) -> None:
        """Keeps the functions whose traces now get operations that depend on the compression."""
        self._functions.update(functions_under_trace())

    def note_exchange(self) -> None:
        """The same for functions whose traces now get an exchange. Others that call these, which
        are traced already, are noted when they do."""
        self.note()
        for function in functions_under_trace():
            call_before(function, self, self.note_exchange)

    def again(self) -> None:
        """Has all of them traced again when they are called next."""
        self.generation += 1
        for function in self._functions:
            function._function_cache.clear()
