"""A compression bound to a Keras optimizer or a tape: what serves which optimizer, and what users
call."""

from typing import Any, Iterable, List, Tuple

import tensorflow as tf

from ..compressors import get_compressor
from ..protocol.handshake import agree
from ..session.choice import Choice, momentum_of, requested_compressor
from .applied_checks import refuse_unreduced
from .checks import check_elastic, check_elastic_scale, check_options, check_scaler, tell_of_scaler
from .graph import Graph, GraphCompression
from .horovod_internals import loss_scaler
from .optimizer import (
    SGD,
    Serving,
    before_applying,
    check,
    optimizers_in_reach,
    options_of,
    watch_passes,
)
from .ranks import TensorFlowRanks
from .takeover import is_plain_sgd, leave_momentum, own_step_of


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

    def __init__(
        self,
        spec: Any,
        optimizer: Any = None,
        *,
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> None:
        self._ranks, self._serving = TensorFlowRanks(process_set), Serving()
        if not tf.compat.v1.executing_eagerly_outside_functions():
            raise ValueError(
                "TensorFlow 1's graph mode is not supported: a compression's operations belong to "
                "functions that TensorFlow 2 traces. Leave "
                "out tf.compat.v1.disable_eager_execution() and disable_v2_behavior()"
            )
        if optimizer is not None:
            check(optimizer)
        check_scaler(grad_scaler)
        self._grad_scaler = grad_scaler
        discardable = discardable or grad_scaler is not None
        super().__init__(Graph(self._ranks, spec, self._serving, self, discardable))
        if optimizer is not None:
            self.bind(optimizer)

    def bind(self, optimizer: Any) -> None:
        """Decides what depends on the optimizer, and takes over what it leaves to this compression.
        Once, before the first gradient; also of Horovod's own optimizer. None: nobody knows the
        optimizer, and ValueError where it is needed."""
        graph, serving, session = self._graph, self._serving, self._session
        before = serving.bound, serving.is_bound
        serving.bound, serving.is_bound = optimizer, True
        try:
            choice = session.choose(session.choice.requested)
        except BaseException:
            serving.bound, serving.is_bound = before
            raise
        active, policy = self._ranks.active, choice.compressor.policy
        serving.watches = active and policy.moments == "microbatch"
        if serving.watches:
            # First, because it undoes what earlier bindings made of the class.
            watch_passes(optimizer, graph.variables.observe)
        if isinstance(optimizer, SGD) and active:
            leave_momentum(optimizer, graph.covers, lambda: serving.lives_on)
        session.use(choice)
        if optimizer is not None and active:
            serving.cls = before_applying(optimizer, self._before_applied)
        session.agreed = False

    def _before_applied(
        self, optimizer: Any, grads_and_vars: Iterable[Tuple[Any, Any]]
    ) -> List[Tuple[Any, Any]]:
        """The pairs that the bound optimizer, or Horovod's of it, is to apply."""
        pairs = refuse_unreduced(optimizer, grads_and_vars)
        self._graph.calls.applied.add(variable for grad, variable in pairs if grad is not None)
        return self._graph.send_alone(optimizer, pairs) if self._ranks.elastic else pairs

    def reduced_over(self, process_set: Any) -> None:
        """Takes the process set over which gradients are reduced, where a question came before
        these, and users have given none."""
        self._ranks.join(process_set)
        self._ranks.transport = self._ranks.transport_of(self._session.compressor)
        self._session.agreed = False
        self._session.resize()

    def _choose(self, spec: Any) -> Choice:
        """As of `Port`, with the optimizer, bound or Horovod's."""
        serving, optimizer = self._serving, self._serving.stepping
        if not serving.is_bound:
            compressor: Any = get_compressor(spec)
            return Choice(compressor, compressor, {}, held=False)
        compressor = requested_compressor(spec, optimizer, is_plain_sgd(optimizer))
        if self._ranks.elastic:
            check_elastic(compressor, optimizer)
        check_options(compressor, optimizer)
        if not compressor.traits.corrects_momentum or optimizer is None:
            return Choice(compressor, compressor, {}, held=False)
        momentum, nesterov = (
            momentum_of(compressor, options_of(optimizer))
            if isinstance(optimizer, SGD)
            else (0.0, False)
        )
        takes_over = bool(momentum and self._ranks.active)
        if takes_over and (method := own_step_of(optimizer)):
            raise ValueError(
                f"{method} is not SGD's own, so its momentum cannot be taken over: bind with "
                "momentum=0"
            )
        bound = compressor.bound(momentum, nesterov)
        return Choice(compressor, bound, {}, held=takes_over)

    def _agreed_scaler(self) -> Any:
        """The loss scaler, if there is one: all ranks begin with the same scale."""
        scaler = self._grad_scaler or loss_scaler()
        if scaler is None and self._serving.horovods is None:
            tell_of_scaler(optimizers_in_reach())
        if scaler is not None and self._ranks.elastic:
            check_elastic_scale(scaler)
        elif scaler is not None:
            agree(
                self._ranks.transport,
                f"{self._ranks.label()}.scale",
                {"initial loss scale": float(scaler.initial_scale)},
            )
        return scaler

    # -- for users

    def switch(self, spec: Any) -> None:
        """As of `Bound`. RuntimeError for a compression that has no optimizer yet."""
        if not self._serving.is_bound:
            raise RuntimeError(
                "this compression has not come to its optimizer yet: make it with that spec, or "
                "say hvdc.compression_of(optimizer).switch(…), which "
                "binds it to Horovod's optimizer"
            )
        compressor = get_compressor(spec)
        watched = self._serving.watches or not self._ranks.active
        if compressor.policy.moments == "microbatch" and not watched:
            raise ValueError(
                "moments=microbatch has to see every backward pass from the first one on: make the "
                "compression with it"
            )
        super().switch(compressor)
