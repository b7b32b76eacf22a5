"""Horovod's Compressor interface, `compress` and `decompress`, as operations of a TensorFlow graph over the exchange."""
import contextlib
import copy
import dataclasses
import functools
import itertools
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Type, Union

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError
from tensorflow.python.ops import control_flow_util

from .. import checkpoint, kernels
from ..binding import REFUSED_ALONE, Binding, description_of, is_elastic, momentum_of, requested_compressor, warn_once
from ..compressors import get_compressor
from ..compressors.base import Compressor
from ..handshake import agree, gather
from ..plan import compressor_for
from ..requests import Collective
from ..transport.base import ProcessSetRanks
from .exchange import GraphExchange, Message, Saved
from .horovod_internals import forget_traces, functions_under_trace, loss_scaler, reduction_of
from .optimizer import (
    SGD,
    before_applying,
    check,
    is_plain_sgd,
    learning_rate_of,
    leave_momentum,
    options_of,
    refuse_own_steps,
    tell_of_takeover,
    watch_passes,
)

_OPS = {"sum": hvd.Sum, "max": hvd.Max}
_SUM = Collective("allreduce", "int64", "sum")
_ONE_PASS = "A tape's gradient is one pass, for which moments=minibatch is the same"
_ELASTIC_STATE = "hvdc.elastic.TensorFlowKerasState(model, compression=compression)"
_INFINITE_HALF = 65520  # numbers as large as this become infinite in float16


class _Eager(ProcessSetRanks):
    """Horovod's collectives while no graph runs: for what ranks compare before they exchange gradients, and for portable states. They go through
    graphs all the same: eagerly Horovod ignores names, and threads that trace at once would get each other's messages."""

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        return self._run(hvd.allgather, name, payload)

    def allreduce(self, name: str, array: np.ndarray) -> Callable[[], np.ndarray]:
        return self._run(functools.partial(hvd.allreduce, op=hvd.Sum), name, array)

    def _run(self, collective: Callable[..., Any], name: str, array: np.ndarray) -> Callable[[], np.ndarray]:
        with tf.init_scope(), tf.device("/cpu:0"):
            sent = tf.constant(array)
            collective = functools.partial(collective, name=name, ignore_name_scope=True, process_set=self._process_set)
            try:
                return tf.function(collective, autograph=False).get_concrete_function(sent)(sent).numpy
            except tf.errors.UnknownError as error:
                raise HorovodInternalError(str(error)) from error


@dataclasses.dataclass(eq=False)
class _Variable:
    """A variable whose gradients are compressed."""

    name: str
    number: int  # in the order in which they became known: alike on all ranks, as names need not be
    shape: Tuple[int, ...]
    carried: str = "float32"  # dtype of what the host reduces
    moved: Sequence[Collective] = ()  # those of the messages that travel beside it
    direct: bool = False  # whether nothing is done to its gradients before Horovod reduces them, so that they need no operation of ours
    squares: Any = None  # a tf.Variable, the sum of its passes' squared gradients, where moments=microbatch
    observed: bool = False  # whether one of its passes was traced


class _Chosen(NamedTuple):
    """How variables are compressed. requested: as the spec says; compressor: with the momentum that it applies; takes_over: whether that is taken
    over from an SGD."""

    requested: Compressor
    compressor: Compressor
    takes_over: bool = False


@dataclasses.dataclass(eq=False)
class _Call:
    """What each call of one traced function exchanges."""

    variables: List[Tuple[Any, _Variable]]  # (gradient, _Variable)
    number: Any  # of the call, a tensor
    flat: List[Any]  # for each gradient, the shape [-1]
    squared_norm: List[Any]  # where gradients are clipped, as GraphExchange.submit expects it; else empty
    lr: List[Any]  # the learning rate, where residuals follow it; else empty
    compressed: Set[int] = dataclasses.field(default_factory=set)

    def claim(self, tensor: Any) -> Optional[int]:
        """The position of a gradient that was not compressed yet, or None. Variables that have the same one are served in order."""
        for i, (grad, _) in enumerate(self.variables):
            if grad is tensor and i not in self.compressed:
                self.compressed.add(i)
                return i
        return None

    def copied(self, i: int) -> Any:
        """The gradient, flat, in memory that nobody else reads, because it is worked in: a copy only where somebody holds it. Snapshot alone is not
        enough: TensorFlow computes it once for equal gradients, and for all steps where they are constant. The shape comes from an operation
        that it must run, and differs from those of other gradients to it."""
        return tf.raw_ops.Snapshot(input=tf.reshape(tf.cast(self.variables[i][0], tf.float32), self.flat[i]))


class BoundCompression(Binding):
    """A compression for hvd.DistributedOptimizer, hvd.DistributedGradientTape and horovod.tensorflow.keras: compression=….

    spec: as for horovod_compress.get_compressor.
    optimizer: the Keras optimizer, new or legacy, that will be wrapped, or that applies what a tape brings. An SGD's momentum
        and Nesterov are taken over by algorithms that correct momentum (dgc). None: `bind` follows, before the first gradient.
    process_set: the one that Horovod's optimizer or tape gets; default: all ranks.
    grad_scaler: a LossScaleOptimizer that scales the loss of which a tape has the gradients: what is kept of gradients then follows its
        scale. Implies discardable. Where it wraps Horovod's optimizer it is found without being given.
    discardable: a step whose gradients are not finite is forgotten, as if it had never been, and so is one after which `discard()` is
        called. Takes as much memory again as the algorithm's state, and the time to copy that in each step.

    One compression serves one model on one rank. Its residuals are this rank's own: save `state_dict()` on every rank, or use
    `StateCheckpoint`. Variables become known when their gradients are first traced. Raises ValueError for bad options and
    optimizers; the first trace, or `handshake()`, raises MismatchError, on all ranks, where ranks were started differently.
    """

    def __init__(
        self, spec: Any, optimizer: Any = None, process_set: Any = None, grad_scaler: Any = None, discardable: bool = False
    ) -> None:
        super().__init__(hvd, process_set, hint="variables need not be named in TensorFlow, and ")
        self._elastic = is_elastic()
        self._synced = not self._elastic
        self._active = bool(self._process_set.included()) and (self._process_set.size() > 1 or self._elastic)
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError(
                "TensorFlow 1's graph mode is not supported: a compression's operations belong to functions that TensorFlow 2 traces. Leave "
                "out tf.compat.v1.disable_eager_execution() and disable_v2_behavior()"
            )
        if optimizer is not None:
            check(optimizer)
        check_scaler(grad_scaler)
        self._grad_scaler = grad_scaler
        self._transport = _Eager(self._process_set)
        self._optimizer: Any = None  # the bound one; where a tape brings gradients, the one that applies them
        self._momentum_class: Optional[Type] = None  # the class of optimizers that can leave momentum to this compression
        self._lives_on = False  # whether momentum that an SGD has gathered by itself still moves variables where it is taken over
        self._elastic_class: Optional[Type] = None  # the class of optimizers that a rank alone has its gradients changed by
        self._served: Any = None  # Horovod's optimizer, where gradients come from that
        self._variables: Dict[Any, _Variable] = {}  # by key, see `_identified`
        self._call = _Call([], None, [], [], [])  # of the function that is being traced
        self._traced: "weakref.WeakSet[Any]" = weakref.WeakSet()  # functions with operations of this compression
        self._traces = 0  # how often a switch has made their traces useless
        # Where a state was loaded: of variables that are not known yet. None: the exchange has it already.
        self._saved: Optional[Dict[str, Optional[Saved]]] = None
        self._numbers: Dict[str, int] = {}  # of variables, by name
        self._compressor = get_compressor(spec)
        self._chosen: Optional[_Chosen] = None  # since `bind`
        self._watches = self._microbatches = False  # whether backward passes can be seen, and whether they are
        self._exchange: GraphExchange = GraphExchange(
            self._compressor, *self._rank_and_size(), self._label, discardable or grad_scaler is not None, dense_alone=self._elastic
        )
        if optimizer is not None:
            self.bind(optimizer)

    def bind(self, optimizer: Any) -> None:
        """Decides what depends on the optimizer, and takes over what it leaves to this compression. Once, before the first gradient; also of
        Horovod's own optimizer. None: nobody knows the optimizer, and ValueError where it is needed."""
        chosen = self._choose(self._compressor, optimizer)
        self._optimizer = optimizer
        if isinstance(optimizer, SGD) and self._active:
            self._momentum_class = leave_momentum(optimizer, self._covers, lambda: self._lives_on)
        self._watches = self._active and getattr(chosen.compressor, "moments", None) == "microbatch"
        if self._watches:
            watch_passes(optimizer, self._observe)
        self._use(chosen)
        self._exchange.compressor = self._compressor
        if self._elastic:
            self._elastic_class = before_applying(optimizer, self._send_alone)
        self._number()
        self._agreed = False

    def serves(self, variables: Iterable[Any]) -> bool:
        """Whether some of these are known."""
        return any(isinstance(variable, tf.Variable) and variable.ref() in self._variables for variable in variables)

    def _choose(self, spec: Any, optimizer: Any) -> _Chosen:
        """What a spec comes to with an optimizer, bound or Horovod's. ValueError for what cannot be served."""
        compressor = requested_compressor(spec, optimizer, is_plain_sgd(optimizer))
        if self._elastic:
            _check_elastic(compressor, optimizer)
        checked_moments(compressor, optimizer)
        if not compressor.corrects_momentum or optimizer is None:
            return _Chosen(compressor, compressor)
        momentum, nesterov = momentum_of(compressor, options_of(optimizer)) if isinstance(optimizer, SGD) else (0.0, False)
        takes_over = bool(momentum and self._active)
        if takes_over:
            refuse_own_steps(optimizer)
        return _Chosen(compressor, compressor.bound(momentum, nesterov), takes_over)

    def _use(self, chosen: _Chosen) -> None:
        compressor: Any = chosen.compressor
        if chosen.takes_over and not self._takes_over:
            tell_of_takeover(self._optimizer, compressor.id, compressor.momentum, compressor.nesterov)
            self._lives_on = self._lives_on or bool(self._exchange.shapes)
        self._chosen, self._compressor = chosen, compressor
        self._microbatches = self._watches and getattr(compressor, "moments", None) == "microbatch"

    @property
    def _takes_over(self) -> bool:
        """Whether the optimizer's momentum is taken over."""
        return self._chosen is not None and self._chosen.takes_over

    def _covers(self, variable: Any) -> bool:
        """Whether a variable's momentum is taken over, where its update is traced."""
        self._note_traces()
        return self._takes_over and variable.ref() in self._variables

    def _note_traces(self) -> None:
        """Keeps the functions whose traces now get operations that depend on this compression."""
        if not tf.executing_eagerly():
            self._traced.update(functions_under_trace())

    # -- Horovod's interface, while it traces a function ------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor: Any) -> Tuple[Any, Any]:
        """Called by Horovod with a variable's gradient: returns what Horovod is to reduce, and a context."""
        if not self._active:
            return tensor, None
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError("functions that XLA compiles cannot compress gradients: say jit_compile=False")
        i = self._call.claim(tensor)
        if i is None:
            self._call = self._new_call(tensor)
            i = self._call.claim(tensor)
            assert i is not None  # `reduction_of` found it
        call, (_, variable) = self._call, self._call.variables[i]
        if variable.direct:
            # It is reshaped because `_begin` may refuse the step: a control dependency would stay outside of the branch that reduces.
            carrier = tf.reshape(tf.cast(tensor, tf.float32), call.flat[i], name=f"{self._label}.{variable.number}")
            return carrier, (variable, tensor.dtype, [call.number])
        sends_number = variable.name == self._exchange.sends_number
        with tf.device("/cpu:0"):
            inputs = [call.number, call.copied(i), *call.squared_norm, *call.lr, *_read_and_clear(variable.squares)]
            dtypes = [variable.carried, *_dtypes(variable.moved[:1]), *["int64"] * sends_number]
            carrier, *message = _python(self._submit, variable, inputs, dtypes)
            numbers = self._move(_SUM, [message.pop()], "step") if sends_number else []
            for stage, collective in enumerate(variable.moved):
                if stage:
                    advance = functools.partial(self._advance, stage=stage)
                    message, numbers = _python(advance, variable, [call.number, *message, *numbers], _dtypes([collective])), []
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
            (result,) = _python(functools.partial(self._finish, half=dtype == tf.float16), variable, inputs, ["float32"])
        result.set_shape(variable.shape)
        return tf.cast(result, dtype)

    def _new_call(self, tensor: Any) -> _Call:
        """The next call of the function that is being traced, for all gradients that Horovod compresses with this one."""
        grads, sources, factor, _, optimizer = reduction_of(tensor)
        if self._takes_over and optimizer and not isinstance(optimizer, self._momentum_class or ()):
            raise ValueError(
                "this compression has taken over the momentum of another optimizer than the one it serves, which would apply its own besides: "
                "bind it to the optimizer that hvd.DistributedOptimizer gets, and make a new one for each"
            )
        if self._elastic_class and optimizer and not isinstance(optimizer, self._elastic_class):
            raise ValueError(
                "this compression is bound to another optimizer than the one it serves, which would not apply what a rank that is left alone holds "
                "back: bind it to the optimizer that hvd.DistributedOptimizer gets"
            )
        self._served = optimizer
        self._note_traces()
        pairs = [(grad, source) for grad, source in zip(grads, sources) if isinstance(grad, tf.Tensor)]
        variables = [(grad, variable) for (grad, _), variable in zip(pairs, self._register(pairs))]
        unseen = [variable.name for _, variable in variables if variable.squares is not None and not variable.observed]
        if unseen:
            names = ", ".join(unseen)
            raise ValueError(f"moments=microbatch has seen no backward pass of {names}: it needs the bound optimizer's minimize or fit. {_ONE_PASS}")
        scaler = self._grad_scaler or loss_scaler()
        if scaler is not None and self._elastic:
            _check_elastic_scale(scaler)
        elif scaler is not None:
            agree(self._transport, f"{self._label}.scale", {"initial loss scale": float(scaler.initial_scale)})
        around = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)  # of the branches in which Horovod compresses
        if around is None:
            raise ValueError("gradients are compressed in graphs, which Horovod makes also of eager code: not with run_functions_eagerly(True)")
        with around.as_default(), tf.device("/cpu:0"):
            number, flat = self._begin_operation([source for _, source in pairs], scaler)
            norm, grads = functools.partial(_squared_norm, factor), [grad for grad, _ in pairs]
            squared_norm = [tf.numpy_function(norm, grads, tf.float64, stateful=False)] if self._compressor.clip_norm is not None else []
            lr = [learning_rate_of(optimizer or self._optimizer)] if self._compressor.follow_lr else []
        return _Call(variables, number, flat, squared_norm, lr)

    def _begin_operation(self, sources: List[Any], scaler: Any) -> Tuple[Any, List[Any]]:
        """The operation that begins a call: its number, and for each gradient the shape [-1]. It is stateful, so that every call of the function
        has its own, and what depends on it is not folded or shared between calls. It brings values of the smallest variable, because
        TensorFlow runs a trace again for others of the same shapes."""
        variables = [source for source in sources if isinstance(source, tf.Variable)]
        known = min(variables, key=lambda variable: variable.shape.num_elements(), default=None)
        scale = tf.constant(1.0) if scaler is None else tf.cast(scaler.loss_scale, tf.float32)
        begin = functools.partial(self._begin, len(sources), known, self._traces)
        number, flat = tf.numpy_function(begin, [scale, *([] if known is None else [_first_values(known)])], [tf.int64, tf.int32])
        if known is not None:
            with tf.control_dependencies([number]):
                known.read_value()  # What writes to the variable (a weight decay) waits for the comparison.
        return number, tf.unstack(flat, len(sources))

    def _register(self, pairs: List[Tuple[Any, Any]]) -> List[_Variable]:
        """The _Variable of each (gradient, source). New ones become known on all ranks at once."""
        self._refuse_unsynced(_ELASTIC_STATE)
        self.handshake()
        keys, new = [], {}
        names = {variable.name for variable in self._variables.values()}
        for i, (grad, source) in enumerate(pairs):
            key, name, shape = _identified(i, grad, source)
            keys.append(key)
            if key not in self._variables and key not in new:
                if not grad.dtype.is_floating:
                    raise TypeError(f"{name}: gradients of {grad.dtype.name} cannot be compressed; real floating point is needed")
                name = next(n for n in itertools.chain([name], (f"{name}_{k}" for k in itertools.count(1))) if n not in names)
                names.add(name)
                new[key] = name, shape
            elif key in self._variables and self._variables[key].shape != shape:
                had = self._variables[key].shape
                raise ValueError(f"{name} has the shape {shape} and had {had} before: residuals are kept for variables, or tensors of one shape")
        if new:
            self._make_known(new)
        return [self._variables[key] for key in keys]

    def _make_known(self, new: Dict[Any, Tuple[str, Tuple[int, ...]]]) -> None:
        """Adds variables, {key: (name, shape)}, with the state that was loaded for them."""
        shapes = {name: list(shape) for name, shape in new.values()}
        if not (self._elastic and self._saved):  # which this rank has from others, that know these variables already
            agree(self._transport, f"{self._label}.{len(self._variables)}", {"variables": shapes})
        missing = [name for name in shapes if self._saved is not None and name not in self._saved]
        if missing:
            raise ValueError(
                f"the state that was loaded does not fit: it has nothing for {', '.join(missing)}. Was it this model? Keras numbers layers "
                "without a name throughout a process: name them, or call tf.keras.backend.clear_session() first"
            )
        for key, (name, shape) in new.items():
            self._exchange.add(name, shape, self._compressor, self._saved[name] if self._saved else None)
            number = self._numbers.setdefault(name, len(self._numbers))
            self._variables[key] = self._described(_Variable(name, number, shape))
        if self._saved is not None:
            self._saved = {name: saved for name, saved in self._saved.items() if name not in shapes}
            if self._elastic:
                self._saved = self._saved or None  # What becomes known from now on does so on all ranks.

    def _described(self, variable: _Variable) -> _Variable:
        """The variable, which says what traces have to know of its compressor."""
        compressor = compressor_for(self._compressor, variable.name, variable.shape)
        collectives = compressor.collectives(self._process_set.size())
        variable.carried, variable.moved = (collectives[0].dtype, ()) if collectives[0].verb == "host" else ("float32", collectives)
        dense = not variable.moved and variable.carried == "float32" and self._compressor.clip_norm is None
        variable.direct = dense and not self._exchange.owes(variable.name)
        if not (self._microbatches and hasattr(compressor, "moments")):
            variable.squares, variable.observed = None, False
        elif variable.squares is None:
            with tf.init_scope(), tf.device("/cpu:0"):
                variable.squares = tf.Variable(tf.zeros(variable.shape), trainable=False)
        return variable

    def _observe(self, grads_and_vars: Iterable[Tuple[Any, Any]]) -> List[Tuple[Any, Any]]:
        """Adds the squares of one backward pass."""
        grads_and_vars = list(grads_and_vars)
        if not self._microbatches:
            return grads_and_vars
        # Sparse gradients count where they become dense afterwards; the squares of the others are not used.
        pairs = [(tf.convert_to_tensor(grad), source) for grad, source in grads_and_vars if grad is not None]
        for (grad, _), variable in zip(pairs, self._register(pairs)):
            if variable.squares is not None:
                variable.squares.assign_add(tf.square(tf.cast(grad, tf.float32)))
                variable.observed = True
        return grads_and_vars

    def _move(self, collective: Collective, message: List[Any], name: str) -> List[Any]:
        """Adds the operation that moves a message; returns what it brings, in as many tensors."""
        # Named as Horovod names its own: hvd.elastic.run knows by that whose errors mean that a rank is gone.
        options = {"name": f"Horovod{collective.verb.capitalize()}_{self._label}.{name}", "process_set": self._process_set, "ignore_name_scope": True}
        if collective.verb == "alltoall":
            moved = hvd.alltoall(*message, **options)
        elif collective.verb == "allgather":
            moved = [hvd.allgather(*message, **options)]
        else:
            moved = [hvd.allreduce(*message, op=_OPS[collective.op], **options)]
        return [tf.raw_ops.Snapshot(input=tensor) for tensor in moved]

    # -- what Horovod does not reduce, while it is alone ------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def _send_alone(self, optimizer: Any, grads_and_vars: Iterable[Tuple[Any, Any]]) -> List[Tuple[Any, Any]]:
        """Adds the operation that, in elastic jobs, while there is one rank, takes a step with these gradients: Horovod, which looks at the number of
        ranks in every step, leaves them as they are then. Returns the gradients to apply."""
        grads_and_vars = list(grads_and_vars)
        known = [i for i, (grad, source) in enumerate(grads_and_vars) if isinstance(grad, tf.Tensor) and source.ref() in self._variables]
        if not known:
            return grads_and_vars
        self._note_traces()
        grads = [grads_and_vars[i][0] for i in known]
        variables = [self._variables[grads_and_vars[i][1].ref()] for i in known]

        def alone() -> List[Any]:
            lr = [learning_rate_of(optimizer)] if self._compressor.follow_lr else []
            squares = [read for variable in variables for read in _read_and_clear(variable.squares)]
            step = functools.partial(_with_denormals, self._step_alone, variables)
            return tf.numpy_function(step, [*grads, *lr, *squares], [grad.dtype for grad in grads])

        with tf.device("/cpu:0"):
            results = tf.cond(hvd.size_op() > 1, lambda: [tf.identity(grad) for grad in grads], alone)
        for i, result, variable in zip(known, results, variables):
            result.set_shape(variable.shape)
            grads_and_vars[i] = result, grads_and_vars[i][1]
        return grads_and_vars

    # -- the same, while the graph runs -----------------------------------------------------------------------------------

    def _begin(self, tensors: int, known: Any, traces: int, scale: np.ndarray, values: Any = None) -> Tuple[np.int64, np.ndarray]:
        if traces != self._traces:
            raise ValueError(
                "a function was traced before compression.switch(), and holds on to that trace: make the function anew, by tf.function(step), or "
                "with Keras model.make_train_function(force=True)"
            )
        if known is not None and not np.array_equal(_first_values(known).numpy(), values, equal_nan=True):
            raise ValueError(
                f"gradients of other variables come to this compression than {known.name} and those that it was traced with: make one for "
                "each model, and in eager code for each set of variables that is trained by itself"
            )
        compressor: Any = self._compressor  # It has a momentum where one was taken over.
        if self._takes_over and self._served is not None and abs(float(self._served.momentum) - compressor.momentum) > 1e-6:
            warn_once(
                f"SGD's momentum was changed to {float(self._served.momentum):g}: {compressor.id} goes on with "
                f"{compressor.momentum:g}, which it took over. (Horovod's momentum_correction is not needed: the learning rate is no part "
                "of this momentum)"
            )
        number = self._exchange.begin(tensors, self._process_set.rank(), self._process_set.size(), float(scale))
        return np.int64(number), np.full((tensors, 1), -1, np.int32)

    def _submit(self, variable: _Variable, call: int, grad: np.ndarray, *options: np.ndarray) -> List[np.ndarray]:
        given = iter(options)
        squared_norm = float(next(given)) if self._compressor.clip_norm is not None else None
        lr = float(next(given)) if self._compressor.follow_lr else None
        squares = next(given).reshape(-1) if variable.squares is not None else None
        carrier, message, number = self._exchange.submit(variable.name, grad, call, squares, squared_norm, lr)
        numbers = [np.empty(0, np.int64) if number is None else number] if variable.name == self._exchange.sends_number else []
        return [carrier, *(message or self._nothing(variable.moved[:1])), *numbers]

    def _advance(self, variable: _Variable, call: int, *brought: np.ndarray, stage: int) -> Message:
        arrived, numbers = _split_message(brought, variable.moved[stage - 1])
        return self._exchange.advance(variable.name, call, arrived, numbers) or self._nothing(variable.moved[stage : stage + 1])

    def _step_alone(self, variables: List[_Variable], *arrays: np.ndarray) -> List[np.ndarray]:
        grads, given = arrays[: len(variables)], iter(arrays[len(variables) :])
        lr = float(next(given)) if self._compressor.follow_lr else None
        squared_norm = float(_squared_norm(lambda: 1.0, *grads)) if self._compressor.clip_norm is not None else None
        call = self._exchange.begin(len(variables), self._process_set.rank(), self._process_set.size())
        results = []
        for variable, grad in zip(variables, grads):
            squares = next(given).reshape(-1) if variable.squares is not None else None
            flat = np.array(grad, np.float32).reshape(-1)
            result = self._exchange.step_alone(variable.name, flat, call, squares, squared_norm, lr)
            results.append(self._checked(variable, result, grad.dtype == np.float16).astype(grad.dtype, copy=False))
        return results

    def _nothing(self, collectives: Sequence[Collective]) -> Message:
        """The message of these collectives, at most one, where a step has none for them."""
        splits = np.zeros(self._process_set.size(), np.int32)
        return [splits if dtype == "int32" and c.verb == "alltoall" else np.empty(0, dtype) for c in collectives for dtype in _dtypes([c])]

    def _finish(self, variable: _Variable, call: int, reduced: np.ndarray, *brought: np.ndarray, half: bool) -> List[np.ndarray]:
        if variable.direct:  # Horovod has reduced it already.
            self._exchange.submit(variable.name, reduced.reshape(-1), call)
        arrived, numbers = _split_message(brought, variable.moved[-1]) if brought else (None, None)
        result = self._exchange.finish(variable.name, call, reduced.reshape(-1), arrived, numbers)
        return [self._checked(variable, result, half)]

    def _checked(self, variable: _Variable, result: np.ndarray, half: bool) -> np.ndarray:
        if half and not kernels.of(result).max_abs(result) < _INFINITE_HALF:
            self._exchange.reject(variable.name)
        return result.reshape(variable.shape)

    # -- for users --------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<{self._compressor!r} of {len(self._variables)} variables>"

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of those that compress."""
        return bool(self._process_set.included()) and self._process_set.rank() == 0

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """This rank's residuals and momentum, as NumPy arrays by variable and plain values: one a rank, as `StateCheckpoint` saves them.

        portable: all ranks call this at the same step, and get the same: the mean over ranks of what each has not sent yet, which any number of
        ranks can go on from. One file is enough. MismatchError where ranks are not at the same step.
        """
        state = self._state()
        if portable:
            return checkpoint.portable(state, self._transport, self._label) if self._active else {**state, "rank": None}
        return state

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """Continues from what `state_dict` has returned, of the same model: bit for bit from this rank's own, or from a list of all ranks', in any
        order, or from a portable one. Where that list is of another number of ranks, each rank gets their mean, so the mean of what ranks have
        not sent yet is kept. Variables that are not known yet get their state when they are. Raises ValueError, with nothing changed, for any
        other state; where variables are not known yet, tracing does."""
        if not self._process_set.included():
            return  # this rank compresses nothing
        with self._tracing_again():
            saved = self._exchange.load_state_dict(state)
            if saved and not self._active:
                raise ValueError(f"this state does not fit: {REFUSED_ALONE}")
            self._saved = {**self._untraced(), **copy.deepcopy(saved)}
            self._lives_on = bool((state if isinstance(state, dict) else state[0]).get("lives_on"))

    def switch(self, spec: Any) -> None:
        """Goes on with another compression, "topk:ratio=0.01" or {"id": "topk", "ratio": 0.01}, from the next step on.

        What ranks have not sent yet goes on: in what the new algorithm keeps, else densely in the first step. An SGD's momentum is taken over, or
        given back, and counts once. Functions whose operations change are traced again when they are called next. All ranks call it between the
        same two steps, as in a callback's on_epoch_begin. ValueError for a bad spec, RuntimeError in the middle of a step and for a compression
        that has no optimizer yet, MismatchError where ranks differ; nothing is changed then.
        """
        if self._chosen is None:
            raise RuntimeError(
                "this compression has not come to its optimizer yet: make it with that spec, or say hvdc.compression_of(optimizer).switch(…), which "
                "binds it to Horovod's optimizer"
            )
        self._switch(get_compressor(spec))

    def _switch(self, spec: Any, compare: bool = True) -> None:
        """compare: whether all ranks do it, here, and say so to each other. Where they are not together yet they go on from rank 0's."""
        exchange = self._exchange
        exchange.end_step()
        chosen = self._choose(spec, self._served or self._optimizer)
        if getattr(chosen.compressor, "moments", None) == "microbatch" and self._active and not self._watches:
            raise ValueError("moments=microbatch has to see every backward pass from the first one on: make the compression with it")
        self._place_saved()
        if self._active and compare and self._synced:
            advice = "Call it on all ranks, between the same two steps, with the same spec"
            agree(self._transport, f"{self._label}.switch", description_of(chosen.compressor), "called compression.switch()", advice)
            self._agreed = True
        gain = self._gain(chosen.takes_over) / self._gain(self._takes_over)
        tensors = {name: (shape, chosen.compressor) for name, shape in exchange.shapes.items()}
        with self._tracing_again():
            exchange.switch(chosen.compressor, tensors, dict.fromkeys(tensors, gain))
            self._use(chosen)

    def _place_saved(self) -> None:
        """Gives the exchange what a loaded state has of variables that are not known yet."""
        for name, saved in (self._saved or {}).items():
            if saved is not None:
                self._exchange.add(name, saved[-1], self._compressor, saved)
        self._saved = self._saved and dict.fromkeys(self._saved)

    def _untraced(self) -> Dict[str, Optional[Saved]]:
        """What `_saved` says of variables that only the exchange knows."""
        return dict.fromkeys(self._exchange.shapes.keys() - {variable.name for variable in self._variables.values()})

    def _gain(self, takes_over: bool) -> float:
        """What the optimizer's own momentum makes of a result of 1 in the end: 1/(1 − m), and 1 where it is taken over."""
        optimizer = self._served or self._optimizer
        momentum = float(options_of(optimizer)["momentum"]) if isinstance(optimizer, SGD) and not takes_over else 0.0
        return 1 / (1 - momentum) if momentum < 1 else 1.0

    @contextlib.contextmanager
    def _tracing_again(self) -> Iterator[None]:
        """Has functions traced again when they are called next, where the body changes something that their traces hold."""
        before = self._traced_with()
        yield
        for variable in self._variables.values():
            self._described(variable)
        if self._traced_with() != before:
            self._traces += 1
            for function in self._traced:
                forget_traces(function)
            self._traced.clear()

    def _traced_with(self) -> List[Any]:
        """What traces hold of the compressor."""
        variables = [(each.carried, each.moved, each.direct, each.squares is None) for each in self._variables.values()]
        compressor, momentum = self._compressor, [self._takes_over, self._takes_over and self._lives_on]
        return [*momentum, bool(compressor.follow_lr), compressor.clip_norm is not None, variables]

    # -- for elastic jobs: see `elastic.py` -------------------------------------------------------------------------------

    def _state(self, into: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        state = super()._kept(into)
        for name, saved in copy.deepcopy(self._saved or {}).items():
            if saved is not None:
                state["tensors"][name], state["step"][name], state["dense_until"][name], state["shapes"][name] = saved
        return {**state, "lives_on": self._lives_on}

    def _kept(self, into: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        return {**self._state(into), "spec": self._requested.config}

    def _sync(self) -> None:
        config, lives_on = gather(self._transport, "hvdc.elastic.spec", [self._requested.config, self._lives_on])[0]
        with self._tracing_again():
            self._switch_to(config, lives_on)
        super()._sync()

    def _switch_to(self, config: Dict[str, Any], lives_on: bool) -> None:
        if get_compressor(config) != self._requested:
            self._exchange.abandon()
            self._switch(config, compare=False)
        self._lives_on = lives_on

    @property
    def _requested(self) -> Compressor:
        """As the spec says."""
        return self._chosen.requested if self._chosen else self._compressor

    def _go_back_to(self, state: Dict[str, Any]) -> None:
        with self._tracing_again():
            self._switch_to(state["spec"], state["lives_on"])
            untraced = self._untraced()
            self._saved = {**untraced, **self._exchange.go_back_to(state)} or None
        for name in state["step"]:  # in the order in which rank 0 came to know them, which numbers its operations
            self._numbers.setdefault(name, len(self._numbers))
        for variable in self._variables.values():
            if variable.squares is not None:
                variable.squares.assign(tf.zeros(variable.shape))


def _check_elastic(compressor: Compressor, optimizer: Any) -> None:
    """ValueError for what cannot work where ranks come and go."""
    if optimizer is None:
        raise ValueError(
            "in an elastic job a rank may be left alone, for which Horovod reduces nothing, and what it holds back is applied by the optimizer: bind "
            f"the compression to that, as in hvdc.Compression.{compressor.id}(optimizer)"
        )
    if len({compressor.collectives(size) for size in range(1, 129)}) > 1:
        raise ValueError(
            f"{compressor.id} adds up integers, whose type depends on the number of ranks, and the operations of a traced function keep theirs: in "
            "elastic jobs with TensorFlow take another algorithm"
        )


def _check_elastic_scale(scaler: Any) -> None:
    if scaler.dynamic:
        raise ValueError(
            "in an elastic job with TensorFlow new ranks would begin with another loss scale than the others have: say "
            "LossScaleOptimizer(optimizer, dynamic=False, initial_scale=1024)"
        )


def check_scaler(scaler: Any) -> None:
    """TypeError for what is neither a LossScaleOptimizer nor None."""
    if scaler is not None and not isinstance(scaler, tf.keras.mixed_precision.LossScaleOptimizer):
        raise TypeError(f"grad_scaler must be a tf.keras.mixed_precision.LossScaleOptimizer, not {scaler!r}")


def checked_moments(compressor: Any, optimizer: Any) -> Optional[str]:
    """The option `moments` of algorithms that have it. Raises ValueError for options that TensorFlow cannot serve."""
    moments = getattr(compressor, "moments", None)
    if getattr(compressor, "transport", "horovod") != "horovod":
        raise ValueError("with TensorFlow payloads are moved by operations of the graph: say transport=horovod")
    if getattr(compressor, "exchange", "gather") != "gather":
        raise ValueError("exchange=split needs PyTorch: in a graph no operation sees all tensors of a step. With TensorFlow say exchange=gather")
    if moments == "per_sample":
        raise ValueError(
            "moments=per_sample needs PyTorch, which shows layers' inputs. With TensorFlow say moments=microbatch, and give hvd.DistributedOptimizer("
            "backward_passes_per_step=4) or more: groups of samples stand for samples; or moments=minibatch"
        )
    if moments == "microbatch" and optimizer is None:
        raise ValueError(f"moments=microbatch needs the optimizer, to see every backward pass. {_ONE_PASS}")
    return moments


def _identified(i: int, grad: Any, source: Any) -> Tuple[Any, str, Tuple[int, ...]]:
    """(key, name, shape) of the source, at position i, of a gradient: variables are known by themselves, other tensors by position."""
    is_variable = isinstance(source, tf.Variable)
    name = source.name.split(":")[0] if is_variable else f"source_{i}"
    shape = (source if is_variable else grad).shape
    if not shape.is_fully_defined():
        raise ValueError(f"{name}: its shape, {shape}, must be known when it is traced: what it holds is kept from step to step")
    return source.ref() if is_variable else i, name, tuple(shape)


def _python(function: Callable[..., Sequence[np.ndarray]], variable: _Variable, inputs: List[Any], dtypes: List[str]) -> List[Any]:
    """Adds an operation that calls function(variable, arrays of the inputs…); returns its outputs, of these dtypes."""
    # It is not stateful: TensorFlow would run such operations one after the other, with a round over the network in between.
    return tf.numpy_function(functools.partial(_with_denormals, function, variable), inputs, list(map(tf.as_dtype, dtypes)), stateful=False)


def _with_denormals(function: Callable[..., Sequence[np.ndarray]], *arguments: Any) -> Sequence[np.ndarray]:
    """Calls a function with denormal numbers, which TensorFlow's threads treat as 0: results are other frameworks', bit for bit."""
    mode = kernels.host.flush_denormals(mode=0)
    try:
        return function(*arguments)
    finally:
        kernels.host.flush_denormals(mode=mode)


def _first_values(variable: Any) -> Any:
    return tf.reshape(variable.read_value(), [-1])[:1000]


def _dtypes(collectives: Sequence[Collective]) -> List[str]:
    """The dtypes of the arrays in messages of these collectives: an alltoall's are bytes, and how many go to each rank."""
    return [dtype for c in collectives for dtype in ((c.dtype, "int32") if c.verb == "alltoall" else (c.dtype,))]


def _split_message(brought: Sequence[np.ndarray], collective: Collective) -> Tuple[Message, Optional[np.ndarray]]:
    """(what a message of this collective has become, the sum of the steps' numbers where they were sent with it, else None)"""
    arrays = len(_dtypes([collective]))
    numbers = brought[arrays] if len(brought) > arrays and brought[arrays].size else None
    return list(brought[:arrays]), numbers


def _squared_norm(factor: Callable[[], float], *grads: np.ndarray) -> np.float64:
    return np.float64(factor() ** 2 * sum(kernels.host.squared_norm(np.ascontiguousarray(grad, np.float32).reshape(-1)) for grad in grads))


def _read_and_clear(squares: Any) -> List[Any]:
    if squares is None:
        return []
    read = squares.read_value()
    with tf.control_dependencies([read]):
        squares.assign(tf.zeros_like(read))
    return [read]
