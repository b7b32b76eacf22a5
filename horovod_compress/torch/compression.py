"""Horovod's Compressor interface, `compress` and `decompress`, over the exchange."""

from typing import Any, Dict, List, Optional, Sequence, Union

import torch

from ..adapters.binding import warn_once
from ..adapters.process_sets import REFUSED_ALONE
from ..deprecated import by_name
from ..protocol.handshake import gather
from ..pytorch.compression import check_types
from ..pytorch.lifecycle import Event
from ..pytorch.parameters import NamedParameters, Slot, named
from . import horovod_internals, ownership
from .steps import StepCompression


class BoundCompression(StepCompression):
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
        super().__init__(process_set, grad_scaler, discardable)
        check_types(optimizer, grad_scaler)
        self._bind(spec, optimizer, named(optimizer, named_parameters))
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

    def _factor(self) -> Optional[float]:
        optimizer = self._optimizer
        return None if optimizer is None else horovod_internals.factor_of(optimizer)

    _refused_alone = REFUSED_ALONE

    def load_state_dict(self, state: Union[Dict[str, Any], Sequence[Dict[str, Any]]]) -> None:
        """As of OptimizerCompression. A rank that is not in the process set loads nothing."""
        if self._process_set.included():
            super().load_state_dict(state)

    # -- for ranks with different numbers of steps: see `uneven.py`

    def _refuse_uneven(self, advice: str) -> None:
        if self._in_uneven:
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
