"""Horovod's Compressor interface, `compress` and `decompress`, as operations of a TensorFlow graph
over the exchange."""

import functools
import weakref
from typing import Any, Callable, Dict, List, Optional, Set, Tuple, Type

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from ..protocol.handshake import agree
from ..protocol.requests import Collective
from .applied import Served, may_see_gradients
from .checks import (
    ONE_PASS,
    check_elastic_scale,
    tell_of_missing_gradients,
    tell_of_scaler,
)
from .horovod_internals import (
    OfSavedModels,
    call_before,
    divisor_of,
    functions_under_trace,
    lasting_variable,
    local_sources,
    loss_scale_of,
    loss_scaler,
    reduction_of,
    when_differentiated,
)
from .messages import dtypes_of
from .operations import (
    Chain,
    Variable,
    copied,
    failed_with,
    first_values,
    python_operation,
    read_and_clear,
    with_denormals,
)
from .optimizer import learning_rate_of, optimizers_in_reach, steps_of
from .running import RunningCompression

_OPS = {"sum": hvd.Sum, "max": hvd.Max}
_SUM = Collective("allreduce", "int64", "sum")
_REDUCER = Collective("reducer", "")


class GraphCompression(RunningCompression):
    """The operations that functions get which TensorFlow traces. Which compressor serves which
    optimizer is decided in `compression`."""

    def __init__(self, process_set: Any, grad_scaler: Any) -> None:
        super().__init__(process_set)
        # What Horovod makes of a 1 on each rank, once that is known.
        self._factor: Callable[[], Any] = lambda: None
        # Of the call that is being traced: gradients that Horovod has not brought yet, and their
        # results. In place of that of a gradient alone in its chain: what adds that chain to
        # Horovod's branch, where nobody else holds the gradient; None where Horovod reduces it.
        self._results: List[Tuple[Any, Any]] = []
        # As Horovod reduces gradients of the call.
        self._reduce: Callable[..., Any] = hvd.allreduce
        # Functions with operations of this compression.
        self._traced: "weakref.WeakSet[Any]" = weakref.WeakSet()
        # Each call writes it when it begins, and reads it for each variable that it has finished.
        # So TensorFlow runs calls one after the other, where a function has several or calls
        # functions that have, and variables of one call together.
        self._turn = lasting_variable((), tf.int64)
        may_see_gradients(self)
        # References to variables whose gradients tapes leave as they are.
        self._local: Set[Any] = set()
        # The bound one; where a tape brings gradients, the one that applies them.
        self._optimizer: Any = None
        # The class of optimizers that tell this compression what they apply, and can leave momentum
        # to it.
        self._optimizer_class: Optional[Type] = None
        self._grad_scaler = grad_scaler

    # -- Horovod's interface, while it traces a function

    def awaits(self, tensor: Any) -> bool:
        """Returns whether Horovod will bring this gradient, of the call that is being traced."""
        return any(grad is tensor for grad, _ in self._results)

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: Any) -> Tuple[Any, Any]:
        """Called by Horovod with a variable's gradient: returns what Horovod is to reduce, and a
        context."""
        if not self._active:
            return tensor, None
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError(
                "functions that XLA compiles cannot compress gradients: say jit_compile=False"
            )
        if not self.awaits(tensor):
            self._results = self._new_call(tensor)
        # Variables that have the same one are served in order.
        here = next(i for i, (grad, _) in enumerate(self._results) if grad is tensor)
        _, result = self._results.pop(here)
        if callable(result):
            with tf.device("/cpu:0"):
                (result,) = result()
        if result is None:
            return tensor, None
        # The result is there, and TensorFlow leaves out a reduction that nobody reads. Horovod
        # names it after what it reduces.
        return tf.zeros(1, name=f"{self._label()}.unread.{len(self._results)}"), result

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Called by Horovod with what it reduced: returns the gradient."""
        return tensor if ctx is None else tf.identity(ctx)

    def _new_call(self, tensor: Any) -> List[Tuple[Any, Any]]:
        """The next call of the function that is being traced, for all gradients that Horovod
        compresses with this one, as `_results` has it."""
        grads, sources, factor, process_set, optimizer, self._reduce = reduction_of(tensor)
        self.check_process_set(process_set)
        self._factor = factor
        self._exchange.handover.check_host(factor())
        self._check_serves(optimizer)
        self._served = optimizer
        self._local |= local_sources()
        self._note_exchange()
        pairs = [
            (grad, source) for grad, source in zip(grads, sources) if isinstance(grad, tf.Tensor)
        ]
        variables = self._register(pairs)
        first = next((source for _, source in pairs if isinstance(source, tf.Variable)), None)
        if self._steps is None and first is not None:
            self._steps = Served(first)
        if optimizer is not None:
            # Keras saves the function with which Horovod's optimizer reduces. All variables that
            # the function captures have to be the optimizer's.
            turn = OfSavedModels(self._turn)
            optimizer._track_trackable(turn, f"{self._label()}.turn", overwrite=True)
        unseen = [
            variable.name
            for variable in variables
            if variable.squares is not None and not variable.observed
        ]
        if unseen:
            raise ValueError(
                f"moments=microbatch has seen no backward pass of {', '.join(unseen)}: it needs "
                f"the bound optimizer's minimize or fit. {ONE_PASS}"
            )
        scaler = self._agreed_scaler()
        # Of the branches in which Horovod compresses.
        around = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
        if around is None:
            raise ValueError(
                "gradients are compressed in graphs, which Horovod makes also of eager code: not "
                "with run_functions_eagerly(True)"
            )
        dense = [grad for grad, _ in pairs]
        with around.as_default():
            sparse = [grad for grad in grads if isinstance(grad, tf.IndexedSlices)]
            sent = failed_with(sparse, dense, variables)
        with around.as_default(), tf.device("/cpu:0"):
            number, flat = self._begin_operation(pairs, scaler, [v.name for v in variables])
            if any(
                collective.verb in ("allgather", "alltoall")
                for variable in variables
                for collective in variable.moved
            ):
                number = self._counted(number, variables[0])
            results = self._results_of(variables, number, sent, flat)
        return [(grad, results.get(place)) for place, grad in enumerate(dense)]

    def _results_of(
        self, variables: List[Variable], number: Any, grads: List[Any], flat: List[Any]
    ) -> Dict[int, Any]:
        """Adds chains to the graph around Horovod's branches. Returns by place what `_results` has.
        number: the call's; flat: for each gradient the shape [-1]."""
        results: Dict[int, Any] = {}
        for chain, places in self._chains(variables, grads):
            its, shapes = ([each[place] for place in places] for each in (grads, flat))
            exchange = functools.partial(self._exchanged, chain, number, its, shapes)
            if len(its) == 1:
                made = [exchange]
            elif self._elastic:
                # A rank that is alone takes its step where gradients are applied.
                as_they_are = functools.partial(tf.nest.map_structure, tf.identity, its)
                made = tf.cond(hvd.size_op() > 1, exchange, as_they_are)
            else:
                made = exchange()
            results.update(zip(places, made))
        return results

    def _chains(self, variables: List[Variable], grads: List[Any]) -> List[Tuple[Chain, List[int]]]:
        """Variables of a call, by what goes the same way, and their places among all. A second
        gradient of a variable is left out: only of plain ones there are such."""
        places: Dict[str, int] = {}
        for place, variable in enumerate(variables):
            places.setdefault(variable.name, place)
        groups = self._exchange.groups(
            {name: variables[place].carried for name, place in places.items()}
        )
        chains = []
        for names in groups:
            its = [places[name] for name in names]
            halves = [grads[place].dtype == tf.float16 for place in its]
            chains.append((Chain([variables[place] for place in its], names, halves), its))
        return chains

    def _exchanged(self, chain: Chain, number: Any, grads: List[Any], flat: List[Any]) -> List[Any]:
        """Adds the operations of a chain; returns its results, in the types of its gradients."""
        first, dtypes = chain.variables[0], [grad.dtype for grad in grads]
        inputs = [number, *map(copied, grads, chain.variables, flat)]
        inputs += [read for its in chain.variables for read in read_and_clear(its.squares)]
        sends_number = self._exchange.sends_number in chain.names
        made = [first.carried, *dtypes_of(first.moved[:1]), *["int64"] * sends_number]
        dense, *message = python_operation(self._submit, chain, inputs, made)
        numbers = self._move(_SUM, [message.pop()], "step") if sends_number else []
        for stage, collective in enumerate(first.moved):
            if stage:
                inputs, made = [number, *message], dtypes_of([collective])
                message = python_operation(self._advance, chain, inputs, made)
            moved = self._move(collective, message, f"{first.number}.{stage}")
            message, numbers = [*moved, *numbers], []
        (reduced,) = self._move(_REDUCER, [dense], str(first.number))
        made = [its.result for its in chain.variables]
        results = python_operation(self._finish, chain, [number, reduced, *message], made)
        when_differentiated(results[0], tell_of_missing_gradients)
        with tf.control_dependencies(results[:1]):
            # TensorFlow drops what is read and not used.
            tf.identity(self._turn.read_value())
        for result, its in zip(results, chain.variables):
            result.set_shape(its.shape)
        return list(map(tf.cast, results, dtypes))

    def _check_serves(self, optimizer: Any) -> None:
        """Raises ValueError where the compression is bound to another optimizer."""
        bound = self._optimizer_class
        if optimizer is None or isinstance(optimizer, bound or ()):
            return
        if self._takes_over:
            raise ValueError(
                "this compression has taken over the momentum of another optimizer than the one it "
                "serves, which would apply its own besides: "
                "bind it to the optimizer that hvd.DistributedOptimizer gets, and make a new one "
                "for each"
            )
        if self._elastic and bound:
            raise ValueError(
                "this compression is bound to another optimizer than the one it serves, which "
                "would not apply what a rank that is left alone holds "
                "back: bind it to the optimizer that hvd.DistributedOptimizer gets"
            )

    def _agreed_scaler(self) -> Any:
        """The loss scaler, if there is one: all ranks begin with the same scale."""
        scaler = self._grad_scaler or loss_scaler()
        if scaler is None and self._served is None:
            tell_of_scaler(optimizers_in_reach())
        if scaler is not None and self._elastic:
            check_elastic_scale(scaler)
        elif scaler is not None:
            agree(
                self._transport,
                f"{self._label()}.scale",
                {"initial loss scale": float(scaler.initial_scale)},
            )
        return scaler

    def _begin_operation(
        self, pairs: List[Tuple[Any, Any]], scaler: Any, names: List[str]
    ) -> Tuple[Any, List[Any]]:
        """The operation that begins a call of (gradient, source) pairs: its number, and for each
        gradient the shape [-1]. It is stateful, so that every call of the function has its own, and
        what depends on it is not folded or shared between calls. It brings values of the smallest
        variable, because TensorFlow runs a trace again for others of the same shapes."""
        sources, policy = [source for _, source in pairs], self._compressor.policy
        variables = [source for source in sources if isinstance(source, tf.Variable)]
        # An empty one has no values to compare.
        filled = [variable for variable in variables if variable.shape.num_elements()]
        known = min(filled, key=lambda variable: variable.shape.num_elements(), default=None)
        scale = tf.constant(1.0) if scaler is None else tf.cast(loss_scale_of(scaler), tf.float32)
        depends = self._optimizer is not None and (self._takes_over or policy.follow_lr)
        optimizer = self._served or self._optimizer
        begin = functools.partial(
            self._begin,
            names,
            known,
            variables if depends else [],
            self._traces,
            self._factor,
            divisor_of(self._served),
        )
        inputs = [learning_rate_of(optimizer)]
        inputs += [steps_of(optimizer)] if self._takes_over else []
        inputs += [grad for grad, _ in pairs] if policy.clip_norm is not None else []
        with tf.control_dependencies([self._turn.assign_add(1)]):
            values = [] if known is None else [first_values(known)]
            number, flat = tf.numpy_function(begin, [scale, *values, *inputs], [tf.int64, tf.int32])
        if known is not None:
            with tf.control_dependencies([number]):
                # What writes to the variable (a weight decay) waits for the comparison.
                known.read_value()
        return number, tf.unstack(flat, len(sources))

    def _counted(self, number: Any, first: Variable) -> Any:
        """A call's number, once its ranks are counted: Horovod answers an allgather or alltoall of
        shapes that it has seen from its response cache, and a rank that has called hvd.join() dies
        of that answer. first: a variable of the call, which no other call has at the same time."""
        # A 1 of this call: of a constant TensorFlow would make one for several.
        here = tf.cast(tf.reshape(number, [1]) >= 0, tf.int64)
        (ranks,) = self._move(_SUM, [here], f"{first.number}.ranks")
        (number,) = tf.numpy_function(
            self._check_count, [number, ranks], [tf.int64], stateful=False
        )
        return number

    def _move(self, collective: Collective, message: List[Any], name: str) -> List[Any]:
        """Adds the operation that moves a message; returns what it brings, in as many tensors."""
        verb = "allreduce" if collective == _REDUCER else collective.verb
        # Named as Horovod names its own: hvd.elastic.run knows by that whose errors mean that a
        # rank is gone.
        options = {
            "name": f"Horovod{verb.capitalize()}_{self._label()}.{name}",
            "process_set": self._process_set,
            "ignore_name_scope": True,
        }
        if collective.verb == "allreduce":
            options["op"] = _OPS[collective.op]
        move = self._reduce if collective == _REDUCER else getattr(hvd, verb)
        moved = move(*message, **options)
        # An alltoall brings two.
        return [tf.raw_ops.Snapshot(input=tensor) for tensor in tf.nest.flatten(moved)]

    def _note_traces(self) -> None:
        """Keeps the functions whose traces now get operations that depend on this compression."""
        self._traced.update(functions_under_trace())

    def _note_exchange(self) -> None:
        """The same for functions whose traces now get an exchange. Others that call these, which
        are traced already, are noted when they do."""
        self._note_traces()
        for function in functions_under_trace():
            call_before(function, self, self._note_exchange)

    # -- what Horovod does not reduce, while it is alone

    @tf.autograph.experimental.do_not_convert
    def _send_alone(
        self, optimizer: Any, grads_and_vars: List[Tuple[Any, Any]]
    ) -> List[Tuple[Any, Any]]:
        """Adds the operation that, in elastic jobs, while there is one rank, takes a step with
        these gradients: Horovod, which looks at the number of ranks in every step, leaves them as
        they are then. Returns the gradients to apply."""
        known = {
            i: self._variables[source.ref()]
            for i, (grad, source) in enumerate(grads_and_vars)
            if isinstance(grad, tf.Tensor) and source.ref() in self._variables
        }
        if not known:
            return grads_and_vars
        self._note_traces()
        numbers = list(known)
        chains = self._chains(list(known.values()), [grads_and_vars[i][0] for i in numbers])
        # In the order of chains.
        order = [numbers[place] for _, places in chains for place in places]
        grads = [grads_and_vars[i][0] for i in order]

        def alone() -> List[Any]:
            inputs = [learning_rate_of(optimizer)]
            for chain, places in chains:
                inputs += [grads_and_vars[numbers[place]][0] for place in places]
                inputs += [read for its in chain.variables for read in read_and_clear(its.squares)]
            step = functools.partial(with_denormals, self._step_alone, [its for its, _ in chains])
            return tf.numpy_function(step, inputs, [grad.dtype for grad in grads])

        with tf.device("/cpu:0"):
            results = tf.cond(
                hvd.size_op() > 1, lambda: [tf.identity(grad) for grad in grads], alone
            )
        changed = list(grads_and_vars)
        for i, result in zip(order, results):
            result.set_shape(known[i].shape)
            changed[i] = result, grads_and_vars[i][1]
        return changed
