"""Horovod's Compressor interface, `compress` and `decompress`, as operations of a TensorFlow graph
over the exchange."""

import contextlib
import functools
import math
import weakref
from typing import (
    Any,
    Callable,
    Dict,
    Hashable,
    Iterable,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from ..protocol.requests import Collective
from ..session.bound import Bound
from ..session.choice import Choice
from ..session.port import Port
from ..session.session import Session
from .applied_checks import Served, may_see_gradients
from .calls import Calls, Chain, first_values, with_denormals
from .checks import ONE_PASS, tell_of_missing_gradients
from .exchange import GraphExchange, dtypes_of, first_with_sums
from .horovod_internals import (
    OfSavedModels,
    Traces,
    divisor_of,
    lasting_variable,
    local_sources,
    loss_scale_of,
    reduction_of,
    when_differentiated,
)
from .optimizer import Serving, learning_rate_of, steps_of
from .ranks import TensorFlowRanks
from .takeover import tell_of_takeover
from .variables import Variable, Variables

_OPS = {"sum": hvd.Sum, "max": hvd.Max}
_SUM = Collective("allreduce", "int64", "sum")
_REDUCER = Collective("reducer", "")


class Graph(Port):
    """The operations of one compression.

    Args:
        ranks: those that share it.
        spec: as for `horovod_compress.get_compressor`.
        serving: the optimizers that it serves.
        owner: has this. `owner._choose(spec)` returns the choice, without tensors;
            `owner._agreed_scaler()` the loss scaler of the gradients that are being traced, if they
            have one.
        discardable: True where steps can be forgotten.

    Attributes:
        ranks: as above.
        session: the compression's dealings with its ranks.
        local: references to variables whose gradients tapes leave as they are.
    """

    def __init__(
        self,
        ranks: TensorFlowRanks,
        spec: Any,
        serving: Serving,
        owner: Any,
        discardable: bool = False,
    ) -> None:
        self.ranks, self._serving = ranks, serving
        self._owner = weakref.proxy(owner)
        self._exchange: Optional[GraphExchange] = None
        self.session = Session(ranks, self, spec, discardable)
        self._exchange = self.session.exchange
        self.variables, self.traces = Variables(self.session), Traces()
        self.calls = Calls(self.session, serving, self.traces)
        # Of the call that is being traced: gradients that Horovod has not brought yet, and their
        # results. In place of that of a gradient alone in its chain: what adds that chain to
        # Horovod's branch, where nobody else holds the gradient; None where Horovod reduces it.
        self._results: List[Tuple[Any, Any]] = []
        # As Horovod reduces gradients of the call.
        self._reduce: Callable[..., Any] = hvd.allreduce
        # Each call writes it when it begins, and reads it for each variable that it has finished.
        # So TensorFlow runs calls one after the other, where a function has several or calls
        # functions that have, and variables of one call together.
        self._turn = lasting_variable((), tf.int64)
        self.local: Set[Any] = set()
        may_see_gradients(self)

    # -- for the session

    def choose(self, spec: Any) -> Choice:
        """As of `Port`. All variables have one compressor."""
        choice = self._owner._choose(spec)
        tensors = {name: (shape, choice.compressor) for name, shape in self._shapes().items()}
        return choice._replace(tensors=tensors)

    def gains(self, choice: Choice) -> Dict[str, float]:
        return dict.fromkeys(self._shapes(), self._serving.gain(choice.held))

    def _shapes(self) -> Dict[str, tuple]:
        """Of all variables that are known, or were when a state was saved that is loaded."""
        exchange = self._exchange
        if exchange is None:
            return {}
        return {**exchange.shapes, **{name: its[-1] for name, its in exchange.loaded.items()}}

    def use(self, choice: Choice) -> None:
        """As of `Port`. held: whether an SGD's momentum is taken over."""
        serving = self._serving
        compressor: Any = choice.compressor
        if choice.held and not serving.takes_over:
            tell_of_takeover(serving.bound, compressor.id, compressor.momentum, compressor.nesterov)
            known = self._exchange is not None and bool(self._exchange.shapes)
            serving.lives_on = serving.lives_on or known
        serving.takes_over = bool(choice.held)

    def make(self, choice: Choice) -> GraphExchange:
        ranks = self.ranks.rank_and_size()
        return GraphExchange(choice.compressor, *ranks, self.ranks.elastic, choice.machine)

    def factor(self) -> Optional[float]:
        return self._serving.factor()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """As of `Port`. Functions are traced again when they are called next, where something
        changes that their traces hold."""
        before = self._traced_with()
        yield
        self.variables.describe()
        if self._traced_with() != before:
            self.traces.again()

    def _traced_with(self) -> Hashable:
        """The part of the compressor that traces hold."""
        policy, serving = self.session.compressor.policy, self._serving
        return (
            serving.takes_over,
            serving.takes_over and serving.lives_on,
            bool(policy.follow_lr),
            policy.clip_norm is not None,
            *(
                (each.carried, each.moved, each.plain, each.kin, id(each.squares))
                for each in self.variables.values()
            ),
        )

    def kept(self) -> Dict[str, Any]:
        return {"lives_on": self._serving.lives_on}

    def take(self, state: Any) -> None:
        """As of `Port`. Variables that become known have to be in the state then."""
        exchange = self.session.exchange
        if exchange.loaded and not self.ranks.active:
            exchange.loaded = {}
            raise ValueError("this state does not fit one rank")
        self.variables.loaded = True
        first = state if isinstance(state, dict) else state[0]
        self._serving.lives_on = bool(first.get("lives_on"))

    def serves(self, variables: Iterable[Any]) -> bool:
        """Returns whether some of these are known."""
        return any(
            isinstance(variable, tf.Variable) and variable.ref() in self.variables
            for variable in variables
        )

    def covers(self, variable: Any) -> bool:
        """Returns whether a variable's momentum is taken over, where its update is traced."""
        self.traces.note()
        # `apply_gradients(zip(tape.gradient(…), …))` is looked up before its first gradients bring
        # the optimizer here.
        self.calls.applied.add([variable])
        return self._serving.takes_over and variable.ref() in self.variables

    # -- Horovod's interface, while it traces a function

    def awaits(self, tensor: Any) -> bool:
        """Returns whether Horovod will bring this gradient, of the call that is being traced."""
        return any(grad is tensor for grad, _ in self._results)

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: Any) -> Tuple[Any, Any]:
        """Called by Horovod with a variable's gradient: returns what Horovod is to reduce, and a
        context."""
        if not self.ranks.active:
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
        return tf.zeros(1, name=f"{self.ranks.label()}.unread.{len(self._results)}"), result

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Called by Horovod with what it reduced: returns the gradient."""
        return tensor if ctx is None else tf.identity(ctx)

    def _new_call(self, tensor: Any) -> List[Tuple[Any, Any]]:
        """The next call of the function that is being traced, for all gradients that Horovod
        compresses with this one, as `_results` has it."""
        grads, sources, factor, process_set, optimizer, self._reduce = reduction_of(tensor)
        serving, ranks = self._serving, self.ranks
        ranks.check_process_set(process_set)
        serving.factor = factor
        self.session.exchange.features.handover.check_host(factor())
        serving.check(optimizer, ranks.elastic)
        serving.horovods = optimizer
        self.local |= local_sources()
        self.traces.note_exchange()
        pairs = [
            (grad, source) for grad, source in zip(grads, sources) if isinstance(grad, tf.Tensor)
        ]
        variables = self.variables.register(pairs)
        first = next((source for _, source in pairs if isinstance(source, tf.Variable)), None)
        if self.calls.steps is None and first is not None:
            self.calls.steps = Served(first)
        if optimizer is not None:
            # Keras saves the function with which Horovod's optimizer reduces. All variables that
            # the function captures have to be the optimizer's.
            turn = OfSavedModels(self._turn)
            optimizer._track_trackable(turn, f"{ranks.label()}.turn", overwrite=True)
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
        scaler = self._owner._agreed_scaler()
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
            sent = _failed_with(sparse, dense, variables)
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
            elif self.ranks.elastic:
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
        exchange = self.session.exchange
        groups = exchange.groups({name: variables[place].carried for name, place in places.items()})
        first = first_with_sums(exchange.tensors)
        chains = []
        for names in groups:
            its = [places[name] for name in names]
            halves = [grads[place].dtype == tf.float16 for place in its]
            among = [variables[place] for place in its]
            chains.append((Chain(among, names, halves, first in names), its))
        return chains

    def _exchanged(self, chain: Chain, number: Any, grads: List[Any], flat: List[Any]) -> List[Any]:
        """Adds the operations of a chain; returns its results, in the types of its gradients."""
        first, dtypes = chain.variables[0], [grad.dtype for grad in grads]
        inputs = [number, *map(_copied, grads, chain.variables, flat)]
        inputs += [read for its in chain.variables for read in _read_and_clear(its.squares)]
        made = [first.carried, *dtypes_of(first.moved[:1]), *["int64"] * chain.sends_number]
        dense, *message = _python_operation(self.calls.submit, chain, inputs, made)
        numbers = self._move(_SUM, [message.pop()], "step") if chain.sends_number else []
        for stage, collective in enumerate(first.moved):
            if stage:
                inputs, made = [number, *message], dtypes_of([collective])
                advance = self.session.exchange.advance
                message = _python_operation(advance, chain.names, inputs, made)
            moved = self._move(collective, message, f"{first.number}.{stage}")
            message, numbers = [*moved, *numbers], []
        (reduced,) = self._move(_REDUCER, [dense], str(first.number))
        made = [its.result for its in chain.variables]
        results = _python_operation(self.calls.finish, chain, [number, reduced, *message], made)
        when_differentiated(results[0], tell_of_missing_gradients)
        with tf.control_dependencies(results[:1]):
            # TensorFlow drops what is read and not used.
            tf.identity(self._turn.read_value())
        for result, its in zip(results, chain.variables):
            result.set_shape(its.shape)
        return list(map(tf.cast, results, dtypes))

    def _begin_operation(
        self, pairs: List[Tuple[Any, Any]], scaler: Any, names: List[str]
    ) -> Tuple[Any, List[Any]]:
        """The operation that begins a call of (gradient, source) pairs: its number, and for each
        gradient the shape [-1]. It is stateful, so that every call of the function has its own, and
        what depends on it is not folded or shared between calls. It brings values of the smallest
        variable, because TensorFlow runs a trace again for others of the same shapes."""
        sources, policy = [source for _, source in pairs], self.session.compressor.policy
        variables = [source for source in sources if isinstance(source, tf.Variable)]
        # An empty one has no values to compare.
        filled = [variable for variable in variables if variable.shape.num_elements()]
        known = min(filled, key=lambda variable: variable.shape.num_elements(), default=None)
        scale = tf.constant(1.0) if scaler is None else tf.cast(loss_scale_of(scaler), tf.float32)
        serving = self._serving
        depends = serving.bound is not None and (serving.takes_over or policy.follow_lr)
        begin = functools.partial(
            self.calls.begin,
            names,
            known,
            variables if depends else [],
            self.traces.generation,
            serving.factor,
            divisor_of(serving.horovods),
        )
        inputs = [learning_rate_of(serving.stepping)]
        inputs += [steps_of(serving.stepping)] if serving.takes_over else []
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
            self.calls.check_count, [number, ranks], [tf.int64], stateful=False
        )
        return number

    def _move(self, collective: Collective, message: List[Any], name: str) -> List[Any]:
        """Adds the operation that moves a message; returns what it brings, in as many tensors."""
        verb = "allreduce" if collective == _REDUCER else collective.verb
        # Named as Horovod names its own: hvd.elastic.run knows by that whose errors mean that a
        # rank is gone.
        options = {
            "name": f"Horovod{verb.capitalize()}_{self.ranks.label()}.{name}",
            "process_set": self.ranks.process_set,
            "ignore_name_scope": True,
        }
        if collective.verb == "allreduce":
            options["op"] = _OPS[collective.op]
        move = self._reduce if collective == _REDUCER else getattr(hvd, verb)
        moved = move(*message, **options)
        # An alltoall brings two.
        return [tf.raw_ops.Snapshot(input=tensor) for tensor in tf.nest.flatten(moved)]

    # -- what Horovod does not reduce, while it is alone

    @tf.autograph.experimental.do_not_convert
    def send_alone(
        self, optimizer: Any, grads_and_vars: List[Tuple[Any, Any]]
    ) -> List[Tuple[Any, Any]]:
        """Adds the operation that, in elastic jobs, while there is one rank, takes a step with
        these gradients: Horovod, which looks at the number of ranks in every step, leaves them as
        they are then. Returns the gradients to apply."""
        known = {
            i: self.variables[source.ref()]
            for i, (grad, source) in enumerate(grads_and_vars)
            if isinstance(grad, tf.Tensor) and source.ref() in self.variables
        }
        if not known:
            return grads_and_vars
        self.traces.note()
        numbers = list(known)
        chains = self._chains(list(known.values()), [grads_and_vars[i][0] for i in numbers])
        # In the order of chains.
        order = [numbers[place] for _, places in chains for place in places]
        grads = [grads_and_vars[i][0] for i in order]

        def alone() -> List[Any]:
            inputs = [learning_rate_of(optimizer)]
            for chain, places in chains:
                inputs += [grads_and_vars[numbers[place]][0] for place in places]
                inputs += [read for its in chain.variables for read in _read_and_clear(its.squares)]
            step = functools.partial(
                with_denormals, self.calls.step_alone, [its for its, _ in chains]
            )
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


class GraphCompression(Bound):
    """A compression whose payloads are moved by operations of graphs."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph.session)
        self._graph = graph
        # Horovod's Compressor interface.
        self.compress, self.decompress = graph.compress, graph.decompress

    def __repr__(self) -> str:
        return f"<{self._session.compressor!r} of {len(self._graph.variables)} variables>"

    @property
    def is_first(self) -> bool:
        """True if this is the first rank of those that compress."""
        ranks = self._graph.ranks
        return ranks.included and ranks.process_set.rank() == 0


def _python_operation(
    function: Callable[..., Sequence[np.ndarray]], of: Any, inputs: List[Any], dtypes: List[str]
) -> List[Any]:
    """Adds an operation that calls function(of, arrays of the inputs…); returns its outputs, of
    these dtypes."""
    # It is not stateful: TensorFlow would run such operations one after the other, with a round
    # over the network in between.
    return tf.numpy_function(
        functools.partial(with_denormals, function, of),
        inputs,
        list(map(tf.as_dtype, dtypes)),
        stateful=False,
    )


def _copied(grad: Any, variable: Variable, flat: Any) -> Any:
    """The gradient, flat, in memory that nobody else reads, because it is worked in: a copy only
    where somebody holds it. Snapshot alone is not enough: TensorFlow computes it once for equal
    gradients, and for all steps where they are constant. The shape comes from an operation that it
    must run, and differs from those of other gradients to it. float64 stays what it is."""
    grad = grad if variable.is_float64 else tf.cast(grad, tf.float32)
    return tf.raw_ops.Snapshot(input=tf.reshape(grad, flat))


def _failed_with(sparse: List[Any], grads: List[Any], variables: List[Variable]) -> List[Any]:
    """The gradients of variables, the smallest of them nan where a sparse one has elements that are
    not finite. Horovod gathers those by itself, and nobody will apply the step: a nan is how all
    ranks learn that it is to be undone."""
    values = [each.values for each in sparse if each.values.dtype.is_floating]
    sizes = {i: size for i, v in enumerate(variables) if (size := math.prod(v.shape))}
    if not values or not sizes:
        return grads
    finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(each)) for each in values])
    smallest, sent = min(sizes, key=lambda i: sizes[i]), list(grads)
    sent[smallest] = tf.where(finite, grads[smallest], tf.constant(np.nan, grads[smallest].dtype))
    return sent


def _read_and_clear(squares: Any) -> List[Any]:
    if squares is None:
        return []
    read = squares.read_value()
    with tf.control_dependencies([read]):
        squares.assign(tf.zeros_like(read))
    return [read]
