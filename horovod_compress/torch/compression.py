"""Horovod's Compressor interface, `compress` and `decompress`, over the exchange."""

import itertools
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from ..protocol.wire import WireError
from ..session.bound import Bound
from ..session.step_lifecycle import SYNCHRONIZE_FIRST, Event, State
from ..torch_common.parameters import NamedParameters, Slot, flat, is_sparse, named
from ..torch_common.steps import check_types
from . import horovod_internals
from .served_optimizer import ServedOptimizer
from .transport import TorchRanks, sleep_until_over


class BoundCompression(Bound):
    """A compression bound to an optimizer and its parameters, for
    hvd.DistributedOptimizer(compression=…).

    One compression serves one optimizer on one rank. Its residuals are this rank's own: save
    `state_dict()` on every rank, or one that is portable; in an elastic job give it to
    hvd.elastic.TorchState(compression=…), see `elastic`.

    Args:
        spec: as for `horovod_compress.get_compressor`.
        optimizer: the torch optimizer that will be wrapped. An SGD's momentum, Nesterov and weight
            decay are taken over by algorithms that correct momentum (dgc). None where the algorithm
            needs nothing from it.
        named_parameters: (name, parameter) pairs, as model.named_parameters(); default: numbered by
            parameter group.
        process_set: the one that hvd.DistributedOptimizer gets; default: all ranks.
        grad_scaler: the torch.amp.GradScaler that scales the loss, where there is one: what is kept
            of gradients then follows its scale, and steps that it skips are forgotten. Implies
            discardable.
        discardable: a step that optimizer.step() does not use (synchronize(), then zero_grad()), or
            that is not finite, is forgotten, as if it had never been. Takes as much memory again as
            the algorithm's state, and the time to copy that in each step.

    Raises:
        ValueError: bad options and parameters.
        MismatchError: at the first gradient, or in `handshake()`, on all ranks: they were started
            differently.
    """

    def __init__(
        self,
        spec: Any,
        optimizer: Optional[torch.optim.Optimizer],
        *,
        named_parameters: Optional[NamedParameters] = None,
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> None:
        ranks = self._ranks = TorchRanks(process_set, reduced=True)
        check_types(optimizer, grad_scaler)
        pairs = named(optimizer, named_parameters)
        arguments = spec, optimizer, pairs, grad_scaler, discardable
        self._serving = ServedOptimizer(self, ranks, *arguments)
        self._steps = self._serving.steps
        super().__init__(self._steps.session)
        # What Horovod was given, until the first result of the step comes.
        self._submitted: List[tuple] = []
        # In this step: id(parameter) → the operation of Horovod's that brings the result after its
        # own.
        self._results_after: Dict[int, int] = {}
        # Inside `uneven`: tells ranks that train no more that a step begins.
        self._announce: Optional[Callable[[], None]] = None
        # Numbers of the blocks of `uneven`.
        self._blocks = itertools.count(1)

    def __repr__(self) -> str:
        return f"<{self._session.compressor!r} of {len(self._steps.slots)} parameters>"

    # -- Horovod's interface

    # A compiled step is left here, and entered again behind it.
    @torch.compiler.disable
    def compress(self, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """Called by Horovod with a parameter's gradient: returns what Horovod is to reduce, and a
        context."""
        steps, serving = self._steps, self._serving
        if steps.optimizer is None:
            serving.begin(horovod_internals.optimizer_of(self))
        exchange = self._session.exchange
        if not exchange.open_tensors():
            self._begin_step()
        slot = steps.slots.find(tensor, horovod_internals.parameter_under_way)
        if slot.name in serving.foreign:
            raise ValueError(
                f"{slot.name} is a parameter of another optimizer of Horovod's than the one that "
                "this compression serves: make a compression for each, or give both the same one, "
                "made without optimizer and parameters, of which each gets its own"
            )
        if serving.sharing and (why := serving.why_shared(slot)):
            self._fail(slot, tensor, why)
            # The other's memory stays as it is.
            tensor = tensor.clone()
        memory, array, carrier = steps.submit(slot, tensor)
        grad: Any = slot.param.grad
        exchange.transport.count(carrier.nbytes, carrier.nbytes)
        # As `transport.keep` says; a parameter holds its own gradient.
        if carrier is array:
            sent, kept = memory, None if memory is grad else memory.view(-1)
        else:
            sent, kept = slot.tensor_of(carrier)
        context = slot, tensor, memory, sent, carrier, kept, grad._version
        self._submitted.append(context)
        return sent, context

    @torch.compiler.disable
    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Called by Horovod with what it reduced: returns the gradient, in its own memory, holding
        the result."""
        # Horovod brings sparse gradients, which it reduces by itself, without a call of compress.
        if ctx is None:
            self._refuse_sparse()
            return tensor
        slot, grad, memory, sent, carrier, _, _ = ctx
        if self._submitted:
            self._steps.streams.join()
            self._results_after = horovod_internals.results_after(self._steps.optimizer)
            self._look_for_changes()
        # An exception came after Horovod had handed this result over.
        if tensor is None:
            if self._session.lifecycle.state is not State.IDLE:
                why = f"the step was interrupted while the result of {slot.name} came"
                self._fail(slot, grad, why)
                self._session.exchange.fail_tensor(slot.name)
                self._end_where_last(slot.param)
            return grad
        own = tensor is sent or tensor.data_ptr() == sent.data_ptr()
        reduced = carrier if own else flat(tensor, not isinstance(carrier, np.ndarray))
        # Of a sparse one Horovod copies the result at once.
        self._finish(slot.name, reduced, memory is not grad or is_sparse(slot.param.grad))
        if memory is not grad:
            self._steps.copy_result(memory, grad)
        if id(slot.param) in self._results_after:
            sleep_until_over(self._results_after[id(slot.param)])
        self._end_where_last(slot.param)
        return grad

    def _begin_step(self) -> None:
        ranks, session = self._ranks, self._session
        now = ranks.rank_and_size()
        if now != ranks.known:
            if not ranks.elastic:
                raise RuntimeError(
                    "this compression was made for rank {} of {}, and this is now rank {} of {}: "
                    "the ranks of a compression must stay the same. Make a new one after "
                    "hvd.init()".format(*ranks.known, *now)
                )
            # Ranks have left, and those that stay are not asked to synchronize.
            session.resize()
        self._serving.refuse_brought()
        if self._announce is not None:
            self._announce()
        # Not where the optimizer is found: a state that is loaded then replaces what was handed
        # over.
        factor = horovod_internals.factor_of(self._steps.optimizer)
        session.exchange.features.handover.check_host(factor)
        self._submitted.clear()
        ranks.refuse_unsynced(
            "hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)"
        )
        self._steps.begin()

    def _finish(self, name: str, reduced: Any, at_once: bool) -> None:
        """Takes in what Horovod has reduced. at_once: the result is needed now."""
        exchange, lifecycle = self._session.exchange, self._session.lifecycle
        try:
            exchange.finish(name, reduced, at_once)
        except HorovodInternalError:
            raise
        except (WireError, RuntimeError):
            # Of a step the first one is enough.
            told = lifecycle.state is State.FAILED
            lifecycle.fail(None)
            exchange.fail_tensor(name)
            if not told:
                raise

    def _refuse_sparse(self) -> None:
        """ValueError for a sparse gradient that something depends on."""
        covers = self._steps.takeover.covers
        if any(covers(slot.param) and is_sparse(slot.param.grad) for slot in self._steps.slots):
            raise ValueError(
                f"{self._session.compressor.id} has taken over the optimizer's momentum, which a "
                f"sparse gradient cannot have: "
                "give hvd.DistributedOptimizer(sparse_as_dense=True), or bind with momentum=0"
            )
        if self._announce is not None:
            raise ValueError(
                "ranks without data cannot answer sparse gradients: give "
                "hvd.DistributedOptimizer(sparse_as_dense=True)"
            )

    def _look_for_changes(self) -> None:
        """Fails the step where the user has changed a gradient of it. When its first result comes,
        because then Horovod begins to write results. Of views nothing is known: those of one tensor
        share their version, which other gradients have changed."""
        for slot, grad, _, _, _, _, version in self._submitted:
            now = slot.param.grad
            if now is None or now._version != version and not now._is_view():
                why = f"the gradient of {slot.name} was changed while it was exchanged"
                hint = "(Or another of Horovod's optimizers has this parameter: give it to one)"
                self._fail(slot, grad, f"{why}: {SYNCHRONIZE_FIRST} {hint}")
        self._submitted.clear()

    def _fail(self, slot: Slot, grad: torch.Tensor, why: str) -> None:
        """Notes that a result cannot be used, and so the step cannot."""
        self._session.lifecycle.fail(why)
        slot.param.grad = grad  # Horovod puts results there.

    def _end_where_last(self, param: torch.Tensor) -> None:
        """After a parameter's result. The last one ends a step that has failed."""
        exchange, lifecycle = self._session.exchange, self._session.lifecycle
        if exchange.open_tensors():
            return
        if lifecycle.state is not State.FAILED:
            self._serving.results_came(param)
            lifecycle.take(Event.ARRIVE)
            return
        exchange.fail()
        if failure := lifecycle.failure():
            horovod_internals.rollback_step(self._steps.optimizer)
            raise failure
        horovod_internals.clear_gradients(self._steps.optimizer)

    # -- for users

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """As of `Bound`. RuntimeError for a portable one inside `uneven`."""
        if portable:
            self._refuse_uneven("save a portable state after the block")
        return super().state_dict(portable)

    def switch(self, spec: Any, at: Optional[int] = None) -> None:
        """As of `Bound`, or with `at` as of `Steps`. RuntimeError inside `uneven` without that."""
        if at is None:
            self._refuse_uneven("switch before the block, or say at=STEP before it")
        self._steps.switch(spec, at)

    def _refuse_uneven(self, advice: str) -> None:
        if self._announce is not None:
            raise RuntimeError(f"inside `with uneven(…):` ranks are at different steps: {advice}")
