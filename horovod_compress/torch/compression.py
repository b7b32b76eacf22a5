"""Horovod's Compressor interface, `compress` and `decompress`, over the exchange."""

import functools
import logging
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union

import horovod.torch as hvd
import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from .. import checkpoint
from ..binding import (
    REFUSED_ALONE,
    Binding,
    description_of,
    is_elastic,
    requested_compressor,
    warn_once,
)
from ..compressors import get_compressor
from ..compressors.base import Compressor
from ..exchange import Exchange
from ..handshake import agree, gather
from ..hosts import Host
from ..loss_scale import to_true_units
from ..snapshot import Snapshots
from ..transport.base import Transport
from ..transport.horovod import HorovodTransport, sleep_until_over
from ..transport.loopback import Loopback
from ..transport.mpi import MPITransport
from . import horovod_internals
from .moments import Moments, moments_of
from .parameters import NamedParameters, Slot, Streams, flat, loses_numbers, named
from .sgd import SGDTakeover, is_plain_sgd
from .state_names import renamed

_log = logging.getLogger("horovod_compress")

_SYNCHRONIZE_FIRST = (
    "call optimizer.synchronize() before anything that reads or changes gradients (a GradScaler's "
    "unscale_() and step(), clipping), and step "
    "inside `with optimizer.skip_synchronize():`"
)
_CLOSURE = (
    "gradients came inside optimizer.step(closure), and {what}: end the closure with "
    "optimizer.synchronize(), and step inside `with optimizer.skip_synchronize():`; or give the "
    "optimizer to hvdc.UpdateOptimizer in place of hvd.DistributedOptimizer, which takes closures "
    "as they are"
)
_SHARED = (
    "another compression has this parameter: two of Horovod's optimizers reduce {name} in one "
    "backward pass, and each would compress what the other has left of its gradient. Give all "
    "parameters to one optimizer, in groups; or the shared ones to one of them only; or give both "
    "hvd.Compression.none or fp16"
)
_UNREDUCED = (
    "Horovod does not reduce the gradients of {number} parameters that the optimizer changes "
    "({names}), because they were frozen, or not there, when hvd.DistributedOptimizer was made: "
    "ranks' copies of them part, unless you average them yourself. Make a new "
    "hvd.DistributedOptimizer for them"
)
_GIVEN_UP = (
    "Where other ranks may have used it, load the last saved states of model, optimizer and "
    "compression on all ranks, else go on"
)


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
    host: Optional[Host]


class BoundCompression(Binding):
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

    def __init__(
        self,
        spec: Any,
        optimizer: Optional[torch.optim.Optimizer],
        named_parameters: Optional[NamedParameters] = None,
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> None:
        super().__init__(hvd, process_set)
        self._number()
        # Horovod reduces on one rank too then.
        self._elastic = is_elastic()
        self._active = bool(self._process_set.included()) and (hvd.size() > 1 or self._elastic)
        self._ranks = self._rank_and_size()
        _check_types(optimizer, grad_scaler)
        self._slots = [Slot(name, param) for name, param in named(optimizer, named_parameters)]
        self._last = self._slots[-1]
        self._bound_optimizer = optimizer
        # Horovod's, once it is known.
        self._optimizer: Optional[torch.optim.Optimizer] = None
        self._transport: Transport
        self._transports: Dict[bool, Transport] = {}  # by whether MPI moves payloads
        # What users were told last of an SGD's takeover.
        self._announced: Optional[str] = None
        # To come: the step from which on, and a spec.
        self._switches: List[Tuple[int, Any]] = []
        self._use(self._choose(spec))
        self._grad_scaler = grad_scaler
        self._discardable = bool(discardable or grad_scaler is not None)
        # Of the last step: "unused" until an optimizer's step begins, then "in use" until it ends.
        self._results: Optional[str] = None
        # All ranks' optimizers, since these ranks are together.
        self._options_agreed = False
        self._unreduced_was_said = False
        # Whether a step's closure is under way, and Horovod had brought results before it.
        self._results_before_closure = False
        # Others, of optimizers that have some of the same parameters.
        self._sharing: "weakref.WeakSet[BoundCompression]" = weakref.WeakSet()
        # Whether an elastic state has this compression.
        self._synced = not self._elastic
        # id(parameter) → learning rate of this step, where residuals follow it.
        self._rates: Dict[int, float] = {}
        # With the version of its gradient, until the first result of the step comes.
        self._submitted: List[Tuple[Slot, torch.Tensor, int]] = []
        # In this step: id(parameter) → the operation of Horovod's that brings the result after its
        # own.
        self._results_after: Dict[int, int] = {}
        self._streams = Streams()
        # Why the results of the step that is under way cannot be used.
        self._spoilt: Optional[str] = None
        # Inside `uneven`: tells ranks that train no more that a step begins.
        self._announce: Optional[Callable[[], None]] = None
        self._blocks = 0  # of `uneven` so far
        if self._active:
            _not_used_yet.add(self)

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
        if compressor.corrects_momentum and optimizer is not None and compressor.momentum is None:
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
        (
            self._requested,
            self._compressor,
            self._tensors,
            self._takeover,
            self._moments,
            self._transport,
            self._host,
        ) = chosen
        if self._takeover.announcement not in (None, self._announced) and hvd.rank() == 0:
            self._announced = self._takeover.announcement
            _log.warning("%s", self._announced)

    def _transport_of(self, compressor: Any) -> Transport:
        if not self._active:
            return Loopback.group(1)[0]
        over_mpi = getattr(compressor, "transport", None) == "mpi"
        if over_mpi not in self._transports:
            self._transports[over_mpi] = (
                MPITransport(hvd, self._process_set)
                if over_mpi
                else HorovodTransport(self._process_set)
            )
        return self._transports[over_mpi]

    # -- Horovod's interface

    def compress(self, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """Called by Horovod with a parameter's gradient: returns what Horovod is to reduce, and a
        context."""
        if self._optimizer is None:
            self.serve(horovod_internals.optimizer_of(self))
        if not self._exchange.under_way:
            self._begin_step()
        slot = self._find(tensor)
        if self._sharing and self._is_under_way_elsewhere(slot):
            self._spoil(slot, tensor, _SHARED.format(name=slot.name))
            # The other's memory stays as it is.
            tensor = tensor.clone()
        exchange = self._exchange
        carries_float64 = exchange.carries_float64(slot.name)
        memory, array = slot.load(tensor, exchange.on_device(slot.name), carries_float64)
        if not self._has_told_of_float32 and loses_numbers(tensor, memory):
            self._tell_of_float32(slot.name)
        squares = self._moments.take(slot.name) if self._moments else None
        carrier = exchange.submit(slot.name, array, squares, self._rates.get(id(slot.param)))
        self._streams.mark(memory)
        sent = (
            memory
            if carrier is array
            else torch.from_numpy(carrier)
            if isinstance(carrier, np.ndarray)
            else carrier.tensor
        )
        grad = slot.param.grad
        assert grad is not None  # `_find` has seen it.
        self._submitted.append((slot, tensor, grad._version))
        return sent, (slot, tensor, memory, sent, carrier)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Called by Horovod with what it reduced: returns the gradient, in its own memory, holding
        the result."""
        # Horovod brings sparse gradients, which it reduces by itself, without a call of compress.
        if ctx is None:
            if any(
                self._takeover.covers(slot.param) and _is_sparse(slot.param.grad)
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
        slot, grad, memory, sent, carrier = ctx
        self._streams.join()
        if self._submitted:
            self._results_after = horovod_internals.results_after(self._optimizer)
            self._look_for_changes()
        # An exception came after Horovod had handed this result over.
        if tensor is None:
            self._spoil(
                slot, grad, f"the step was interrupted while the result of {slot.name} came"
            )
            self._exchange.give_up(slot.name)
            return self._unspoilt(grad)
        self._exchange.finish(
            slot.name,
            carrier
            if tensor.data_ptr() == sent.data_ptr()
            else flat(tensor, not isinstance(carrier, np.ndarray)),
        )
        # Of a sparse one Horovod copies the result at once.
        if memory is not grad or _is_sparse(slot.param.grad):
            self._exchange.settle()
        if memory is not grad:
            grad.copy_(memory)
            if grad.dtype == torch.float16 and not torch.isfinite(grad).all():
                self._exchange.reject()
        self._results, self._takeover.due = "unused", True
        if id(slot.param) in self._results_after:
            sleep_until_over(self._results_after[id(slot.param)])
        return grad if self._spoilt is None else self._unspoilt(grad)

    def _look_for_changes(self) -> None:
        """Spoils the step where the user has changed a gradient of it. When its first result comes,
        because then Horovod begins to write results, and gradients may be views of one tensor,
        which share their version."""
        for slot, grad, version in self._submitted:
            if slot.param.grad is None or slot.param.grad._version != version:
                why = f"the gradient of {slot.name} was changed while it was exchanged"
                hint = "(Or another of Horovod's optimizers has this parameter: give it to one)"
                self._spoil(slot, grad, f"{why}: {_SYNCHRONIZE_FIRST} {hint}")
        self._submitted.clear()

    def _find(self, tensor: torch.Tensor) -> Slot:
        # Gradients come in nearly the same order every step.
        slot = self._last.following
        if slot.param.grad is not tensor:
            slot = next(
                (slot for slot in self._slots if slot.param.grad is tensor), None
            ) or self._find_densified(tensor)
            self._last.following = slot
        self._last = slot
        return slot

    def _find_densified(self, tensor: torch.Tensor) -> Slot:
        """sparse_as_dense hands over a dense copy: the parameter is known by shape, and by value
        where shapes agree."""
        if any(slot.param is tensor for slot in self._slots):
            raise ValueError(
                "op=Adasum is not supported: it reduces parameters, not gradients; use hvd.Average "
                "or hvd.Sum"
            )
        alike = [
            slot
            for slot in self._slots
            if _is_sparse(slot.param.grad) and slot.param.shape == tensor.shape
        ]
        # Each comes once a step, so the first one that is left is right among equal gradients.
        if len(alike) > 1:
            alike = [slot for slot in alike if slot.name not in self._exchange.open_tensors()]
        if len(alike) > 1:
            alike = [
                slot
                for slot in alike
                if (g := slot.param.grad) is not None
                and torch.allclose(g.to_dense(), tensor, 0, 0, equal_nan=True)
            ]
        if not alike:
            raise ValueError(
                f"a gradient of shape {tuple(tensor.shape)} belongs to none of the parameters that "
                f"this compression was bound "
                "to: bind it to the optimizer's parameters as they are now, after all "
                "add_param_group()"
            )
        return alike[0]

    @functools.cached_property
    # Made when it is first needed, because it allocates the state.
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
            exchange.extensions["discard"] = Snapshots()
        return exchange

    def _begin_step(self) -> None:
        rank, size = self._process_set.rank(), self._process_set.size()
        if (rank, size) != self._ranks:
            if not self._elastic:
                raise RuntimeError(
                    f"this compression was made for rank {self._ranks[0]} of {self._ranks[1]}, and "
                    f"this is now rank {rank} of {size}: the ranks of "
                    "a compression must stay the same. Make a new one after hvd.init()"
                )
            # Ranks have left, and those that stay are not asked to synchronize.
            self._resize()
        if self._announce is not None:
            self._announce()
        scale = None if self._grad_scaler is None else self._grad_scaler.get_scale()
        optimizer = self._optimizer
        assert optimizer is not None
        if not self._options_agreed:
            self._agree_on_options(optimizer, scale)
        if self._results == "unused":
            self._forget_or_warn()
        self._results = None
        self._submitted.clear()
        self._switch_where_due()
        if scale is not None:
            self._exchange.expect(scale=to_true_units(scale))
        self._meet()
        if self._compressor.follow_lr:
            self._rates = {
                id(param): float(group["lr"])
                for group in optimizer.param_groups
                for param in group["params"]
            }
        self._takeover.due = False
        for name, options in self._takeover.changes(optimizer).items():
            self._exchange.replace(name, **options)

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
        _not_used_yet.discard(self)
        self._note_shared(optimizer)

        # Not compiled with the step: the compiler would take what these change for constant.
        @torch.compiler.disable
        def before(_: Any, args: tuple, kwargs: Dict[str, Any]) -> Any:
            return self._before_step(optimizer, args, kwargs)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(torch.compiler.disable(lambda *_: self._after_step()))

    def _look_for_optimizer(self) -> None:
        """Begins to serve the optimizer that has this compression, before that brings a gradient:
        it knows which parameters gradients will be of."""
        if self._active and self._optimizer is None:
            holders = horovod_internals.holders_of(self)
            if len(holders) == 1:
                self.serve(holders[0])

    @property
    def _exchange_is_made(self) -> bool:
        return "_exchange" in vars(self)

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

    def _note_shared(self, optimizer: torch.optim.Optimizer) -> None:
        """Finds the compressions whose optimizers reduce some of the same parameters."""
        mine = horovod_internals.reduced_by(optimizer) or set()
        for other in list(_serving):
            if mine & (horovod_internals.reduced_by(other._optimizer) or set()):
                self._sharing.add(other)
                other._sharing.add(self)
        _serving.add(self)

    def _is_under_way_elsewhere(self, slot: Slot) -> bool:
        """Whether another compression has this parameter's gradient, which it encodes in place."""
        for other in self._sharing:
            under_way = other._exchange.open_tensors() if other._exchange_is_made else ()
            if any(each.param is slot.param and each.name in under_way for each in other._slots):
                return True
        return False

    def _agree_on_options(self, optimizer: torch.optim.Optimizer, scale: Optional[float]) -> None:
        """Compares what the user can broadcast or load until the first gradient."""
        self._refuse_unsynced(
            "hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)"
        )
        self.handshake()
        agree(
            self._transport,
            f"{self._label}.step",
            {**_options(optimizer), "loss scale": scale},
            advice="Where only some ranks have set or loaded it, call "
            "hvd.broadcast_optimizer_state(optimizer, root_rank=0) before training",
        )
        self._options_agreed = True

    def _before_step(self, optimizer: Any, args: tuple, kwargs: Dict[str, Any]) -> Optional[tuple]:
        """Before a step of Horovod's optimizer, and again before that of the optimizer which it
        extends. Returns other (args, kwargs) for it where it is given a closure: the gradients that
        it uses are there after that."""
        if not self._results and horovod_internals.in_grad_scaler():
            raise RuntimeError(
                f"GradScaler.step() came before optimizer.synchronize(): {_SYNCHRONIZE_FIRST}"
            )
        under_way = self._exchange_is_made and self._exchange.under_way
        first = horovod_internals.first_result(optimizer) if under_way else None
        if first is not None:
            sleep_until_over(first)
        closure = horovod_internals.closure_of(args, kwargs)
        if closure is not None:
            closure = functools.partial(self._in_closure, optimizer, closure)
            return horovod_internals.with_closure(args, kwargs, closure)
        skips = not horovod_internals.synchronizes(optimizer)
        if skips and horovod_internals.has_unreduced_gradients(optimizer):
            self._give_up(optimizer, f"a step came before its results: {_SYNCHRONIZE_FIRST}")
        self._use_results(optimizer)
        return None

    def _in_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
        """A step's closure, and then what comes before a step without one. RuntimeError where its
        gradients are not reduced."""
        self._results_before_closure = self._results == "unused"
        try:
            loss = closure()
        finally:
            self._results_before_closure = False
        if horovod_internals.has_unreduced_gradients(optimizer):
            why = "the step uses them before Horovod has reduced them"
            self._give_up(optimizer, _CLOSURE.format(what=why))
        self._use_results(optimizer)
        return loss

    def _give_up(self, optimizer: Any, why: str) -> NoReturn:
        """Brings what is under way to its end, for other ranks wait, and raises RuntimeError."""
        self._spoilt = why
        optimizer.synchronize()
        raise RuntimeError(why)

    def _use_results(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepares the results that are there, if any, for the optimizer to use."""
        if self._results == "unused":
            self._results = "in use"
            keeps = self._grad_scaler is None and self._exchange.keeps_state
            if keeps and horovod_internals.in_grad_scaler():
                warn_once(
                    "a GradScaler scales these gradients: give the compression grad_scaler=…, or "
                    "what it keeps does not follow the scale"
                )
            if not self._unreduced_was_said:
                self._warn_of_unreduced(optimizer)
        self._takeover.before_step(optimizer)

    def _warn_of_unreduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Says once that the optimizer changes parameters which Horovod does not reduce."""
        reduced = horovod_internals.reduced_by(optimizer) or ()
        params = (param for group in optimizer.param_groups for param in group["params"])
        found = [param for param in params if param.grad is not None and param not in reduced]
        if found:
            self._unreduced_was_said = True
            known = {id(slot.param): slot.name for slot in self._slots}
            names = [known.get(id(p), f"one of shape {tuple(p.shape)}") for p in found[:3]]
            names += ["…"] * (len(found) > 3)
            warn_once(_UNREDUCED.format(number=len(found), names=", ".join(names)))

    def _after_step(self) -> None:
        self._results = None
        self._takeover.restore()

    def _forget_or_warn(self) -> None:
        """Forgets a step whose results no optimizer.step() has used, or warns that its effects
        stay."""
        if self._exchange.succeeded and self._discardable:
            super().discard()
        elif self._exchange.succeeded and self._exchange.keeps_state:
            if self._results_before_closure:
                why = "Horovod had exchanged others at the step's beginning, which nothing uses"
                raise RuntimeError(_CLOSURE.format(what=why))
            warn_once(
                "the gradients of a step were exchanged, and no optimizer.step() has used them; "
                "what was not sent of them is kept, and "
                "comes in later steps. To forget such steps, make the compression with "
                "discardable=True"
            )

    def _spoil(self, slot: Slot, grad: torch.Tensor, why: str) -> None:
        """Notes that a result cannot be used, and so the step cannot: it is brought to its end,
        because the other ranks wait, and given up."""
        self._spoilt = self._spoilt or why
        slot.param.grad = grad  # Horovod puts results there.

    def _unspoilt(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient, for Horovod to go on with the other results of a step that is given up;
        RuntimeError where that was the last."""
        if self._exchange.under_way:
            return grad
        why, self._spoilt, self._results, self._takeover.due = self._spoilt, None, None, False
        self._exchange.reject()
        if self._optimizer is not None:
            horovod_internals.forget_step(self._optimizer)
        raise RuntimeError(f"{why}. The step was given up. {_GIVEN_UP}")

    def _is_forgotten(self) -> bool:
        """Whether the last step is forgotten on all ranks, now or when the next one begins."""
        return self._discardable and (self._results == "unused" or not self._exchange.succeeded)

    def _drop_moments(self) -> None:
        """Forgets the squares of backward passes that no step followed."""
        if self._moments:
            for slot in self._slots:
                self._moments.take(slot.name)

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
        if portable and self._announce is not None:
            raise RuntimeError(
                "inside `with uneven(…):` ranks are at different steps: save a portable state "
                "after the block"
            )
        state = self._exchange.state_dict()
        if portable:
            state = checkpoint.portable(state, self._transport, self._label)
        state["tensors"] = {
            n: {k: torch.from_numpy(a) for k, a in arrays.items()}
            for n, arrays in state["tensors"].items()
        }
        return state

    def discard(self) -> None:
        """Forgets the last step, as if its gradients had never been; to be called on all ranks.
        Needs discardable=True, or a grad_scaler; a step that optimizer.step() has not used when the
        next one begins is forgotten without this call."""
        super().discard()
        self._results = None

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
        self._results = self._spoilt = None

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
        if self._announce is not None:
            raise RuntimeError(
                "inside `with uneven(…):` ranks are at different steps: switch before the block, "
                "or say at=STEP before it"
            )
        self._switch(config)

    def _switch(self, spec: Any, compare: bool = True) -> None:
        """`switch` at once; compare: whether all ranks do it, here, and say so to each other, or
        else at the next gradient. In an elastic job whose ranks are not together yet, rank 0's
        compression becomes everyone's in any case."""
        if self._results == "unused":
            self._forget_or_warn()
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
        self._results, self._agreed = None, compared

    def _switch_where_due(self) -> None:
        if self._switches:
            self._exchange.end_step()
        while self._switches and self._switches[0][0] <= self._exchange.steps_taken():
            self._switch(self._switches.pop(0)[1])

    # -- for elastic jobs: see `elastic.py`

    def _resize(self) -> None:
        self._ranks = self._rank_and_size()
        super()._resize()

    def _kept(self, into: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        return {
            **super()._kept(into),
            "spec": self._requested.config,
            "switches": list(self._switches),
        }

    def _go_back_to(self, state: Dict[str, Any]) -> None:
        if state["spec"] != self._requested.config:
            self._exchange.abandon()
            self._switch(state["spec"], compare=False)
        self._switches = list(state["switches"])
        self._exchange.go_back_to(state)
        self._results = self._spoilt = None
        self._takeover.due = False
        self._takeover.restore()

    def _sync(self) -> None:
        self._options_agreed = False
        # Its scale is one of those that all ranks must have alike.
        if self._grad_scaler is not None:
            self._grad_scaler.load_state_dict(
                gather(self._transport, "hvdc.elastic.scaler", self._grad_scaler.state_dict())[0]
            )
        spec, self._switches = gather(
            self._transport, "hvdc.elastic.spec", [self._requested.config, self._switches]
        )[0]
        # What was gathered has lists for tuples.
        if get_compressor(spec) != self._requested:
            self._exchange.abandon()
            self._switch(spec, compare=False)
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


def _is_sparse(grad: Optional[torch.Tensor]) -> bool:
    return grad is not None and grad.is_sparse


def _options(optimizer: torch.optim.Optimizer) -> Dict[str, Dict[str, Any]]:
    """The options of an optimizer's groups that are plain values: what all ranks must have
    alike."""
    groups = {}
    for i, group in enumerate(optimizer.param_groups):
        plain = {
            k: v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v
            for k, v in group.items()
        }
        groups[f"parameter group {i}"] = {
            k: v for k, v in plain.items() if isinstance(v, (bool, int, float, str))
        }
    return groups


_serving: "weakref.WeakSet[BoundCompression]" = weakref.WeakSet()
_not_used_yet: "weakref.WeakSet[BoundCompression]" = weakref.WeakSet()


@torch.compiler.disable
def _warn_of_unused(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Warns, after any optimizer's step, of the compressions that it should have used for its
    parameters."""
    used = horovod_internals.compression_of(optimizer)
    for compression in list(_not_used_yet) if used is not None and _not_used_yet else ():
        bound = {id(slot.param) for slot in compression._slots}
        if compression is not used and any(
            id(p) in bound for group in optimizer.param_groups for p in group["params"]
        ):
            _not_used_yet.discard(compression)
            warn_once(
                f"{compression!r} is not used: give it to hvd.DistributedOptimizer(compression=…), "
                f"which has {used!r}"
            )


register_optimizer_step_post_hook(_warn_of_unused)
