"""Horovod's Compressor interface, `compress` and `decompress`, as operations of a TensorFlow graph
over the exchange."""

import functools
import itertools
import weakref
from abc import abstractmethod
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Type

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from .. import kernels
from ..binding import Binding, is_elastic, warn_once
from ..handshake import REDUCES_ONLY, agree, error_of_joined
from ..requests import Collective
from .applied import Unapplied, may_see_gradients
from .checks import ONE_PASS, check_elastic_scale
from .eager import Eager
from .exchange import GraphExchange, Message, Saved
from .horovod_internals import (
    call_before,
    functions_under_trace,
    lasting_variable,
    local_sources,
    loss_scaler,
    reduction_of,
)
from .operations import (
    Call,
    Variable,
    dtypes_of,
    first_values,
    identified,
    python_operation,
    read_and_clear,
    split_message,
    squared_norm_of,
    with_denormals,
)
from .optimizer import learning_rate_of

_OPS = {"sum": hvd.Sum, "max": hvd.Max}
_SUM = Collective("allreduce", "int64", "sum")
_ELASTIC_STATE = "hvdc.elastic.TensorFlowKerasState(model, compression=compression)"
# Numbers as large as this become infinite in float16.
_INFINITE_HALF = 65520


class GraphCompression(Binding):
    """The steps of a compression, in functions that TensorFlow traces: what becomes known of
    variables then, the operations that functions get, and what these do while the graph runs. Which
    compressor serves which optimizer is decided in `compression`."""

    def __init__(self, process_set: Any) -> None:
        super().__init__(hvd, process_set, hint="variables need not be named in TensorFlow, and ")
        self._elastic = is_elastic()
        self._synced = not self._elastic
        self._active = bool(self._process_set.included()) and (
            self._process_set.size() > 1 or self._elastic
        )
        self._transport = Eager(self._process_set)
        # What Horovod makes of a 1 on each rank, once that is known.
        self._factor: Callable[[], Optional[float]] = lambda: None
        # Horovod's optimizer, where gradients come from that.
        self._served: Any = None
        self._variables: Dict[Any, Variable] = {}  # by key, see `identified`
        self._numbers: Dict[str, int] = {}  # of variables, by name
        # Of the function that is being traced.
        self._call = Call([], None, [], [], [])
        # Functions with operations of this compression.
        self._traced: "weakref.WeakSet[Any]" = weakref.WeakSet()
        # Which of the states of `_states` their traces are for.
        self._traces = 0
        # Each call writes it when it begins, and reads it for each variable that it has finished.
        # So TensorFlow runs calls one after the other, where a function has several or calls
        # functions that have, and variables of one call together.
        self._turn = lasting_variable((), tf.int64)
        may_see_gradients(self)
        # References to variables that the bound optimizer has applied gradients to.
        self._applied: Set[Any] = set()
        # References to variables whose gradients tapes leave as they are.
        self._local: Set[Any] = set()
        # Where a state was loaded: of variables that are not known yet. None: the exchange has it
        # already.
        self._saved: Optional[Dict[str, Optional[Saved]]] = None

    _exchange: GraphExchange
    # The bound one; where a tape brings gradients, the one that applies them.
    _optimizer: Any
    # The class of optimizers that can leave momentum to this compression.
    _momentum_class: Optional[Type]
    # The class of optimizers that tell this compression what they apply.
    _applying_class: Optional[Type]
    _grad_scaler: Any
    # Whether backward passes are observed.
    _microbatches: bool

    # Whether `_submit` has to get all gradients, also those to which nothing is done.
    _sees_gradients = False

    @property
    @abstractmethod
    def _takes_over(self) -> bool:
        """Whether the optimizer's momentum is taken over."""

    # -- Horovod's interface, while it traces a function

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
        i = self._call.claim(tensor)
        if i is None:
            self._call = self._new_call(tensor)
            i = self._call.claim(tensor)
            assert i is not None  # `reduction_of` found it
        call, (_, variable) = self._call, self._call.variables[i]
        if variable.direct:
            # It is reshaped because `_begin` may refuse the step: a control dependency would stay
            # outside of the branch that reduces.
            name = f"{self._label}.{variable.number}"
            carrier = tf.reshape(tf.cast(tensor, variable.carried), call.flat[i], name=name)
            return carrier, (variable, tensor.dtype, [call.number])
        sends_number = variable.name == self._exchange.sends_number
        with tf.device("/cpu:0"):
            inputs = [
                call.number,
                call.copied(i),
                *call.squared_norm,
                *call.lr,
                *read_and_clear(variable.squares),
            ]
            dtypes = [variable.carried, *dtypes_of(variable.moved[:1]), *["int64"] * sends_number]
            carrier, *message = python_operation(self._submit, variable, inputs, dtypes)
            numbers = self._move(_SUM, [message.pop()], "step") if sends_number else []
            for stage, collective in enumerate(variable.moved):
                if stage:
                    advance = functools.partial(self._advance, stage=stage)
                    message, numbers = (
                        python_operation(
                            advance,
                            variable,
                            [call.number, *message, *numbers],
                            dtypes_of([collective]),
                        ),
                        [],
                    )
                message = self._move(collective, message, f"{variable.number}.{stage}")
            # Horovod names its own reduction after what it reduces.
            carrier = tf.identity(carrier, name=f"{self._label}.{variable.number}")
        return carrier, (variable, tensor.dtype, [call.number, *message, *numbers])

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Called by Horovod with what it reduced: returns the gradient."""
        if ctx is None:
            return tensor
        variable, dtype, (number, *brought) = ctx
        with tf.device("/cpu:0"):
            inputs = [number, tf.raw_ops.Snapshot(input=tensor), *brought]
            finish = functools.partial(self._finish, half=dtype == tf.float16)
            (result,) = python_operation(finish, variable, inputs, [variable.result])
            with tf.control_dependencies([result]):
                # TensorFlow drops what is read and not used.
                tf.identity(self._turn.read_value())
        result.set_shape(variable.shape)
        return tf.cast(result, dtype)

    def _new_call(self, tensor: Any) -> Call:
        """The next call of the function that is being traced, for all gradients that Horovod
        compresses with this one."""
        grads, sources, factor, _, optimizer = reduction_of(tensor)
        self._factor = factor
        self._exchange.handover.check_host(factor())
        self._check_serves(optimizer)
        self._served = optimizer
        self._local |= local_sources()
        self._note_exchange()
        pairs = [
            (grad, source) for grad, source in zip(grads, sources) if isinstance(grad, tf.Tensor)
        ]
        variables = [(grad, variable) for (grad, _), variable in zip(pairs, self._register(pairs))]
        if optimizer is not None:
            # Keras saves the function with which Horovod's optimizer reduces. All variables that
            # the function captures have to be the optimizer's.
            optimizer._track_trackable(self._turn, f"{self._label}.turn", overwrite=True)
        unseen = [
            variable.name
            for _, variable in variables
            if variable.squares is not None and not variable.observed
        ]
        if unseen:
            names = ", ".join(unseen)
            raise ValueError(
                f"moments=microbatch has seen no backward pass of {names}: it needs the bound "
                f"optimizer's minimize or fit. {ONE_PASS}"
            )
        scaler = self._agreed_scaler()
        # Of the branches in which Horovod compresses.
        around = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)
        if around is None:
            raise ValueError(
                "gradients are compressed in graphs, which Horovod makes also of eager code: not "
                "with run_functions_eagerly(True)"
            )
        with around.as_default(), tf.device("/cpu:0"):
            number, flat = self._begin_operation([source for _, source in pairs], scaler)
            if any(
                collective.verb in ("allgather", "alltoall")
                for _, variable in variables
                for collective in variable.moved
            ):
                number = self._counted(number, variables[0][1])
            norm, grads = functools.partial(squared_norm_of, factor), [grad for grad, _ in pairs]
            squared_norm = (
                [tf.numpy_function(norm, grads, tf.float64, stateful=False)]
                if self._compressor.clip_norm is not None
                else []
            )
            lr = (
                [learning_rate_of(optimizer or self._optimizer)]
                if self._compressor.follow_lr
                else []
            )
        return Call(variables, number, flat, squared_norm, lr)

    def _check_serves(self, optimizer: Any) -> None:
        """Raises ValueError where the compression is bound to another optimizer."""
        if self._takes_over and optimizer and not isinstance(optimizer, self._momentum_class or ()):
            raise ValueError(
                "this compression has taken over the momentum of another optimizer than the one it "
                "serves, which would apply its own besides: "
                "bind it to the optimizer that hvd.DistributedOptimizer gets, and make a new one "
                "for each"
            )
        bound = self._applying_class
        if self._elastic and bound and optimizer and not isinstance(optimizer, bound):
            raise ValueError(
                "this compression is bound to another optimizer than the one it serves, which "
                "would not apply what a rank that is left alone holds "
                "back: bind it to the optimizer that hvd.DistributedOptimizer gets"
            )

    def _agreed_scaler(self) -> Any:
        """The loss scaler, if there is one: all ranks begin with the same scale."""
        scaler = self._grad_scaler or loss_scaler()
        if scaler is not None and self._elastic:
            check_elastic_scale(scaler)
        elif scaler is not None:
            agree(
                self._transport,
                f"{self._label}.scale",
                {"initial loss scale": float(scaler.initial_scale)},
            )
        return scaler

    def _begin_operation(self, sources: List[Any], scaler: Any) -> Tuple[Any, List[Any]]:
        """The operation that begins a call: its number, and for each gradient the shape [-1]. It is
        stateful, so that every call of the function has its own, and what depends on it is not
        folded or shared between calls. It brings values of the smallest variable, because
        TensorFlow runs a trace again for others of the same shapes."""
        variables = [source for source in sources if isinstance(source, tf.Variable)]
        known = min(variables, key=lambda variable: variable.shape.num_elements(), default=None)
        scale = tf.constant(1.0) if scaler is None else tf.cast(scaler.loss_scale, tf.float32)
        depends = self._optimizer is not None and (self._takes_over or self._compressor.follow_lr)
        unapplied = Unapplied(sources if depends else [], self._applied)
        begin = functools.partial(self._begin, len(sources), known, unapplied, self._traces)
        with tf.control_dependencies([self._turn.assign_add(1)]):
            inputs = [scale, *([] if known is None else [first_values(known)])]
            number, flat = tf.numpy_function(begin, inputs, [tf.int64, tf.int32])
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

    def _register(self, pairs: List[Tuple[Any, Any]]) -> List[Variable]:
        """The Variable of each (gradient, source). New ones become known on all ranks at once."""
        self._refuse_unsynced(_ELASTIC_STATE)
        self.handshake()
        keys, new = [], {}
        names = {variable.name for variable in self._variables.values()}
        for i, (grad, source) in enumerate(pairs):
            key, name, shape = identified(i, grad, source)
            keys.append(key)
            if key not in self._variables and key not in new:
                if not grad.dtype.is_floating:
                    raise TypeError(
                        f"{name}: gradients of {grad.dtype.name} cannot be compressed; real "
                        f"floating point is needed"
                    )
                name = next(
                    n
                    for n in itertools.chain([name], (f"{name}_{k}" for k in itertools.count(1)))
                    if n not in names
                )
                names.add(name)
                new[key] = name, shape, grad.dtype == tf.float64
            elif key in self._variables and self._variables[key].shape != shape:
                had = self._variables[key].shape
                raise ValueError(
                    f"{name} has the shape {shape} and had {had} before: residuals are kept for "
                    f"variables, or tensors of one shape"
                )
        if new:
            self._make_known(new)
        return [self._variables[key] for key in keys]

    def _make_known(self, new: Dict[Any, Tuple[str, Tuple[int, ...], bool]]) -> None:
        """Adds variables, {key: (name, shape, whether it is of float64)}, with the state that was
        loaded for them."""
        shapes = {name: list(shape) for name, shape, _ in new.values()}
        # Which this rank has from others, that know these variables already.
        if not (self._elastic and self._saved):
            agree(self._transport, f"{self._label}.{len(self._variables)}", {"variables": shapes})
        missing = [name for name in shapes if self._saved is not None and name not in self._saved]
        if missing:
            raise ValueError(
                f"the state that was loaded does not fit: it has nothing for {', '.join(missing)}. "
                f"Was it this model? Keras numbers layers "
                "without a name throughout a process: name them, or call "
                "tf.keras.backend.clear_session() first"
            )
        for key, (name, shape, is_float64) in new.items():
            self._exchange.add(
                name, shape, self._compressor, self._saved[name] if self._saved else None
            )
            number = self._numbers.setdefault(name, len(self._numbers))
            self._variables[key] = self._described(Variable(name, number, shape, is_float64))
        self._meet()
        if self._saved is not None:
            self._saved = {name: saved for name, saved in self._saved.items() if name not in shapes}
            if self._elastic:
                # What becomes known from now on does so on all ranks.
                self._saved = self._saved or None

    def _described(self, variable: Variable) -> Variable:
        """The variable, which says what traces have to know of its compressor."""
        compressor = self._exchange.compressor_of(variable.name)
        collectives = compressor.collectives(self._process_set.size())
        variable.carried, variable.moved = (
            (collectives[0].dtype, ())
            if collectives[0].verb == "host"
            else ("float32", collectives)
        )
        if variable.is_float64 and self._exchange.carries_float64(variable.name):
            variable.carried = "float64"
        clips = self._compressor.clip_norm is not None
        dense = not variable.moved and variable.carried != "float16" and not clips
        variable.direct = (
            dense and not self._exchange.owes(variable.name) and not self._sees_gradients
        )
        if not (self._microbatches and hasattr(compressor, "moments")):
            variable.squares, variable.observed = None, False
        elif variable.squares is None:
            variable.squares = lasting_variable(variable.shape, tf.float32)
        return variable

    def _observe(self, grads_and_vars: Iterable[Tuple[Any, Any]]) -> List[Tuple[Any, Any]]:
        """Adds the squares of one backward pass."""
        grads_and_vars = list(grads_and_vars)
        if not self._microbatches:
            return grads_and_vars
        # Sparse gradients count where they become dense afterwards; the squares of the others are
        # not used.
        pairs = [
            (tf.convert_to_tensor(grad), source)
            for grad, source in grads_and_vars
            if grad is not None
        ]
        for (grad, _), variable in zip(pairs, self._register(pairs)):
            if variable.squares is not None:
                variable.squares.assign_add(tf.square(tf.cast(grad, tf.float32)))
                variable.observed = True
        return grads_and_vars

    def _move(self, collective: Collective, message: List[Any], name: str) -> List[Any]:
        """Adds the operation that moves a message; returns what it brings, in as many tensors."""
        # Named as Horovod names its own: hvd.elastic.run knows by that whose errors mean that a
        # rank is gone.
        options = {
            "name": f"Horovod{collective.verb.capitalize()}_{self._label}.{name}",
            "process_set": self._process_set,
            "ignore_name_scope": True,
        }
        if collective.verb == "alltoall":
            moved = hvd.alltoall(*message, **options)
        elif collective.verb == "allgather":
            moved = [hvd.allgather(*message, **options)]
        else:
            moved = [hvd.allreduce(*message, op=_OPS[collective.op], **options)]
        return [tf.raw_ops.Snapshot(input=tensor) for tensor in moved]

    def _note_traces(self) -> None:
        """Keeps the functions whose traces now get operations that depend on this compression."""
        if not tf.executing_eagerly():
            self._traced.update(functions_under_trace())

    def _note_exchange(self) -> None:
        """The same for functions whose traces now get an exchange. Others that call these, which
        are traced already, are noted when they do."""
        self._note_traces()
        for function in functions_under_trace():
            call_before(function, self, self._function_called)

    def _function_called(self) -> None:
        if tf.executing_eagerly():
            self._before_call()
        else:
            self._note_exchange()

    def _before_call(self) -> None:
        """A call that exchanges begins, by code that is not traced."""

    # -- what Horovod does not reduce, while it is alone

    @tf.autograph.experimental.do_not_convert
    def _send_alone(
        self, optimizer: Any, grads_and_vars: Iterable[Tuple[Any, Any]]
    ) -> List[Tuple[Any, Any]]:
        """Adds the operation that, in elastic jobs, while there is one rank, takes a step with
        these gradients: Horovod, which looks at the number of ranks in every step, leaves them as
        they are then. Returns the gradients to apply."""
        grads_and_vars = list(grads_and_vars)
        known = [
            i
            for i, (grad, source) in enumerate(grads_and_vars)
            if isinstance(grad, tf.Tensor) and source.ref() in self._variables
        ]
        if not known:
            return grads_and_vars
        self._note_traces()
        grads = [grads_and_vars[i][0] for i in known]
        variables = [self._variables[grads_and_vars[i][1].ref()] for i in known]

        def alone() -> List[Any]:
            lr = [learning_rate_of(optimizer)] if self._compressor.follow_lr else []
            squares = [read for variable in variables for read in read_and_clear(variable.squares)]
            step = functools.partial(with_denormals, self._step_alone, variables)
            return tf.numpy_function(step, [*grads, *lr, *squares], [grad.dtype for grad in grads])

        with tf.device("/cpu:0"):
            results = tf.cond(
                hvd.size_op() > 1, lambda: [tf.identity(grad) for grad in grads], alone
            )
        for i, result, variable in zip(known, results, variables):
            result.set_shape(variable.shape)
            grads_and_vars[i] = result, grads_and_vars[i][1]
        return grads_and_vars

    # -- the same, while the graph runs

    def _begin(
        self,
        tensors: int,
        known: Any,
        unapplied: Unapplied,
        traces: int,
        scale: np.ndarray,
        values: Any = None,
    ) -> Tuple[np.int64, np.ndarray]:
        if traces != self._traces:
            raise ValueError(
                "a function was traced before compression.switch(), and holds on to that trace: "
                "make the function anew, by tf.function(step), or "
                "with Keras model.make_train_function(force=True)"
            )
        if known is not None and not np.array_equal(
            first_values(known).numpy(), values, equal_nan=True
        ):
            raise ValueError(
                f"gradients of other variables come to this compression than {known.name} and "
                f"those that it was traced with: make one for "
                "each model, and in eager code for each set of variables that is trained by itself"
            )
        unapplied.check()
        # It has a momentum where one was taken over.
        compressor: Any = self._compressor
        if (
            self._takes_over
            and self._served is not None
            and abs(float(self._served.momentum) - compressor.momentum) > 1e-6
        ):
            warn_once(
                f"SGD's momentum was changed to {float(self._served.momentum):g}: {compressor.id} "
                f"goes on with "
                f"{compressor.momentum:g}, which it took over. (Horovod's momentum_correction is "
                f"not needed: the learning rate is no part "
                "of this momentum)"
            )
        number = self._exchange.begin(
            tensors, self._process_set.rank(), self._process_set.size(), float(scale)
        )
        return np.int64(number), np.full((tensors, 1), -1, np.int32)

    def _check_count(self, number: np.int64, ranks: np.ndarray) -> np.int64:
        size = self._process_set.size()
        gone = size - int(ranks[0])
        if gone:
            raise error_of_joined(gone, size, [], REDUCES_ONLY)
        return number

    def _submit(
        self, variable: Variable, call: int, grad: np.ndarray, *options: np.ndarray
    ) -> List[np.ndarray]:
        given = iter(options)
        squared_norm = float(next(given)) if self._compressor.clip_norm is not None else None
        lr = float(next(given)) if self._compressor.follow_lr else None
        squares = next(given).reshape(-1) if variable.squares is not None else None
        grad = self._of_type(variable, grad)
        carrier, message, number = self._exchange.submit(
            variable.name, grad, call, squares, squared_norm, lr
        )
        numbers = (
            [np.empty(0, np.int64) if number is None else number]
            if variable.name == self._exchange.sends_number
            else []
        )
        return [carrier, *(message or self._nothing(variable.moved[:1])), *numbers]

    def _advance(self, variable: Variable, call: int, *brought: np.ndarray, stage: int) -> Message:
        arrived, numbers = split_message(brought, variable.moved[stage - 1])
        return self._exchange.advance(variable.name, call, arrived, numbers) or self._nothing(
            variable.moved[stage : stage + 1]
        )

    def _step_alone(self, variables: List[Variable], *arrays: np.ndarray) -> List[np.ndarray]:
        grads, given = arrays[: len(variables)], iter(arrays[len(variables) :])
        lr = float(next(given)) if self._compressor.follow_lr else None
        squared_norm = (
            float(squared_norm_of(lambda: 1.0, *grads))
            if self._compressor.clip_norm is not None
            else None
        )
        call = self._exchange.begin(
            len(variables), self._process_set.rank(), self._process_set.size()
        )
        results = []
        for variable, grad in zip(variables, grads):
            squares = next(given).reshape(-1) if variable.squares is not None else None
            flat = np.array(grad, np.float64 if variable.is_float64 else np.float32).reshape(-1)
            flat = self._of_type(variable, flat)
            result = self._exchange.step_alone(variable.name, flat, call, squares, squared_norm, lr)
            results.append(
                self._checked(variable, result, grad.dtype == np.float16).astype(
                    grad.dtype, copy=False
                )
            )
        return results

    def _of_type(self, variable: Variable, grad: np.ndarray) -> np.ndarray:
        """The gradient in the type in which the exchange takes it."""
        if grad.dtype == variable.result:
            return grad
        with np.errstate(over="ignore", under="ignore"):
            narrow = grad.astype(variable.result)
        lost = (narrow == 0) & (grad != 0) | np.isinf(narrow) & np.isfinite(grad)
        if lost.any():
            self._tell_of_float32(variable.name)
        return narrow

    def _nothing(self, collectives: Sequence[Collective]) -> Message:
        """The message of these collectives, at most one, where a step has none for them."""
        splits = np.zeros(self._process_set.size(), np.int32)
        return [
            splits if dtype == "int32" and c.verb == "alltoall" else np.empty(0, dtype)
            for c in collectives
            for dtype in dtypes_of([c])
        ]

    def _finish(
        self, variable: Variable, call: int, reduced: np.ndarray, *brought: np.ndarray, half: bool
    ) -> List[np.ndarray]:
        if variable.direct:  # Horovod has reduced it already.
            self._exchange.submit(variable.name, reduced.reshape(-1), call)
        arrived, numbers = split_message(brought, variable.moved[-1]) if brought else (None, None)
        result = self._exchange.finish(variable.name, call, reduced.reshape(-1), arrived, numbers)
        return [self._checked(variable, result, half)]

    def _checked(self, variable: Variable, result: np.ndarray, half: bool) -> np.ndarray:
        if half and not kernels.of(result).max_abs(result) < _INFINITE_HALF:
            self._exchange.reject(variable.name)
        return result.reshape(variable.shape)
