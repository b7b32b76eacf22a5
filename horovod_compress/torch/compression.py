"""Horovod's Compressor interface, `compress` and `decompress`, over the exchange."""

import functools
import logging
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import horovod.torch as hvd
import torch

from .. import checkpoint
from ..binding import (
    REFUSED_ALONE,
    description_of,
    requested_compressor,
    warn_once,
)
from ..compressors import get_compressor
from ..compressors.base import Compressor
from ..deprecated import by_name
from ..exchange import Exchange
from ..handshake import agree, gather
from ..machine import Machine
from ..snapshot import Snapshots
from ..transport.base import Transport
from . import horovod_internals, ownership
from .lifecycle import Event
from .moments import Moments, moments_of
from .parameters import NamedParameters, Slot, Slots, named
from .sgd import SGDTakeover, is_plain_sgd
from .state_names import renamed
from .steps import StepCompression

_log = logging.getLogger("horovod_compress")


class _Chosen(NamedTuple):
    """How tensors are compressed. requested: as the spec says; compressor: with the momentum that
    it applies; tensors: {name: (shape, compressor)}; takeover, moments, transport, host: what
    serves these."""

    requested: Compressor
    compressor: Compressor
    tensors: Dict[str, Tuple[tuple, Compressor]]
    takeover: SGDTakeover
    moments: Optional[Moments]
    transport: Transport
    host: Optional[Machine]


class BoundCompression(StepCompression):
    """A compression bound to an optimizer and its parameters, for
    hvd.DistributedOptimizer(compression=…).

    spec: as for horovod_compress.get_compressor. optimizer: the torch optimizer that will be
    wrapped. An SGD's momentum, Nesterov and weight decay are taken over by
        algorithms that correct momentum (dgc). None where the algorithm needs nothing from it.
    named_parameters: (name, parameter) pairs, as model.named_parameters(); default: numbered by
    parameter group. process_set: the one that hvd.DistributedOptimizer gets; default: all ranks.
    grad_scaler: the torch.amp.GradScaler that scales the loss, where there is one: what is kept of
    gradients then follows its scale,
        and steps that it skips are forgotten. Implies discardable.
    discardable: a step that optimizer.step() does not use (synchronize(), then zero_grad()), or
    that is not finite, is forgotten, as if
        it had never been. Takes as much memory again as the algorithm's state, and the time to copy
        that in each step.

    One compression serves one optimizer on one rank. Its residuals are this rank's own: save
    `state_dict()` on every rank, or one that is portable; in an elastic job give it to
    hvd.elastic.TorchState(compression=…), see `elastic`. Raises ValueError for bad options and
    parameters; the first gradient, or `handshake()`, raises MismatchError, on all ranks, where
    ranks were started differently.
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
        super().__init__(process_set, grad_scaler, discardable)
        _check_types(optimizer, grad_scaler)
        self._slots = Slots(named(optimizer, named_parameters))
        self._bound_optimizer = optimizer
        # What users were told last of an SGD's takeover.
        self._announced: Optional[str] = None
        # To come: the step from which on, and a spec.
        self._switches: List[Tuple[int, Any]] = []
        self._use(self._choose(spec))
        if self._active:
            ownership.expect(self)

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

    def _choose(self, spec: Any) -> _Chosen:
        """What a spec comes to with the bound optimizer's momentum. ValueError for what cannot be
        served."""
        optimizer, reduced = self._bound_optimizer, self._reduced()
        compressor = requested = requested_compressor(spec, optimizer, is_plain_sgd(optimizer))
        names = {id(slot.param): slot.name for slot in reduced}
        takeover = SGDTakeover(optimizer if self._active else None, compressor, names)
        variants = takeover.variants
        if (
            compressor.traits.corrects_momentum
            and optimizer is not None
            and compressor.momentum is None
        ):
            # Other momentum stays with the optimizer.
            compressor = compressor.bound(0.0, bool(compressor.nesterov and not variants))
        moments = moments_of(compressor, {slot.name: slot.param for slot in reduced})
        shapes = {slot.name: tuple(slot.param.shape) for slot in reduced}
        tensors = {name: (shape, variants.get(name, compressor)) for name, shape in shapes.items()}
        transport, host = self._transport_of(compressor), self._host_for(compressor)
        return _Chosen(
            requested,
            next(iter(variants.values()), compressor),
            tensors,
            takeover,
            moments,
            transport,
            host,
        )

    def _use(self, chosen: _Chosen) -> None:
        self._chosen = chosen
        self._compressor, self._tensors = chosen.compressor, chosen.tensors
        self._takeover, self._moments = chosen.takeover, chosen.moments
        self._transport, self._host = chosen.transport, chosen.host
        if self._takeover.announcement not in (None, self._announced) and hvd.rank() == 0:
            self._announced = self._takeover.announcement
            _log.warning("%s", self._announced)

    # Made when it is first needed, because it allocates the state.
    @functools.cached_property
    def _exchange(self) -> Exchange:
        self._look_for_optimizer()
        exchange = Exchange(
            self._compressor,
            self._transport,
            self._tensors,
            self._label,
            self._elastic,
            self._host,
        )
        if self._discardable:
            exchange.extend("discard", Snapshots())
        return exchange

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins to serve Horovod's optimizer, which was given this compression, where that has not
        happened yet. ValueError where a parameter was thawed since this compression was made, whose
        layer it would have had to see."""
        if self._optimizer is not None or not self._active:
            return
        self._optimizer = optimizer
        try:
            if {slot.name for slot in self._reduced()} != self._tensors.keys():
                self._follow_horovods_choice()
            if self._exchange_is_made:
                self._exchange.handover.check_host(horovod_internals.factor_of(optimizer))
        except BaseException:
            self._optimizer = None
            raise
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
        thawed = [slot for slot in self._reduced() if slot.name not in self._tensors]
        watched = chosen.moments.watched if chosen.moments is not None else {}
        unseen = [slot.name for slot in thawed if id(slot.param) in watched]
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

    @property
    def _requested(self) -> Compressor:
        return self._chosen.requested

    def _description(self) -> Dict[str, Any]:
        return {**super()._description(), **_described(self._tensors)}

    # -- for users

    def __repr__(self) -> str:
        return f"<{self._compressor!r} bound to {len(self._slots)} parameters>"

    def state_dict(self, portable: bool = False) -> Dict[str, Any]:
        """This rank's residuals and momentum, as tensors and plain values: for torch.save, one file
        a rank, next to the model's and optimizer's.

        portable: all ranks call this at the same step, and get the same: the mean over ranks of
        what each has not sent yet, which any number of ranks can go on from. One file is enough.
        MismatchError where ranks are not at the same step.
        """
        if portable and self._in_uneven:
            raise RuntimeError(
                "inside `with uneven(…):` ranks are at different steps: save a portable state "
                "after the block"
            )
        return self._state(portable)

    def discard(self) -> None:
        """Forgets the last step, as if its gradients had never been; to be called on all ranks.
        Needs discardable=True, or a grad_scaler; a step that optimizer.step() has not used when the
        next one begins is forgotten without this call."""
        super().discard()
        self._step.take(Event.ROLLBACK)

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """Continues from what `state_dict` has returned, of the same model: bit for bit from this
        rank's own, or from a list of all ranks', in any order, or from a portable one. Where that
        list is of another number of ranks, each rank gets their mean, so the mean of what ranks
        have not sent yet is kept. Names may have got or lost the `_orig_mod.` of torch.compile and
        the `module.` of wrappers. ValueError, with nothing changed, for any other state."""
        if not self._process_set.included():
            return  # this rank compresses nothing
        self._look_for_optimizer()
        untrained = {slot.name for slot in self._slots} - self._tensors.keys()
        state = renamed(state, self._tensors, untrained)
        while self._switches and self._switches[0][0] < checkpoint.steps_of(state):
            self._switch(self._switches.pop(0)[1], compare=False)
        try:
            self._exchange.load_state_dict(state)
        except ValueError as error:
            if self._active:
                raise
            raise ValueError(f"{error}. And {REFUSED_ALONE}") from None
        self._step.take(Event.ROLLBACK)

    def switch(self, spec: Any, at: Optional[int] = None) -> None:
        """Goes on with another compression, "topk:ratio=0.01" or {"id": "topk", "ratio": 0.01},
        from the next step on; at: from that step on, counted from 0 since training began.

        What ranks have not sent yet goes on: in what the new algorithm keeps, else densely in the
        first step. An SGD's momentum is taken over, or given back, and counts once. All ranks call
        it between the same two steps, with the same arguments. ValueError for a bad spec, and
        RuntimeError between backward() and step(), with nothing changed; MismatchError where ranks
        differ.
        """
        config = get_compressor(spec).config
        if at is not None:
            if isinstance(at, bool) or not isinstance(at, int) or at < 0:
                raise ValueError(f"at must be a step, counted from 0, not {at!r}")
            refuse_begun_within_step(config)
            self._switches = sorted([*self._switches, (at, config)], key=lambda switch: switch[0])
            return
        if self._in_uneven:
            raise RuntimeError(
                "inside `with uneven(…):` ranks are at different steps: switch before the block, "
                "or say at=STEP before it"
            )
        self._switch(config)

    def _switch(self, spec: Any, compare: bool = True) -> None:
        # In an elastic job whose ranks are not together yet, rank 0's becomes everyone's in any
        # case.
        self._leave_unused()
        self._look_for_optimizer()
        exchange = self._exchange
        exchange.end_step()
        self._takeover.restore()
        chosen = self._choose(spec)
        compared = self._active and compare and self._synced
        if compared:
            description = {**description_of(chosen.compressor), **_described(chosen.tensors)}
            advice = "Call it on all ranks, between the same two steps, with the same spec"
            agree(
                self._transport,
                f"{self._label}.switch",
                description,
                "called compression.switch()",
                advice,
            )
        before, after = self._takeover.gains(), chosen.takeover.gains()
        gains = {
            name: after.get(name, 1.0) / before.get(name, 1.0)
            for name in before.keys() | after.keys()
        }
        optimizer = self._optimizer
        exchange.host = chosen.host
        exchange.switch(
            chosen.compressor,
            chosen.tensors,
            gains,
            None if optimizer is None else horovod_internals.factor_of(optimizer),
        )
        exchange.transport = chosen.transport
        self._use(chosen)
        self._agreed = compared

    def _switch_where_due(self) -> None:
        if self._switches:
            self._exchange.end_step()
        while self._switches and self._switches[0][0] <= self._exchange.steps_taken():
            self._switch(self._switches.pop(0)[1])

    # -- for ranks with different numbers of steps: see `uneven.py`

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


def _check_types(optimizer: Any, grad_scaler: Any) -> None:
    """Raises TypeError for a first argument or a `grad_scaler` of the wrong kind."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"a compression is bound to a torch optimizer, its first argument, not to an "
            f"object of {type(optimizer)}"
        )
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, not {grad_scaler!r}")


def refuse_begun_within_step(config: Dict[str, Any]) -> None:
    """ValueError where an algorithm has to see a forward pass before the first gradient."""
    moments = config.get("moments", "minibatch")
    if moments != "minibatch":
        raise ValueError(
            f"moments={moments} cannot begin at a step's first gradient: call "
            f"compression.switch(spec) without at, before the step's forward pass"
        )


def _described(tensors: Dict[str, Tuple[tuple, Compressor]]) -> Dict[str, Any]:
    return {
        "tensors": {
            name: {"shape": list(shape), "compressor": repr(variant)}
            for name, (shape, variant) in tensors.items()
        }
    }
