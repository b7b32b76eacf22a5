"""Horovod's Compressor interface, `compress` and `decompress`, over the exchange, and the hooks of
Horovod's optimizer around its steps."""

import itertools
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple, Union

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from ..adapters.binding import warn_once
from ..adapters.process_sets import REFUSED_ALONE
from ..deprecated import by_name
from ..protocol.handshake import gather
from ..protocol.wire import WireError
from ..pytorch.compression import OptimizerCompression, check_types
from ..pytorch.lifecycle import CLOSURE, SYNCHRONIZE_FIRST, Event, State
from ..pytorch.optimizers import in_grad_scaler
from ..pytorch.parameters import NamedParameters, Slot, flat, is_sparse, named
from ..transport.horovod import sleep_until_over
from . import horovod_internals, ownership
from .between import Watch
from .binding import TorchBinding


class BoundCompression(OptimizerCompression, TorchBinding):
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

    @by_name
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
        TorchBinding.__init__(self, process_set)
        check_types(optimizer, grad_scaler)
        # Horovod's optimizer also reduces in a process set of one rank.
        self._active = bool(self._process_set.included()) and (hvd.size() > 1 or self._elastic)
        pairs = named(optimizer, named_parameters)
        OptimizerCompression.__init__(self, spec, optimizer, pairs, grad_scaler, discardable)
        # With the version of its gradient, until the first result of the step comes.
        self._submitted: List[Tuple[Slot, torch.Tensor, int]] = []
        # In this step: id(parameter) → the operation of Horovod's that brings the result after its
        # own.
        self._results_after: Dict[int, int] = {}
        self._watch = Watch()
        # Names of parameters that the optimizer which it serves does not reduce.
        self._foreign: Set[str] = set()
        # Others, of optimizers that have some of the same parameters.
        self._sharing: "weakref.WeakSet[BoundCompression]" = weakref.WeakSet()
        # Inside `uneven`: tells ranks that train no more that a step begins.
        self._announce: Optional[Callable[[], None]] = None
        # Numbers of the blocks of `uneven`.
        self._blocks = itertools.count(1)
        if self._active:
            ownership.not_used_yet.add(self)

    _advice_on_options = (
        "Where only some ranks have set or loaded it, call "
        "hvd.broadcast_optimizer_state(optimizer, root_rank=0) before training"
    )
    _refused_alone = REFUSED_ALONE

    # -- the optimizer that it serves

    def _reduced(self) -> List[Slot]:
        """The parameters that Horovod reduces, frozen or not: its optimizer decides that when it is
        made. Until then, and of those that it does not have, all that are not frozen."""
        if not self._active:
            return []
        optimizer: Any = self._optimizer or self._bound_optimizer
        decided = horovod_internals.reduced_by(optimizer)
        groups = [] if decided is None else optimizer.param_groups
        its = {id(p): p in (decided or ()) for group in groups for p in group["params"]}
        return [slot for slot in self._slots if its.get(id(slot.param), slot.param.requires_grad)]

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins to serve Horovod's optimizer, which was given this compression, where that has not
        happened yet. ValueError where that reduces over another process set, and where a parameter
        was thawed since this compression was made, whose layer it would have had to see."""
        if self._optimizer is not None:
            return
        self.check_process_set(horovod_internals.process_set_of(optimizer))
        if not self._active:
            return
        self._optimizer = optimizer
        try:
            if {slot.name for slot in self._reduced()} != self._tensors.keys():
                self._follow_horovods_choice()
        except BaseException:
            self._optimizer = None
            raise
        reduced = horovod_internals.reduced_by(optimizer) or ()
        self._foreign = {slot.name for slot in self._slots if slot.param not in reduced}
        ownership.note_serving(self)
        self._register(optimizer)

    def _look_for_optimizer(self) -> None:
        """Begins to serve the optimizer that has this compression, before that brings a gradient:
        it knows which parameters gradients will be of."""
        if self._active and self._optimizer is None:
            holders = horovod_internals.holders_of(self)
            if len(holders) == 1:
                self.serve(holders[0])

    def _follow_horovods_choice(self) -> None:
        """Parameters were frozen or thawed between this compression and Horovod's optimizer. What
        was kept of the others goes on."""
        chosen = self._choose(self._requested)
        watched = chosen.moments.watched if chosen.moments is not None else {}
        unseen = [
            slot.name
            for slot in self._reduced()
            if slot.name not in self._tensors and id(slot.param) in watched
        ]
        if unseen:
            raise ValueError(
                f"{unseen[0]} was thawed after this compression was made, which has to see what "
                "its layer does: make it later, or give it neither optimizer nor parameters"
            )
        chosen = chosen._replace(moments=self._moments)
        if self._exchange_is_made:
            for name, arrays in self._exchange.arrays().items():
                if name not in chosen.tensors and any(array.any() for array in arrays.values()):
                    warn_once(
                        f"Horovod does not reduce {name}, which was frozen when "
                        "hvd.DistributedOptimizer was made: what was kept of it is gone"
                    )
            self._exchange.switch(chosen.compressor, chosen.tensors, {})
        self._use(chosen)
        self._agreed = False

    def _factor(self) -> Optional[float]:
        optimizer = self._optimizer
        return None if optimizer is None else horovod_internals.factor_of(optimizer)

    # -- Horovod's interface

    # A compiled step is left here, and entered again behind it.
    @torch.compiler.disable
    def compress(self, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """Called by Horovod with a parameter's gradient: returns what Horovod is to reduce, and a
        context."""
        if self._optimizer is None:
            self.serve(horovod_internals.optimizer_of(self))
        if not self._exchange.under_way:
            self._begin_step()
        slot = self._slots.find(tensor, horovod_internals.parameter_under_way)
        if slot.name in self._foreign:
            raise ValueError(
                f"{slot.name} is a parameter of another optimizer of Horovod's than the one that "
                "this compression serves: make a compression for each, or give both the same one, "
                "made without optimizer and parameters, of which each gets its own"
            )
        if self._sharing and (why := ownership.why_shared(self, slot)):
            self._fail(slot, tensor, why)
            # The other's memory stays as it is.
            tensor = tensor.clone()
        memory, array, carrier = self._submit(slot, tensor)
        grad: Any = slot.param.grad
        self._submitted.append((slot, tensor, grad._version))
        self._exchange.transport.count(carrier.nbytes, carrier.nbytes)
        # As `transport.horovod.keep` says; a parameter holds its own gradient.
        if carrier is array:
            sent, kept = memory, None if memory is grad else memory.view(-1)
        else:
            sent, kept = slot.tensor_of(carrier)
        return sent, (slot, tensor, memory, sent, carrier, kept)

    @torch.compiler.disable
    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Called by Horovod with what it reduced: returns the gradient, in its own memory, holding
        the result."""
        # Horovod brings sparse gradients, which it reduces by itself, without a call of compress.
        if ctx is None:
            if any(
                self._takeover.covers(slot.param) and is_sparse(slot.param.grad)
                for slot in self._slots
            ):
                raise ValueError(
                    f"{self._compressor.id} has taken over the optimizer's momentum, which a "
                    f"sparse gradient cannot have: "
                    "give hvd.DistributedOptimizer(sparse_as_dense=True), or bind with momentum=0"
                )
            if self._announce is not None:
                raise ValueError(
                    "ranks without data cannot answer sparse gradients: give "
                    "hvd.DistributedOptimizer(sparse_as_dense=True)"
                )
            return tensor
        slot, grad, memory, sent, carrier, _ = ctx
        if self._submitted:
            self._streams.join()
            self._results_after = horovod_internals.results_after(self._optimizer)
            self._look_for_changes()
        # An exception came after Horovod had handed this result over.
        if tensor is None:
            if self._step.state is not State.IDLE:
                why = f"the step was interrupted while the result of {slot.name} came"
                self._fail(slot, grad, why)
                self._exchange.fail_tensor(slot.name)
                self._end_where_last(slot.param)
            return grad
        own = tensor is sent or tensor.data_ptr() == sent.data_ptr()
        reduced = carrier if own else flat(tensor, not isinstance(carrier, np.ndarray))
        # Of a sparse one Horovod copies the result at once.
        self._finish(slot.name, reduced, memory is not grad or is_sparse(slot.param.grad))
        if memory is not grad:
            self._copy_result(memory, grad)
        if id(slot.param) in self._results_after:
            sleep_until_over(self._results_after[id(slot.param)])
        self._end_where_last(slot.param)
        return grad

    def _finish(self, name: str, reduced: Any, at_once: bool) -> None:
        """Takes in what Horovod has reduced. at_once: the result is needed now."""
        try:
            self._exchange.finish(name, reduced, at_once)
        except HorovodInternalError:
            raise
        except (WireError, RuntimeError):
            # Of a step the first one is enough.
            told = self._step.state is State.FAILED
            self._step.fail(None)
            self._exchange.fail_tensor(name)
            if not told:
                raise

    def _look_for_changes(self) -> None:
        """Fails the step where the user has changed a gradient of it. When its first result comes,
        because then Horovod begins to write results. Of views nothing is known: those of one tensor
        share their version, which other gradients have changed."""
        for slot, grad, version in self._submitted:
            now = slot.param.grad
            if now is None or not now._is_view() and now._version != version:
                why = f"the gradient of {slot.name} was changed while it was exchanged"
                hint = "(Or another of Horovod's optimizers has this parameter: give it to one)"
                self._fail(slot, grad, f"{why}: {SYNCHRONIZE_FIRST} {hint}")
        self._submitted.clear()

    def _begin_step(self) -> None:
        now = self._process_set.rank(), self._process_set.size()
        if now != self._ranks:
            if not self._elastic:
                raise RuntimeError(
                    "this compression was made for rank {} of {}, and this is now rank {} of {}: "
                    "the ranks of a compression must stay the same. Make a new one after "
                    "hvd.init()".format(*self._ranks, *now)
                )
            # Ranks have left, and those that stay are not asked to synchronize.
            self._resize()
        self._refuse_brought()
        if self._announce is not None:
            self._announce()
        # Not where the optimizer is found: a state that is loaded then replaces what was handed
        # over.
        self._exchange.handover.check_host(horovod_internals.factor_of(self._optimizer))
        self._submitted.clear()
        self._refuse_unsynced(
            "hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)"
        )
        super()._begin_step()

    # -- around steps of Horovod's optimizer

    def _before_use(self, optimizer: torch.optim.Optimizer) -> None:
        ownership.warn_of_unreduced(optimizer, self._slots)
        self._watch.before_use(self._takeover, str(self._compressor.id))
        super()._before_use(optimizer)

    def _before_step(self, optimizer: Any, args: tuple, kwargs: Dict[str, Any]) -> Optional[tuple]:
        # Comes again before the step of the optimizer which Horovod's extends.
        if in_grad_scaler():
            self._step.expect(Event.SCALED_STEP)
        if self._step.is_unused and horovod_internals.synchronizes_again(optimizer):
            self._refuse_brought()
            # The step uses what comes within it.
            self._leave_unused()
        under_way = self._exchange_is_made and self._exchange.under_way
        first = horovod_internals.first_result(optimizer) if under_way else None
        if first is not None:
            sleep_until_over(first)
        return super()._before_step(optimizer, args, kwargs)

    def _leave_unused(self) -> None:
        if self._step.is_unused and self._discardable:
            self._watch.before_discard()
        super()._leave_unused()

    def _refuse_unreduced(self, optimizer: Any, in_closure: bool) -> None:
        """Brings what is under way to its end before, for other ranks wait."""
        if not horovod_internals.steps_unreduced(optimizer, in_closure):
            return
        why = f"a step came before its results: {SYNCHRONIZE_FIRST}"
        if in_closure:
            why = CLOSURE.format(what="the step uses them before Horovod has reduced them")
        self._leave_unused()
        self._step.fail(why)
        optimizer.synchronize()
        # Only sparse gradients were under way, which Horovod reduces by itself.
        raise self._step.failure() or RuntimeError(why)

    def _refuse_brought(self) -> None:
        """RuntimeError where results would be exchanged as if they were other gradients."""
        if (
            self._step.is_unused
            and self._exchange.keeps_state
            and horovod_internals.holds_results(self._optimizer)
        ):
            raise RuntimeError(
                "optimizer.synchronize() has brought these gradients, and would be called once "
                "more, which would count them twice: call it once after backward(), and step "
                "inside `with optimizer.skip_synchronize():`"
            )

    def _fail(self, slot: Slot, grad: torch.Tensor, why: str) -> None:
        """Notes that a result cannot be used, and so the step cannot."""
        self._step.fail(why)
        slot.param.grad = grad  # Horovod puts results there.

    def _end_where_last(self, param: torch.Tensor) -> None:
        """After a parameter's result. The last one ends a step that has failed."""
        if self._exchange.under_way:
            return
        if self._step.state is not State.FAILED:
            self._watch.results_came(param)
            self._step.take(Event.ARRIVE)
            return
        self._exchange.fail()
        if failure := self._step.failure():
            horovod_internals.rollback_step(self._optimizer)
            raise failure
        horovod_internals.clear_gradients(self._optimizer)

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """As of OptimizerCompression. A rank that is not in the process set loads nothing."""
        if self._process_set.included():
            super().load_state_dict(state)

    # -- for ranks with different numbers of steps: see `uneven.py`

    def _refuse_uneven(self, advice: str) -> None:
        if self._announce is not None:
            raise RuntimeError(f"inside `with uneven(…):` ranks are at different steps: {advice}")

    # -- for elastic jobs: see `elastic.py`

    def _settings(self) -> Dict[str, Any]:
        return {**super()._settings(), "switches": list(self._switches)}

    def _adopt(self, settings: Dict[str, Any]) -> None:
        super()._adopt(settings)
        self._switches = list(settings["switches"])

    def _go_back_to(self, state: Dict[str, Any]) -> None:
        super()._go_back_to(state)
        self._step.take(Event.ROLLBACK)
        self._takeover.restore()

    def _sync(self) -> None:
        self._options_agreed = False
        # Its scale is one of those that all ranks must have alike.
        if self._grad_scaler is not None:
            self._grad_scaler.load_state_dict(
                gather(self._transport, "hvdc.elastic.scaler", self._grad_scaler.state_dict())[0]
            )
        super()._sync()
