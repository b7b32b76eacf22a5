"""A compression bound to a Keras optimizer or a tape: what serves which optimizer, what users call,
and elastic jobs."""

import contextlib
from typing import (
    Any,
    Dict,
    Hashable,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import tensorflow as tf

from ..adapters.binding import description_of, momentum_of, requested_compressor
from ..adapters.process_sets import REFUSED_ALONE
from ..compressors import get_compressor
from ..compressors.base import Compressor
from ..deprecated import by_name
from ..engine import checkpoint
from ..engine.snapshot import Snapshots
from ..protocol.handshake import agree
from ..protocol.machine import Machine
from .applied import refuse_unreduced
from .checks import check_elastic, check_options, check_scaler
from .exchange import GraphExchange
from .graph import GraphCompression
from .horovod_internals import trace_again
from .optimizer import (
    SGD,
    before_applying,
    check,
    is_plain_sgd,
    leave_momentum,
    options_of,
    own_step_of,
    tell_of_takeover,
    watch_passes,
)


class _Chosen(NamedTuple):
    """How variables are compressed. requested: as the spec says; compressor: with the momentum that
    it applies; takes_over: whether that is taken over from an SGD; machine: the ranks of this
    rank's, where they are of use."""

    requested: Compressor
    compressor: Compressor
    takes_over: bool = False
    machine: Optional[Machine] = None


class BoundCompression(GraphCompression):
    """A compression for hvd.DistributedOptimizer, hvd.DistributedGradientTape and
    horovod.tensorflow.keras: compression=….

    One compression serves one model on one rank. Its residuals are this rank's own: save
    `state_dict()` on every rank, or use `StateCheckpoint`. Variables become known when their
    gradients are first traced.

    Args:
        spec: as for `horovod_compress.get_compressor`.
        optimizer: the Keras optimizer, new or legacy, that will be wrapped, or that applies what a
            tape brings. An SGD's momentum and Nesterov are taken over by algorithms that correct
            momentum (dgc). None: `bind` follows, before the first gradient.
        process_set: the one that Horovod's optimizer or tape gets; default: all ranks.
        grad_scaler: a LossScaleOptimizer that scales the loss of which a tape has the gradients:
            what is kept of gradients then follows its scale. Implies discardable. Where it wraps
            Horovod's optimizer it is found without being given.
        discardable: a step whose gradients are not finite is forgotten, as if it had never been,
            and so is one after which `discard()` is called. Takes as much memory again as the
            algorithm's state, and the time to copy that in each step.

    Raises:
        ValueError: bad options and optimizers.
        MismatchError: at the first trace, or in `handshake()`, on all ranks: they were started
            differently.
    """

    @by_name
    def __init__(
        self,
        spec: Any,
        optimizer: Any = None,
        *,
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> None:
        super().__init__(process_set, grad_scaler)
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError(
                "TensorFlow 1's graph mode is not supported: a compression's operations belong to "
                "functions that TensorFlow 2 traces. Leave "
                "out tf.compat.v1.disable_eager_execution() and disable_v2_behavior()"
            )
        if optimizer is not None:
            check(optimizer)
        check_scaler(grad_scaler)
        # Whether momentum that an SGD has gathered by itself still moves variables where it is
        # taken over.
        self._lives_on = False
        self._compressor = get_compressor(spec)
        self._chosen: Optional[_Chosen] = None  # since `bind`
        # Whether backward passes can be seen.
        self._watches = False
        self._exchange: GraphExchange = GraphExchange(
            self._compressor,
            *self._rank_and_size(),
            dense_alone=self._elastic,
        )
        if discardable or grad_scaler is not None:
            self._exchange.extend("discard", Snapshots())
        if optimizer is not None:
            self.bind(optimizer)

    def bind(self, optimizer: Any) -> None:
        """Decides what depends on the optimizer, and takes over what it leaves to this compression.
        Once, before the first gradient; also of Horovod's own optimizer. None: nobody knows the
        optimizer, and ValueError where it is needed."""
        chosen = self._choose(self._compressor, optimizer)
        self._optimizer = optimizer
        self._watches = self._active and chosen.compressor.policy.moments == "microbatch"
        if self._watches:
            # First, because it undoes what earlier bindings made of the class.
            watch_passes(optimizer, self._observe)
        if isinstance(optimizer, SGD) and self._active:
            leave_momentum(optimizer, self._covers, lambda: self._lives_on)
        self._use(chosen)
        self._exchange.compressor = self._compressor
        if optimizer is not None and self._active:
            self._optimizer_class = before_applying(optimizer, self._before_applied)
        self._agreed = False

    def _before_applied(
        self, optimizer: Any, grads_and_vars: Iterable[Tuple[Any, Any]]
    ) -> List[Tuple[Any, Any]]:
        """The pairs that the bound optimizer, or Horovod's of it, is to apply."""
        pairs = refuse_unreduced(optimizer, grads_and_vars)
        self._applied.add(variable for grad, variable in pairs if grad is not None)
        return self._send_alone(optimizer, pairs) if self._elastic else pairs

    def reduced_over(self, process_set: Any) -> None:
        """Takes the process set over which gradients are reduced, where a question came before
        these, and users have given none."""
        self._join(process_set)
        self._resize()

    def serves(self, variables: Iterable[Any]) -> bool:
        """Returns whether some of these are known."""
        return any(
            isinstance(variable, tf.Variable) and variable.ref() in self._variables
            for variable in variables
        )

    def _choose(self, spec: Any, optimizer: Any) -> _Chosen:
        """The choice that a spec comes to with an optimizer, bound or Horovod's. ValueError for
        what cannot be served."""
        compressor = requested_compressor(spec, optimizer, is_plain_sgd(optimizer))
        if self._elastic:
            check_elastic(compressor, optimizer)
        check_options(compressor, optimizer)
        machine = self._machine_for(compressor)
        if not compressor.traits.corrects_momentum or optimizer is None:
            return _Chosen(compressor, compressor, machine=machine)
        momentum, nesterov = (
            momentum_of(compressor, options_of(optimizer))
            if isinstance(optimizer, SGD)
            else (0.0, False)
        )
        takes_over = bool(momentum and self._active)
        if takes_over and (method := own_step_of(optimizer)):
            raise ValueError(
                f"{method} is not SGD's own, so its momentum cannot be taken over: bind with "
                "momentum=0"
            )
        return _Chosen(compressor, compressor.bound(momentum, nesterov), takes_over, machine)

    def _use(self, chosen: _Chosen) -> None:
        compressor: Any = chosen.compressor
        if chosen.takes_over and not self._takes_over:
            tell_of_takeover(
                self._optimizer, compressor.id, compressor.momentum, compressor.nesterov
            )
            self._lives_on = self._lives_on or bool(self._exchange.shapes)
        self._chosen, self._compressor = chosen, compressor
        self._takes_over = chosen.takes_over
        self._machine = self._exchange.machine = chosen.machine

    def _covers(self, variable: Any) -> bool:
        """Returns whether a variable's momentum is taken over, where its update is traced."""
        self._note_traces()
        # `apply_gradients(zip(tape.gradient(…), …))` is looked up before its first gradients bring
        # the optimizer here.
        self._applied.add([variable])
        return self._takes_over and variable.ref() in self._variables

    # -- for users

    def __repr__(self) -> str:
        return f"<{self._compressor!r} of {len(self._variables)} variables>"

    @property
    def is_first(self) -> bool:
        """True if this is the first rank of those that compress."""
        return bool(self._process_set.included()) and self._process_set.rank() == 0

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """This rank's residuals and momentum, as NumPy arrays by variable and plain values: one a
        rank, as `StateCheckpoint` saves them.

        portable: all ranks call this at the same step, and get the same: the mean over ranks of
        what each has not sent yet, which any number of ranks can go on from. One file is enough.
        MismatchError where ranks are not at the same step.
        """
        state = {**self._exchange.state_dict(), "lives_on": self._lives_on}
        if portable and self._active:
            return checkpoint.portable(state, self._transport, self._label())
        return {**state, "rank": None} if portable else state

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """Continues from what `state_dict` has returned, of the same model: bit for bit from this
        rank's own, or from a list of all ranks', in any order, or from a portable one. Where that
        list is of another number of ranks, each rank gets their mean, so the mean of what ranks
        have not sent yet is kept. Variables that are not known yet get their state when they are.
        Raises ValueError, with nothing changed, for any other state; where variables are not known
        yet, tracing does."""
        if not self._process_set.included():
            return  # this rank compresses nothing
        with self._tracing_again():
            self._exchange.load_state_dict(state)
            if self._exchange.loaded and not self._active:
                self._exchange.loaded = {}
                raise ValueError(f"this state does not fit: {REFUSED_ALONE}")
            self._loaded = True
            self._lives_on = bool((state if isinstance(state, dict) else state[0]).get("lives_on"))

    def switch(self, spec: Any) -> None:
        """Goes on with another compression, "dgc:ratio=0.01" or {"id": "dgc", "ratio": 0.01},
        from the next step on.

        What ranks have not sent yet goes on: in what the new algorithm keeps, else densely in the
        first step. An SGD's momentum is taken over, or given back, and counts once. Functions whose
        operations change are traced again when they are called next. All ranks call it between the
        same two steps, as in a callback's on_epoch_begin. ValueError for a bad spec, RuntimeError
        in the middle of a step and for a compression that has no optimizer yet, MismatchError where
        ranks differ; nothing is changed then.
        """
        if self._chosen is None:
            raise RuntimeError(
                "this compression has not come to its optimizer yet: make it with that spec, or "
                "say hvdc.compression_of(optimizer).switch(…), which "
                "binds it to Horovod's optimizer"
            )
        self._switch(get_compressor(spec))

    def _switch(self, spec: Any, compare: bool = True) -> None:
        exchange = self._exchange
        exchange.end_step()
        chosen = self._choose(spec, self._served or self._optimizer)
        if chosen.compressor.policy.moments == "microbatch" and self._active and not self._watches:
            raise ValueError(
                "moments=microbatch has to see every backward pass from the first one on: make the "
                "compression with it"
            )
        for name, (*_, shape) in list(exchange.loaded.items()):
            exchange.add(name, shape, self._compressor)
        if self._active and compare and self._synced:
            advice = "Call it on all ranks, between the same two steps, with the same spec"
            agree(
                self._transport,
                f"{self._label()}.switch",
                description_of(chosen.compressor),
                "called compression.switch()",
                advice,
            )
            self._agreed = True
        gain = self._gain(chosen.takes_over) / self._gain(self._takes_over)
        tensors = {name: (shape, chosen.compressor) for name, shape in exchange.shapes.items()}
        with self._tracing_again():
            exchange.switch(
                chosen.compressor,
                tensors,
                dict.fromkeys(tensors, gain),
                self._factor(),
                machine=chosen.machine,
            )
            self._use(chosen)
            self._meet()

    def _gain(self, takes_over: bool) -> float:
        """The sum that the optimizer's own momentum makes of a result of 1: 1/(1 − m), and 1
        where it is taken over."""
        optimizer = self._served or self._optimizer
        momentum = (
            float(options_of(optimizer)["momentum"])
            if isinstance(optimizer, SGD) and not takes_over
            else 0.0
        )
        return 1 / (1 - momentum) if momentum < 1 else 1.0

    @contextlib.contextmanager
    def _tracing_again(self) -> Iterator[None]:
        """Has functions traced again when they are called next, where the body changes something
        that their traces hold."""
        before = self._traced_with()
        yield
        for variable in self._variables.values():
            self._described(variable)
        if self._traced_with() != before:
            self._traces += 1
            for function in self._traced:
                trace_again(function)

    def _traced_with(self) -> Hashable:
        """The part of the compressor that traces hold."""
        return (
            self._takes_over,
            self._takes_over and self._lives_on,
            bool(self._compressor.policy.follow_lr),
            self._compressor.policy.clip_norm is not None,
            *(
                (each.carried, each.moved, each.plain, each.kin, id(each.squares))
                for each in self._variables.values()
            ),
        )

    # -- for elastic jobs: see `elastic.py`

    def _settings(self) -> Dict[str, Any]:
        return {**super()._settings(), "lives_on": self._lives_on}

    def _adopt(self, settings: Dict[str, Any]) -> None:
        with self._tracing_again():
            super()._adopt(settings)
            self._lives_on = settings["lives_on"]

    @property
    def _requested(self) -> Compressor:
        return self._chosen.requested if self._chosen else self._compressor

    def _go_back_to(self, state: Dict[str, Any]) -> None:
        with self._tracing_again():
            super()._go_back_to(state)
            self._loaded = bool(self._expected())
        # in the order in which rank 0 came to know them, which numbers its operations.
        for name in state["step"]:
            self._numbers.setdefault(name, len(self._numbers))
        for variable in self._variables.values():
            if variable.squares is not None:
                variable.squares.assign(tf.zeros(variable.shape))
