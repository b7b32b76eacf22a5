"""How the parameters of an optimizer are compressed, whoever hands their gradients over, and what
users call."""

import functools
import logging
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch

from ..adapters.binding import Binding, description_of, requested_compressor
from ..compressors import get_compressor
from ..compressors.base import Compressor
from ..engine import checkpoint
from ..engine.exchange import Exchange
from ..engine.snapshot import Snapshots
from ..protocol.handshake import agree
from ..protocol.machine import Machine
from ..transport.base import Transport
from .lifecycle import Event
from .moments import Moments, moments_of
from .parameters import NamedParameters, Slot, Slots
from .sgd import SGDTakeover, is_plain_sgd
from .state_names import renamed
from .steps import OptimizerSteps

_log = logging.getLogger("horovod_compress")


class Chosen(NamedTuple):
    """How tensors are compressed. requested: as the spec says; compressor: with the momentum that
    it applies; tensors: {name: (shape, compressor)}; takeover, moments, transport, machine: what
    serves these."""

    requested: Compressor
    compressor: Compressor
    tensors: Dict[str, Tuple[tuple, Compressor]]
    takeover: SGDTakeover
    moments: Optional[Moments]
    transport: Transport
    machine: Optional[Machine]


class OptimizerCompression(OptimizerSteps):
    """A compression of the gradients of an optimizer's parameters."""

    def __init__(
        self,
        spec: Any,
        optimizer: Optional[torch.optim.Optimizer],
        pairs: NamedParameters,
        grad_scaler: Any,
        discardable: bool,
    ) -> None:
        """Comes after that of the binding. optimizer: the one whose momentum may be taken over;
        pairs: the named parameters."""
        super().__init__(grad_scaler, discardable)
        # What users were told last of an SGD's takeover.
        self._announced: Optional[str] = None
        # To come: the step from which on, and a spec.
        self._switches: List[Tuple[int, Any]] = []
        self._slots, self._bound_optimizer = Slots(pairs), optimizer
        self._use(self._choose(spec))

    # -- of the reducer

    def _reduced(self) -> List[Slot]:
        """The parameters whose gradients come."""
        return list(self._slots) if self._active else []

    def _factor(self) -> Optional[float]:
        """The factor of a 1 on each rank in the reducer's results; None where that is not known
        yet."""
        return 1.0

    # Why one rank cannot load what several had to send.
    _refused_alone: str

    def _look_for_optimizer(self) -> None:
        """Finds the optimizer, where it is needed and not known."""

    def _refuse_uneven(self, advice: str) -> None:
        """RuntimeError where ranks may be at different steps."""

    # -- what is chosen

    @property
    def _stepping(self) -> Optional[torch.optim.Optimizer]:
        """The bound optimizer, or the one around it, which has parameter groups of its own once it
        has loaded a state. None where none was bound."""
        return self._bound_optimizer and (self._optimizer or self._bound_optimizer)

    def _choose(self, spec: Any) -> Chosen:
        """Returns how tensors are compressed by a spec with the bound optimizer's momentum.
        ValueError for what cannot be served."""
        optimizer, reduced = self._stepping, self._reduced()
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
        tensors = {
            slot.name: (tuple(slot.param.shape), variants.get(slot.name, compressor))
            for slot in reduced
        }
        return Chosen(
            requested,
            next(iter(variants.values()), compressor),
            tensors,
            takeover,
            moments,
            self._transport_of(compressor),
            self._machine_for(compressor),
        )

    def _use(self, chosen: Chosen) -> None:
        self._chosen = chosen
        self._compressor, self._tensors = chosen.compressor, chosen.tensors
        self._takeover, self._moments = chosen.takeover, chosen.moments
        self._transport, self._machine = chosen.transport, chosen.machine
        said = self._takeover.announcement
        if said not in (None, self._announced) and self._rank_and_size()[0] == 0:
            self._announced = said
            _log.warning("%s", said)

    # Made when it is first needed, because it allocates the state; other bindings set it.
    @functools.cached_property
    def _exchange(self) -> Exchange:  # type: ignore[override]
        self._look_for_optimizer()
        exchange = Exchange(
            self._compressor,
            self._transport,
            self._tensors,
            self._elastic,
            self._machine,
        )
        exchange.follows_momentum = self._takeover.follows
        if self._discardable:
            exchange.extend("discard", Snapshots())
        return exchange

    @property
    def _requested(self) -> Compressor:
        return self._chosen.requested

    def _description(self) -> Dict[str, Any]:
        return {**super()._description(), **_described(self._tensors)}

    @property
    def _exchange_is_made(self) -> bool:
        return "_exchange" in vars(self)

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
        if portable:
            self._refuse_uneven("save a portable state after the block")
        return state_of(self, portable)

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
            raise ValueError(f"{error}. And {self._refused_alone}") from None
        self._step.take(Event.ROLLBACK)

    def switch(self, spec: Any, at: Optional[int] = None) -> None:
        """Goes on with another compression, "dgc:ratio=0.01" or {"id": "dgc", "ratio": 0.01},
        from the next step on; at: from that step on, counted from 0 since training began.

        What ranks have not sent yet goes on: in what the new algorithm keeps, else densely in the
        first step. An SGD's momentum is taken over, or given back, and counts once. All ranks call
        it between the same two steps, with the same arguments. ValueError for a bad spec, and
        RuntimeError between backward() and step(), with nothing changed; MismatchError where ranks
        differ.
        """
        compressor = get_compressor(spec)
        if at is not None:
            if isinstance(at, bool) or not isinstance(at, int) or at < 0:
                raise ValueError(f"at must be a step, counted from 0, not {at!r}")
            refuse_begun_within_step(compressor)
            later = [*self._switches, (at, compressor.config)]
            self._switches = sorted(later, key=lambda switch: switch[0])
            return
        self._refuse_uneven("switch before the block, or say at=STEP before it")
        self._switch(compressor)

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
            agree(
                self._transport,
                f"{self._label()}.switch",
                description,
                "called compression.switch()",
                "Call it on all ranks, between the same two steps, with the same spec",
            )
        before, after = (each.gains(self._stepping) for each in (self._takeover, chosen.takeover))
        gains = {
            name: after.get(name, 1.0) / before.get(name, 1.0)
            for name in before.keys() | after.keys()
        }
        exchange.switch(
            chosen.compressor,
            chosen.tensors,
            gains,
            self._factor(),
            machine=chosen.machine,
            transport=chosen.transport,
            follows_momentum=chosen.takeover.follows,
        )
        self._takeover.give_back(self._stepping)
        self._use(chosen)
        self._agreed = compared

    def _switch_where_due(self) -> None:
        if self._switches:
            self._exchange.end_step()
        while self._switches and self._switches[0][0] <= self._exchange.steps_taken():
            self._switch(self._switches.pop(0)[1])


def check_types(optimizer: Any, grad_scaler: Any) -> None:
    """Raises TypeError for a first argument or a `grad_scaler` of the wrong kind."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"a compression is bound to a torch optimizer, its first argument, not to an "
            f"object of {type(optimizer)}"
        )
    if grad_scaler is not None and not hasattr(grad_scaler, "get_scale"):
        raise TypeError(f"grad_scaler must be a torch.amp.GradScaler, not {grad_scaler!r}")


def refuse_begun_within_step(compressor: Compressor) -> None:
    """ValueError where an algorithm has to see a forward pass before the first gradient."""
    moments = compressor.policy.moments
    if moments != "minibatch":
        raise ValueError(
            f"moments={moments} cannot begin at a step's first gradient: call "
            f"compression.switch(spec) without at, before the step's forward pass"
        )


def state_of(binding: Binding, portable: bool) -> Dict[str, Any]:
    """Returns what its exchange keeps, in tensors and plain values; portable: the mean of all
    ranks'."""
    state = binding._exchange.state_dict()
    if portable:
        state = checkpoint.portable(state, binding._transport, binding._label())
    state["tensors"] = {
        name: {key: torch.from_numpy(array) for key, array in arrays.items()}
        for name, arrays in state["tensors"].items()
    }
    return state


def _described(tensors: Dict[str, Tuple[tuple, Compressor]]) -> Dict[str, Any]:
    return {
        "tensors": {
            name: {"shape": list(shape), "compressor": repr(variant)}
            for name, (shape, variant) in tensors.items()
        }
    }
