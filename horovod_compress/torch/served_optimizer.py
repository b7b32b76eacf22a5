"""Horovod's optimizer that has a compression: found, followed and watched, and parameters that two
compressions share, or that none has."""

import weakref
from typing import Any, Iterable, List, Optional, Set

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..session.notices import warn_once
from ..session.step_lifecycle import CLOSURE, SYNCHRONIZE_FIRST, Event
from ..torch_common.optimizers import in_grad_scaler
from ..torch_common.parameters import Slot, is_sparse
from ..torch_common.steps import Steps
from ..torch_common.takeover import warn_of_changed
from . import horovod_internals
from .transport import TorchRanks, sleep_until_over

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


class ServedOptimizer:
    """The optimizer that a compression serves, or will.

    Args:
        compression: by which the optimizer is found.
        ranks: those that share it.
        arguments: as of `Steps`, from `spec` on.

    Attributes:
        steps: those of the optimizer.
        foreign: names of parameters that the optimizer does not reduce.
        sharing: those of other compressions whose optimizers have some of the same parameters.
    """

    advice_on_options = (
        "Where only some ranks have set or loaded it, call "
        "hvd.broadcast_optimizer_state(optimizer, root_rank=0) before training"
    )

    def __init__(self, compression: Any, ranks: TorchRanks, *arguments: Any) -> None:
        # Which is to be gone once users have let go of it.
        self._compression, self._ranks = weakref.ref(compression), ranks
        self.foreign: Set[str] = set()
        self.sharing: "weakref.WeakSet[ServedOptimizer]" = weakref.WeakSet()
        # The parameter whose result came last, which stands for all, and its version then; the
        # version of its gradient with that result.
        self._param: Optional[torch.Tensor] = None
        self._versions = 0, 0
        # Whether parameters changed after the last results, which no step has used.
        self._moved = False
        self.steps = Steps(self, ranks, *arguments)
        if ranks.active:
            _not_used_yet.add(compression)

    # -- which it is

    def reduced(self, steps: Steps) -> List[Slot]:
        """The parameters that Horovod reduces, frozen or not: its optimizer decides that when it is
        made. Before that optimizer exists, all that are not frozen; so too of those that it does
        not have."""
        optimizer: Any = steps.optimizer or steps.bound_optimizer
        decided = horovod_internals.reduced_by(optimizer)
        groups = [] if decided is None else optimizer.param_groups
        its = {id(p): p in (decided or ()) for group in groups for p in group["params"]}
        return [slot for slot in steps.slots if its.get(id(slot.param), slot.param.requires_grad)]

    def factor(self) -> Optional[float]:
        optimizer = self.steps.optimizer
        return None if optimizer is None else horovod_internals.factor_of(optimizer)

    def look_for_optimizer(self) -> None:
        """Begins to serve the optimizer that has this compression, before that brings a gradient:
        it knows which parameters gradients will be of."""
        if self._ranks.active and self.steps.optimizer is None:
            holders = horovod_internals.holders_of(self._compression())
            if len(holders) == 1:
                self.begin(holders[0])

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins to serve Horovod's optimizer, where that has not happened yet. ValueError where
        that reduces over another process set, and where a parameter was thawed since the
        compression was made, whose layer it would have had to see."""
        steps = self.steps
        if steps.optimizer is not None:
            return
        self._ranks.check_process_set(horovod_internals.process_set_of(optimizer))
        if not self._ranks.active:
            return
        steps.optimizer = optimizer
        try:
            if {slot.name for slot in self.reduced(steps)} != steps.session.choice.tensors.keys():
                self._follow_horovods_choice()
        except BaseException:
            steps.optimizer = None
            raise
        reduced = horovod_internals.reduced_by(optimizer) or set()
        self.foreign = {slot.name for slot in steps.slots if slot.param not in reduced}
        for other in list(_serving):
            if reduced & (horovod_internals.reduced_by(other.steps.optimizer) or set()):
                self.sharing.add(other)
                other.sharing.add(self)
        _serving.add(self)
        _not_used_yet.discard(self._compression())
        steps.register(optimizer, self)

    def _follow_horovods_choice(self) -> None:
        """Parameters were frozen or thawed between this compression and Horovod's optimizer. What
        was kept of the others goes on."""
        steps, session = self.steps, self.steps.session
        known, choice = session.choice.tensors, session.choose(session.choice.requested)
        watched = choice.held.moments.watched if choice.held.moments is not None else {}
        unseen = [
            slot.name
            for slot in self.reduced(steps)
            if slot.name not in known and id(slot.param) in watched
        ]
        if unseen:
            raise ValueError(
                f"{unseen[0]} was thawed after this compression was made, which has to see what "
                "its layer does: make it later, or give it neither optimizer nor parameters"
            )
        if session.is_begun:
            for name, arrays in session.exchange.arrays().items():
                if name not in choice.tensors and any(array.any() for array in arrays.values()):
                    warn_once(
                        f"Horovod does not reduce {name}, which was frozen when "
                        "hvd.DistributedOptimizer was made: what was kept of it is gone"
                    )
            session.exchange.switch(choice.compressor, choice.tensors, {})
        # Nothing was taken over from a parameter that has come or gone.
        steps.takeover = choice.held.takeover
        session.use(choice._replace(held=choice.held._replace(moments=steps.moments)))
        session.agreed = False

    def why_shared(self, slot: Slot) -> Optional[str]:
        """Why a gradient that has come of this parameter cannot be used, because another
        compression has it, which encodes it in place. None where it can."""
        for steps in (other.steps for other in list(self.sharing)):
            session = steps.session
            under_way = session.exchange.open_tensors() if session.is_begun else ()
            if any(each.param is slot.param and each.name in under_way for each in steps.slots):
                return _SHARED.format(name=slot.name)
        return None

    # -- around its steps

    def before_step(self, optimizer: Any) -> None:
        """As of `Host`. Comes again before the step of the optimizer which Horovod's extends."""
        session = self.steps.session
        lifecycle = session.lifecycle
        if in_grad_scaler():
            lifecycle.expect(Event.SCALED_STEP)
        if lifecycle.is_unused and horovod_internals.synchronizes_again(optimizer):
            self.refuse_brought()
            # The step uses what comes within it.
            self.steps.leave_unused()
        under_way = session.is_begun and session.exchange.under_way
        first = horovod_internals.first_result(optimizer) if under_way else None
        if first is not None:
            sleep_until_over(first)

    def before_use(self, optimizer: Any, in_closure: bool) -> None:
        """As of `Host`. Warns of parameters that nobody reduces, and where gradients that hold a
        momentum were changed."""
        if horovod_internals.steps_unreduced(optimizer, in_closure):
            self._refuse_unreduced(optimizer, in_closure)
        if not self.steps.session.lifecycle.is_unused:
            return
        _warn_of_unreduced(optimizer, self.steps.slots)
        self._moved = False
        if self._param is None or not self.steps.takeover.covers(self._param):
            return
        grad = self._param.grad
        if grad is not None and not is_sparse(grad) and grad._version != self._versions[1]:
            warn_of_changed(str(self.steps.session.compressor.id), "optimizer.synchronize()")

    def _refuse_unreduced(self, optimizer: Any, in_closure: bool) -> None:
        """Raises RuntimeError. Brings what is under way to its end before, for other ranks wait."""
        why = f"a step came before its results: {SYNCHRONIZE_FIRST}"
        if in_closure:
            why = CLOSURE.format(what="the step uses them before Horovod has reduced them")
        lifecycle = self.steps.session.lifecycle
        self.steps.leave_unused()
        lifecycle.fail(why)
        optimizer.synchronize()
        # Only sparse gradients were under way, which Horovod reduces by itself.
        raise lifecycle.failure() or RuntimeError(why)

    def refuse_brought(self) -> None:
        """RuntimeError where results would be exchanged as if they were other gradients."""
        session = self.steps.session
        if (
            session.lifecycle.is_unused
            and session.exchange.tensors.keep_state
            and horovod_internals.holds_results(self.steps.optimizer)
        ):
            raise RuntimeError(
                "optimizer.synchronize() has brought these gradients, and would be called once "
                "more, which would count them twice: call it once after backward(), and step "
                "inside `with optimizer.skip_synchronize():`"
            )

    def results_came(self, param: torch.Tensor) -> None:
        """Comes with the last result of a step, which is of this parameter."""
        version = horovod_internals.version_to_come(param.grad)
        self._param, self._versions = param, (param._version, version)

    def before_unused(self) -> None:
        """As of `Host`. Warns where results moved parameters without a step; not at once, for SAM
        does so."""
        if not self.steps.session.discardable:
            return
        moved = self._param is not None and self._param._version != self._versions[0]
        if moved and self._moved:
            warn_once(
                "two steps in turn were exchanged without an optimizer.step(), and are forgotten, "
                "because discardable=True; but parameters changed after them. Where you update "
                "parameters from p.grad yourself, what was not sent of gradients is lost: leave "
                "discardable out"
            )
        self._moved = moved


def _warn_of_unreduced(optimizer: torch.optim.Optimizer, slots: Iterable[Slot]) -> None:
    """Warns where an optimizer changes parameters that Horovod does not reduce.

    Args:
        optimizer: Horovod's.
        slots: the parameters that have a name.
    """
    reduced = horovod_internals.reduced_by(optimizer) or ()
    params = (param for group in optimizer.param_groups for param in group["params"])
    found = [param for param in params if param.grad is not None and param not in reduced]
    if found:
        known = {id(slot.param): slot.name for slot in slots}
        names = [known.get(id(p), f"one of shape {tuple(p.shape)}") for p in found[:3]]
        names += ["…"] * (len(found) > 3)
        warn_once(_UNREDUCED.format(number=len(found), names=", ".join(names)))


# Of the compressions that an optimizer of Horovod's is known to have.
_serving: "weakref.WeakSet[ServedOptimizer]" = weakref.WeakSet()
# Compressions that none has yet.
_not_used_yet: "weakref.WeakSet[Any]" = weakref.WeakSet()


@torch.compiler.disable
def _warn_of_unused(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Warns, after any optimizer's step, of the compressions that it should have used for its
    parameters."""
    used = horovod_internals.compression_of(optimizer)
    for compression in list(_not_used_yet) if used is not None and _not_used_yet else ():
        bound = {id(slot.param) for slot in compression._steps.slots}
        if compression is not used and any(
            id(p) in bound for group in optimizer.param_groups for p in group["params"]
        ):
            _not_used_yet.discard(compression)
            warn_once(
                f"{compression!r} is not used: give it to hvd.DistributedOptimizer(compression=…), "
                f"which has {used!r}"
            )


register_optimizer_step_post_hook(_warn_of_unused)
