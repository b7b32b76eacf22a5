"""Horovod's Compressor interface, `compress` and `decompress`, as operations of a TensorFlow graph over the exchange."""
import collections
import copy
import dataclasses
import functools
import itertools
import os
import sys
import warnings

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from .. import kernels
from ..binding import description_of
from ..compressors import get_compressor
from ..compressors.base import Compressor
from ..compressors.selective import decide_follow_lr
from ..handshake import agree
from .exchange import GraphExchange
from .optimizer import check, is_horovods, is_plain_sgd, learning_rate_of, momentum_of, take_over_momentum, watch_passes

# Collectives are named by process set and number: the ranks of a set make their compressions on it in the same order.
_numbers = collections.defaultdict(itertools.count)
_OPS = {"sum": hvd.Sum, "max": hvd.Max}
_INFINITE_HALF = 65520  # what is as large becomes infinite in float16


class _Eager:
    """Horovod's allgather while no graph runs: for what ranks compare before they exchange gradients.

    Through a graph all the same: eagerly Horovod ignores names, and threads that trace at once would get each other's messages.
    """

    def __init__(self, process_set):
        self._process_set, self.size = process_set, process_set.size()

    def allgather(self, name, payload):
        with tf.init_scope(), tf.device("/cpu:0"):
            sent = tf.constant(payload)
            gather = functools.partial(hvd.allgather, name=name, ignore_name_scope=True, process_set=self._process_set)
            return tf.function(gather, autograph=False).get_concrete_function(sent)(sent).numpy


@dataclasses.dataclass(eq=False)
class _Variable:
    """A variable whose gradients are compressed."""

    name: str
    number: int  # in the order in which they became known: alike on all ranks, as names need not be
    shape: tuple
    compressor: Compressor
    stages: tuple
    squares: tf.Variable = None  # of its passes' gradients, summed, where moments=microbatch
    observed: bool = False  # whether a pass was seen, while it was traced


@dataclasses.dataclass(eq=False)
class _Call:
    """What each call of one traced function exchanges."""

    variables: list  # (gradient, _Variable)
    number: tf.Tensor  # of the call
    flat: list  # for each gradient, the shape [-1]
    squared_norm: list  # where gradients are clipped, as GraphExchange.submit takes it; else empty
    lr: list  # the learning rate, where residuals follow it; else empty
    taken: set = dataclasses.field(default_factory=set)

    def take(self, tensor):
        """The position of a gradient that was not taken yet, or None. Variables may have the same one: first come, first served."""
        for i, (grad, _) in enumerate(self.variables):
            if grad is tensor and i not in self.taken:
                self.taken.add(i)
                return i
        return None

    def own(self, i):
        """The gradient, flat, in memory that nobody else reads, because it is worked in: a copy only where somebody holds it.

        Snapshot alone is not enough: TensorFlow computes it once for equal gradients, and for all steps where they are
        constant. The shape comes from an operation that it must run, and differs from those of other gradients to it.
        """
        grad, _ = self.variables[i]
        return tf.raw_ops.Snapshot(input=tf.reshape(tf.cast(grad, tf.float32), self.flat[i]))


class BoundCompression:
    """A compression for hvd.DistributedOptimizer, hvd.DistributedGradientTape and horovod.tensorflow.keras: compression=….

    spec: as for horovod_compress.get_compressor.
    optimizer: the Keras optimizer, new or legacy, that will be wrapped, or that applies what a tape brings. An SGD's momentum
        and Nesterov are taken over by algorithms that correct momentum (dgc). None where the algorithm needs nothing from it.
    process_set: the one that Horovod's optimizer or tape gets; default: all ranks.
    discardable: a step whose gradients are not finite is forgotten, as if it had never been, and so is one after which `discard()` is
        called. Takes as much memory again as the algorithm's state, and the time to copy that in each step.

    One compression serves one model on one rank. Its residuals are this rank's own: save `state_dict()` on every rank, or use
    `StateCheckpoint`. Variables become known when their gradients are first traced. Raises ValueError for bad options and
    optimizers, and MismatchError, on all ranks, where ranks were started differently.
    """

    def __init__(self, spec, optimizer=None, process_set=None, discardable=False):
        if not hvd.is_initialized():
            raise ValueError("call hvd.init() before making a compression")
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError(
                "TensorFlow 1's graph mode is not supported: a compression's operations belong to functions that TensorFlow 2 traces. Leave "
                "out tf.compat.v1.disable_eager_execution() and disable_v2_behavior()"
            )
        self._process_set = hvd.global_process_set if process_set is None else process_set
        if not isinstance(self._process_set, hvd.ProcessSet):
            raise TypeError(
                f"process_set must be one of Horovod's, not an object of {type(process_set)}; variables need not be named in TensorFlow, and an "
                "option goes by its name: ratio=0.01"
            )
        if self._process_set.process_set_id is None:
            raise ValueError("this process set is not registered: pass it to hvd.init() or hvd.add_process_set() first")
        if os.environ.get("HOROVOD_ELASTIC") == "1":
            raise ValueError(
                "elastic Horovod is not supported yet: what a compression keeps belongs to one rank of a fixed number. Start with "
                "a fixed number of ranks, without --min-np, --max-np and --host-discovery-script"
            )
        compressor = decide_follow_lr(get_compressor(spec), optimizer is not None, is_plain_sgd(optimizer))
        if getattr(compressor, "transport", "horovod") != "horovod":
            raise ValueError("with TensorFlow payloads are moved by operations of the graph: say transport=horovod")
        if optimizer is not None:
            check(optimizer)
        # Horovod reduces, and compresses, only where there is more than one rank.
        self._active = bool(self._process_set.included()) and self._process_set.size() > 1
        self._taken_from = None  # the class of optimizers that leave momentum to this compression
        self._serves = None  # Horovod's optimizer, where it is one of those
        if compressor.corrects_momentum:
            compressor = self._bound(compressor, optimizer)
        self._microbatches = getattr(compressor, "moments", None) == "microbatch"
        if getattr(compressor, "moments", None) == "per_sample":
            raise ValueError(
                "moments=per_sample needs PyTorch, which shows layers' inputs. With TensorFlow say moments=microbatch, and give "
                "hvd.DistributedOptimizer(backward_passes_per_step=4) or more: groups of samples stand for samples; or "
                "moments=minibatch"
            )
        if self._microbatches and optimizer is None:
            raise ValueError(
                "moments=microbatch needs the optimizer, to see every backward pass. A tape's gradient is one pass, for which "
                "moments=minibatch is the same"
            )
        if self._microbatches and self._active:
            watch_passes(optimizer, self._observe)
        self._compressor = compressor
        self._optimizer = optimizer  # where a tape serves it; Horovod makes one of its own from it
        self._variables = {}  # key, see `_register`, → _Variable
        self._call = None  # of the function that is being traced
        self._saved = None  # where a state was loaded: of variables that are not known yet
        number = next(_numbers[tuple(self._process_set.ranks or ())])
        self._label = f"hvdc.{self._process_set.process_set_id}.{number}"
        rank, size = (self._process_set.rank(), self._process_set.size()) if self._active else (0, 1)
        self._exchange = GraphExchange(compressor, rank, size, self._label, discardable)
        if self._active:
            self._transport = _Eager(self._process_set)
            agree(self._transport, self._label, description_of(compressor))

    def _bound(self, compressor, optimizer):
        if optimizer is None:
            if compressor.momentum is None:
                raise ValueError(f"{compressor.id} needs the optimizer, to take over its momentum; or say momentum=…")
            return compressor
        momentum, nesterov = momentum_of(optimizer, compressor)
        if momentum and self._active:
            covers = lambda variable: variable.ref() in self._variables  # noqa: E731
            self._taken_from = take_over_momentum(optimizer, compressor.id, momentum, nesterov, covers)
        return compressor.bound(momentum, nesterov)

    # -- Horovod's interface, while it traces a function ------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def compress(self, tensor):
        """Called by Horovod with a variable's gradient: returns what Horovod is to reduce, and a context."""
        if not self._active:
            return tensor, None
        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ValueError("functions that XLA compiles cannot compress gradients: say jit_compile=False")
        i = self._call and self._call.take(tensor)
        if i is None:
            self._call = self._new_call(tensor)
            i = self._call.take(tensor)
        call, (_, variable) = self._call, self._call.variables[i]
        if self._travels_as_it_is(variable):
            # Reshaped because `_begin` may refuse the step: a control dependency would stay outside of the branch that reduces.
            carrier = tf.reshape(tf.cast(tensor, tf.float32), call.flat[i], name=f"{self._label}.{variable.number}")
            return carrier, (variable, tensor.dtype, [call.number])
        stages, herald = variable.stages, variable.name == self._exchange.herald
        with tf.device("/cpu:0"):
            dtypes = [variable.compressor.carries, *(dtype for _, dtype in stages[:1]), *["int64"] * herald]
            inputs = [call.number, call.own(i), *call.squared_norm, *call.lr, *_read_and_clear(variable.squares)]
            carrier, *message = _python(self._submit, variable, inputs, dtypes)
            beat = [self._move("sum", message.pop(), "step")] if herald else []
            for stage, (op, dtype) in enumerate(stages):
                if stage:
                    advance = functools.partial(self._advance, dtype=dtype)
                    message, beat = _python(advance, variable, [call.number, *message, *beat], [dtype]), []
                message = [self._move(op, *message, f"{variable.number}.{stage}")]
            # Horovod names its own reduction after what it reduces.
            carrier = tf.identity(carrier, name=f"{self._label}.{variable.number}")
        return carrier, (variable, tensor.dtype, [call.number, *message, *beat])

    @tf.autograph.experimental.do_not_convert
    def decompress(self, tensor, ctx):
        """Called by Horovod with what it reduced: returns the gradient."""
        if ctx is None:
            return tensor
        variable, dtype, (number, *brought) = ctx
        with tf.device("/cpu:0"):
            finish = self._take if self._travels_as_it_is(variable) else self._finish
            finish = functools.partial(finish, half=dtype == tf.float16)
            inputs = [number, tf.raw_ops.Snapshot(input=tensor), *brought]
            (result,) = _python(finish, variable, inputs, ["float32"])
        result.set_shape(variable.shape)
        return tf.cast(result, dtype)

    def _new_call(self, tensor):
        grads, sources, factor, optimizer = _traced(tensor)
        if self._taken_from and optimizer and not isinstance(optimizer, self._taken_from):
            raise ValueError(
                "this compression has taken over the momentum of another optimizer than the one it serves, which would apply its own besides: "
                "bind it to the optimizer that hvd.DistributedOptimizer gets, and make a new one for each"
            )
        self._serves = optimizer if self._taken_from else None
        pairs = [(grad, source) for grad, source in zip(grads, sources) if isinstance(grad, tf.Tensor)]
        variables = list(zip([grad for grad, _ in pairs], self._register(pairs)))
        unseen = [variable.name for _, variable in variables if variable.squares is not None and not variable.observed]
        if unseen:
            raise ValueError(
                f"moments=microbatch has seen no backward pass of {', '.join(unseen)}: it needs the bound optimizer's minimize or fit. A "
                "tape's gradient is one pass, for which moments=minibatch is the same"
            )
        around = getattr(tf.compat.v1.get_default_graph(), "outer_graph", None)  # of the branches in which Horovod compresses
        if around is None:
            raise ValueError("gradients are compressed in graphs, which Horovod makes also of eager code: not with run_functions_eagerly(True)")
        with around.as_default(), tf.device("/cpu:0"):
            # Stateful, so that every call of the function has its own; what depends on it is not folded or shared between calls.
            # It brings values of the smallest variable, because TensorFlow runs a trace again for others of the same shapes.
            known = min((source for _, source in pairs if isinstance(source, tf.Variable)), key=lambda v: v.shape.num_elements(), default=None)
            begin = functools.partial(self._begin, len(pairs), known)
            number, flat = tf.numpy_function(begin, [] if known is None else [_first_values(known)], [tf.int64, tf.int32])
            if known is not None:
                with tf.control_dependencies([number]):
                    known.read_value()  # so that what writes to the variable (a weight decay) waits for the comparison
            flat = tf.unstack(flat, len(pairs))
            squared_norm = []
            if self._compressor.clip_norm is not None:
                norm = functools.partial(_squared_norm, factor)
                squared_norm = [tf.numpy_function(norm, [grad for grad, _ in pairs], tf.float64, stateful=False)]
            lr = [learning_rate_of(optimizer or self._optimizer)] if self._compressor.follow_lr else []
        return _Call(variables, number, flat, squared_norm, lr)

    def _travels_as_it_is(self, variable):
        """Whether nothing is done to its gradients before Horovod reduces them: then they go there without a detour."""
        return not variable.stages and variable.compressor.carries == "float32" and self._compressor.clip_norm is None

    def _register(self, pairs):
        """The _Variable of each (gradient, source). New ones become known on all ranks at once."""
        keys, new = [], {}
        taken = {variable.name for variable in self._variables.values()}
        for i, (grad, source) in enumerate(pairs):
            is_variable = isinstance(source, tf.Variable)
            keys.append(source.ref() if is_variable else i)
            name = source.name.split(":")[0] if is_variable else f"source_{i}"
            shape = (source if is_variable else grad).shape
            if not shape.is_fully_defined():
                raise ValueError(f"{name}: its shape, {shape}, must be known when it is traced: what it holds is kept from step to step")
            if keys[-1] in self._variables and self._variables[keys[-1]].shape != tuple(shape):
                raise ValueError(
                    f"{name} has the shape {shape} and had {self._variables[keys[-1]].shape} before: residuals are kept for variables, or tensors "
                    "of one shape"
                )
            if keys[-1] not in self._variables:
                if not grad.dtype.is_floating:
                    raise TypeError(f"{name}: gradients of {grad.dtype.name} cannot be compressed; real floating point is needed")
                name = next(n for n in itertools.chain([name], (f"{name}_{k}" for k in itertools.count(1))) if n not in taken)
                taken.add(name)
                new[keys[-1]] = name, tuple(shape)
        if new:
            shapes = {name: list(shape) for name, shape in new.values()}
            agree(self._transport, f"{self._label}.{len(self._variables)}", {"variables": shapes})
            missing = [name for name in shapes if self._saved is not None and name not in self._saved]
            if missing:
                raise ValueError(
                    f"the state that was loaded does not fit: it has nothing for {', '.join(missing)}. Was it this model? Keras numbers layers "
                    "without a name throughout a process: name them, or call tf.keras.backend.clear_session() first"
                )
            for key, (name, shape) in new.items():
                known = self._exchange.add(name, shape, self._compressor, self._saved and self._saved[name])
                variable = self._variables[key] = _Variable(name, len(self._variables), shape, *known)
                if self._microbatches and hasattr(variable.compressor, "moments"):
                    with tf.init_scope(), tf.device("/cpu:0"):
                        variable.squares = tf.Variable(tf.zeros(shape), trainable=False)
            if self._saved is not None:
                self._saved = {name: saved for name, saved in self._saved.items() if name not in shapes}
        return [self._variables[key] for key in keys]

    def _observe(self, grads_and_vars):
        """Adds the squares of one backward pass."""
        grads_and_vars = list(grads_and_vars)
        # Sparse ones count where they become dense afterwards; elsewhere nobody asks for their squares.
        pairs = [(tf.convert_to_tensor(grad), source) for grad, source in grads_and_vars if grad is not None]
        for (grad, _), variable in zip(pairs, self._register(pairs)):
            if variable.squares is not None:
                variable.squares.assign_add(tf.square(tf.cast(grad, tf.float32)))
                variable.observed = True
        return grads_and_vars

    def _move(self, op, message, name):
        name = f"{self._label}.{name}"
        options = {"name": name, "process_set": self._process_set, "ignore_name_scope": True}
        moved = hvd.allgather(message, **options) if op == "gather" else hvd.allreduce(message, op=_OPS[op], **options)
        return tf.raw_ops.Snapshot(input=moved)

    # -- the same, while the graph runs -----------------------------------------------------------------------------------

    def _begin(self, tensors, known, values=None):
        if known is not None and not np.array_equal(_first_values(known).numpy(), values, equal_nan=True):
            raise ValueError(
                f"gradients of other variables come to this compression than {known.name} and those that it was traced with: make one for "
                "each model, and in eager code for each set of variables that is trained by itself"
            )
        if self._serves is not None and abs(float(self._serves.momentum) - self._compressor.momentum) > 1e-6:
            _warn_once(
                f"SGD's momentum was changed to {float(self._serves.momentum):g}: {self._compressor.id} goes on with "
                f"{self._compressor.momentum:g}, which it took over. (Horovod's momentum_correction is not needed: the learning rate is no part "
                "of this momentum)"
            )
        return np.int64(self._exchange.begin(tensors)), np.full((tensors, 1), -1, np.int32)

    def _submit(self, variable, call, grad, *numbers):
        numbers = iter(numbers)
        squared_norm = next(numbers) if self._compressor.clip_norm is not None else None
        lr = float(next(numbers)) if self._compressor.follow_lr else None
        squares = next(numbers).reshape(-1) if variable.squares is not None else None
        carrier, message, beat = self._exchange.submit(variable.name, grad, call, squares, squared_norm, lr)
        outputs = [carrier, *(_or_nothing(message, dtype) for _, dtype in variable.stages[:1])]
        return outputs + [_or_nothing(beat, "int64")] * (variable.name == self._exchange.herald)

    def _advance(self, variable, call, arrived, beat=None, dtype=None):
        message = self._exchange.advance(variable.name, call, arrived, beat if beat is not None and beat.size else None)
        return [_or_nothing(message, dtype)]

    def _take(self, variable, call, reduced, half):
        """Submits, and finishes, what Horovod has reduced already."""
        self._exchange.submit(variable.name, reduced.reshape(-1), call)
        return self._finish(variable, call, reduced, half=half)

    def _finish(self, variable, call, reduced, arrived=None, beat=None, half=False):
        beat = beat if beat is not None and beat.size else None
        result = self._exchange.finish(variable.name, call, reduced.reshape(-1), arrived, beat)
        if half and not kernels.of(result).max_abs(result) < _INFINITE_HALF:
            self._exchange.reject(variable.name)
        return [result.reshape(variable.shape)]

    # -- for users --------------------------------------------------------------------------------------------------------

    @property
    def config(self):
        """The id and all options, as a JSON-able spec."""
        return self._compressor.config

    def __repr__(self):
        return f"<{self._compressor!r} of {len(self._variables)} variables>"

    def stats(self):
        """Totals of this rank since the start: see `Exchange.stats`. All 0 where Horovod reduces nothing, on one rank."""
        return self._exchange.stats()

    def stats_by_tensor(self):
        """Bytes and elements by variable: see `Exchange.stats_by_tensor`."""
        return self._exchange.stats_by_tensor()

    def state_dict(self):
        """This rank's residuals and momentum, as NumPy arrays by variable and plain values: one a rank, next to the model's and
        the optimizer's. See `StateCheckpoint`."""
        state = self._exchange.state_dict()
        for name, saved in copy.deepcopy(self._saved or {}).items():
            state["tensors"][name], state["step"][name], state["dense_until"][name] = saved
        return state

    def discard(self):
        """Forgets the last step, as if its gradients had never been; to be called on all ranks. Needs discardable=True."""
        self._exchange.discard()

    def load_state_dict(self, state):
        """Continues, bit for bit, from a state_dict of the same rank, number of ranks and model. Variables that are not known yet
        get their state when they are. Raises ValueError, with nothing changed, for any other state; where variables are not known
        yet, tracing does."""
        if not isinstance(state, dict):
            raise ValueError("not a state_dict of a compression")
        self._saved = copy.deepcopy(self._exchange.load_state_dict(state))


def _python(function, variable, inputs, dtypes):
    """An operation that calls function(variable, arrays of the inputs…) and has outputs of these dtypes."""
    # Not stateful: TensorFlow would run such operations one after the other, with a round over the network in between.
    call = functools.partial(_with_denormals, function, variable)
    return tf.numpy_function(call, inputs, [tf.as_dtype(dtype) for dtype in dtypes], stateful=False)


def _with_denormals(function, *arguments):
    """TensorFlow's threads take denormal numbers for 0; results are to be those of other frameworks, bit for bit."""
    mode = kernels.host.flush_denormals(mode=0)
    try:
        return function(*arguments)
    finally:
        kernels.host.flush_denormals(mode=mode)


_warned = set()


def _warn_once(message):
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"horovod_compress: {message}", RuntimeWarning, stacklevel=2)


def _first_values(variable):
    return tf.reshape(variable.read_value(), [-1])[:1000]


def _or_nothing(array, dtype):
    return np.empty(0, dtype) if array is None else array


def _squared_norm(factor, *grads):
    return np.float64(factor**2 * sum(kernels.host.squared_norm(np.ascontiguousarray(grad, np.float32).reshape(-1)) for grad in grads))


def _read_and_clear(squares):
    if squares is None:
        return []
    read = squares.read_value()
    with tf.control_dependencies([read]):
        squares.assign(tf.zeros_like(read))
    return [read]


def _traced(tensor):
    """(gradients, variables, what Horovod makes of a 1 on each rank, Horovod's optimizer or None) of the exchange in which this
    gradient is compressed. Horovod says neither, but has them in reach, in a function that reduces `grads` of `vars` by `op`."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        grads, variables = frame.f_locals.get("grads"), frame.f_locals.get("vars")
        if found is None and isinstance(grads, (list, tuple)) and variables is not None and any(grad is tensor for grad in grads):
            factor = frame.f_locals.get("prescale_factor", 1.0) * frame.f_locals.get("postscale_factor", 1.0)
            if frame.f_locals.get("op") == hvd.Sum:
                factor *= frame.f_locals["process_set"].size()
            found = grads, variables, factor
        caller = frame.f_locals.get("self")
        if found and is_horovods(caller):
            return *found, caller
        frame = frame.f_back
    if found:
        return *found, None
    raise ValueError(
        "this compression is for hvd.DistributedOptimizer and hvd.DistributedGradientTape of Horovod 0.28, which reduce the gradients "
        f"of variables; here comes a tensor of shape {tensor.shape} alone"
    )
