"""Parameters that two compressions share, or that none has: errors and warnings for users."""

import weakref
from typing import Any, Iterable, Optional

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..session.notices import warn_once
from ..torch_common.parameters import Slot
from . import horovod_internals

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
# Of the compressions that an optimizer of Horovod's is known to have.
_serving: "weakref.WeakSet[Any]" = weakref.WeakSet()
# Compressions that none has yet.
not_used_yet: "weakref.WeakSet[Any]" = weakref.WeakSet()


def note_serving(compression: Any, serving: Any) -> None:
    """Notes that an optimizer of Horovod's has this compression, and finds the others whose
    optimizers reduce some of the same parameters. serving: the compression's `ServedOptimizer`."""
    not_used_yet.discard(compression)
    mine = horovod_internals.reduced_by(serving.steps.optimizer) or set()
    for other in list(_serving):
        if mine & (horovod_internals.reduced_by(other.steps.optimizer) or set()):
            serving.sharing.add(other)
            other.sharing.add(serving)
    _serving.add(serving)


def why_shared(serving: Any, slot: Slot) -> Optional[str]:
    """Looks whether another compression has a gradient, which it encodes in place.

    Args:
        serving: of the compression that the gradient has come to.
        slot: of its parameter.

    Returns:
        Why the gradient cannot be used, or None where it can.
    """
    for steps in (other.steps for other in list(serving.sharing)):
        session = steps.session
        under_way = session.exchange.open_tensors() if session.is_begun else ()
        if any(each.param is slot.param and each.name in under_way for each in steps.slots):
            return _SHARED.format(name=slot.name)
    return None


def warn_of_unreduced(optimizer: torch.optim.Optimizer, slots: Iterable[Slot]) -> None:
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


@torch.compiler.disable
def _warn_of_unused(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Warns, after any optimizer's step, of the compressions that it should have used for its
    parameters."""
    used = horovod_internals.compression_of(optimizer)
    for compression in list(not_used_yet) if used is not None and not_used_yet else ():
        bound = {id(slot.param) for slot in compression._steps.slots}
        if compression is not used and any(
            id(p) in bound for group in optimizer.param_groups for p in group["params"]
        ):
            not_used_yet.discard(compression)
            warn_once(
                f"{compression!r} is not used: give it to hvd.DistributedOptimizer(compression=…), "
                f"which has {used!r}"
            )


register_optimizer_step_post_hook(_warn_of_unused)
