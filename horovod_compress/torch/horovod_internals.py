"""All that relies on how Horovod 0.28 and PyTorch are written inside, and nowhere says so: who
calls, and with which gradients."""

from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

import horovod
import horovod.torch as hvd
import torch

from ..session.callers import callers, owners
from ..session.versions import check_version
from ..torch_common.search import objects_of, subclasses_of
from ..torch_common.takeover import momentum_buffer

check_version("horovod", horovod.__version__)

# What another version may not have comes after the warning.
from horovod.torch.elastic.state import StateHandler, TorchState  # noqa: E402

# Of the classes that hvd.DistributedOptimizer makes.
_OWN_METHOD = "_allreduce_grad_async"


def optimizer_of(compression: Any) -> Any:
    """The optimizer of Horovod's that hands its gradients to this compression. It is made after the
    compression and never introduces itself; but it is the method's owner that calls `compress`.
    RuntimeError where none is."""
    for owner in owners():
        if is_horovods(owner) and compression_of(owner) is compression:
            return owner
    raise RuntimeError(
        "gradients came, but no optimizer holds this compression: give it to one "
        "hvd.DistributedOptimizer. (A tensor of its own, as in hvd.allreduce(tensor, "
        "compression=…), belongs to no step of an optimizer, and what is not sent of it could "
        "never follow: hvd.Compression.fp16 serves there)"
    )


def parameter_under_way() -> Optional[torch.Tensor]:
    """The parameter whose gradient Horovod's optimizer is handing over, not in a group. None where
    there is none."""
    handing = (frame for frame in callers() if frame.f_code.co_name == _OWN_METHOD)
    return next((frame.f_locals.get("p") for frame in handing), None)


def holders_of(compression: Any) -> List[torch.optim.Optimizer]:
    """The optimizers of Horovod's that have this compression."""
    return [each for each in _all_of_horovods() if compression_of(each) is compression]


def _all_of_horovods() -> List[Any]:
    """Horovod's optimizers; of several objects that have the same attributes, one."""
    # Horovod makes a class for each, from one of its own that extends torch's.
    classes = [
        cls
        for cls in subclasses_of(torch.optim.Optimizer)
        if _OWN_METHOD in vars(cls) and torch.optim.Optimizer not in cls.__bases__
    ]
    found = filter(is_horovods, objects_of(*classes))
    return list({id(reduced_by(each)): each for each in found}.values())


def is_horovods(optimizer: Any) -> bool:
    """Returns whether hvd.DistributedOptimizer has made this: an object of a class with Horovod's
    methods, and not of one derived from that, as Lightning derives them for wrappers that have the
    same attributes."""
    return _OWN_METHOD in vars(type(optimizer))


def itself(optimizer: Any) -> Any:
    """Horovod's optimizer, where a wrapper around it is given."""
    reduced = reduced_by(optimizer)
    if is_horovods(optimizer) or reduced is None:
        return optimizer
    return next((each for each in _all_of_horovods() if reduced_by(each) is reduced), optimizer)


def reduced_by(optimizer: Any) -> Optional[Set[torch.Tensor]]:
    """The parameters that Horovod's optimizer reduces, frozen or not: those that were not when it
    was made. None for other optimizers."""
    return getattr(optimizer, "_requires_update", None)


def steps_unreduced(optimizer: Any, in_closure: bool) -> bool:
    """Returns whether gradients have come to Horovod's optimizer that it does not bring back before
    its step uses them. It brings all back at the step's beginning: not those of a closure, nor
    inside `with optimizer.skip_synchronize():`."""
    return bool((in_closure or not optimizer._should_synchronize) and optimizer._handles)


def synchronizes_again(optimizer: Any) -> bool:
    """Returns whether the step of Horovod's optimizer that begins reduces gradients, though
    `synchronize()` has done so before it."""
    return bool(optimizer._synchronized and optimizer._should_synchronize)


def holds_results(optimizer: Any) -> bool:
    """Returns whether gradients are results of `synchronize()` of Horovod's optimizer: no backward
    pass came since, and they are not zero, as those of a rank without data."""
    return (
        optimizer._synchronized
        and set(optimizer._allreduce_delay.values()) == {optimizer.backward_passes_per_step}
        and any(_is_not_zero(param.grad) for param in optimizer._requires_update)
    )


def _is_not_zero(grad: Optional[torch.Tensor]) -> bool:
    return grad is not None and bool(grad._nnz() if grad.is_sparse else grad.any())


def serve(optimizer: Any, compression: Any) -> None:
    """Horovod's optimizer hands its gradients to this compression from now on."""
    optimizer._compression = compression


def process_set_of(optimizer: Any) -> Any:
    """That of Horovod's optimizer; None for one for Adasum, which is refused."""
    return getattr(optimizer, "process_set", None)


def named_of(optimizer: Any) -> Optional[List[Tuple[str, torch.Tensor]]]:
    """Named parameters of Horovod's optimizer, in its order; None where it was given none.
    ValueError where it does not know one."""
    names = optimizer._parameter_names
    if any(param not in names for group in optimizer.param_groups for param in group["params"]):
        raise ValueError(
            "the optimizer has parameters that Horovod does not reduce, because add_param_group() "
            "came after hvd.DistributedOptimizer: call it before"
        )
    named = [(names[param], param) for group in optimizer.param_groups for param in group["params"]]
    unnamed = all(name.startswith("allreduce.noname.") for name, _ in named)
    return None if unnamed else named


def factor_of(optimizer: Any) -> float:
    """The factor of a 1 on each rank in the results of Horovod's optimizer. (One for Adasum, which
    is refused, has no op.)"""
    return float(optimizer.process_set.size()) if getattr(optimizer, "op", None) == hvd.Sum else 1.0


def compression_of(optimizer: Any) -> Any:
    """The compression that hvd.DistributedOptimizer was given; None for optimizers that are not
    Horovod's."""
    return getattr(optimizer, "_compression", None)


def let_broadcast_begin(optimizer: torch.optim.Optimizer) -> None:
    """Has hvd.broadcast_optimizer_state take this optimizer for one of Horovod's: where that has no
    state yet, it calls the step() of the class which the optimizer's extends, for the optimizer's
    own would wait for ranks that have one."""
    optimizer.__module__ = hvd.DistributedOptimizer.__module__


def handlers_of(state: TorchState) -> Iterable[StateHandler]:
    """The handlers of what an elastic state was given, in an order that is the same on all
    ranks."""
    return state._handlers.values()


@torch.no_grad()
def prepare_to_broadcast(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state that the optimizers of other ranks may have already.
    hvd.broadcast_optimizer_state hangs where some ranks have more of it than others, and gives an
    optimizer without any its state by a step that leaves parameters smaller by their weight
    decay."""
    reduced = reduced_by(optimizer) or ()
    with_group = [
        (param, group)
        for group in optimizer.param_groups
        for param in group["params"]
        if param.requires_grad or param in reduced
    ]
    if isinstance(optimizer, torch.optim.SGD):
        for param, group in with_group:
            if group["momentum"]:
                momentum_buffer(optimizer.state[param], param)
    elif not optimizer.state:
        params = [param for param, _ in with_group]
        before = [param.clone() for param in params]
        for param in params:
            param.grad = torch.zeros_like(param)
        # That of the optimizer which Horovod has extended.
        super(type(optimizer), optimizer).step()  # type: ignore[misc]
        for param, values in zip(params, before):
            param.copy_(values)


def reduce_zeros(optimizer: Any) -> None:
    """Takes part in a step of the other ranks with gradients of zero: as Horovod's hooks do in a
    backward pass and `synchronize()`. Hooks of users on gradients do not run. What this rank's
    backward passes have left, where no step followed, is dropped."""
    for p in optimizer._requires_update:
        if p.grad is None or p.grad.is_sparse:
            p.grad = torch.zeros_like(p)
        else:
            p.grad.zero_()
    optimizer._handles.clear()
    # A group with a frozen parameter never is complete: then each of its parameters goes alone.
    whole = [group for group in optimizer._group_counts if all(p.requires_grad for p in group)]
    for group in whole:
        optimizer._handles[group] = optimizer._grouped_allreduce_grad_async(group)
    optimizer.synchronize()
    optimizer._synchronized = False


def first_result(optimizer: Any) -> Optional[int]:
    """Handle of the first allreduce that step() will wait for; None if gradients are not submitted
    yet, which the others may wait for, and inside `with optimizer.skip_synchronize():`, where it
    waits for nothing."""
    handles = optimizer._handles
    # All of them are among those that it reduces.
    given = sum(len(params) if isinstance(params, tuple) else 1 for params in handles)
    first = next((handle for handle, _ in handles.values()), None)
    complete = given == len(optimizer._requires_update) and all(
        handle is not None for handle, _ in handles.values()
    )
    return first if optimizer._should_synchronize and complete and isinstance(first, int) else None


def results_after(optimizer: Any) -> Dict[int, int]:
    """{id of a parameter: the handle of what `synchronize()` waits for once that parameter has its
    result}. Sparse gradients have none."""
    entries = list(optimizer._handles.items())
    following = zip(entries, [handle for _, (handle, _) in entries[1:]])
    return {
        id(params[-1] if isinstance(params, tuple) else params): handle
        for (params, _), handle in following
        if isinstance(handle, int)
    }


def version_to_come(grad: Any) -> int:
    """The version of a dense gradient once Horovod has put the result there that it gets now."""
    return int(grad._version) + 1


def clear_gradients(optimizer: Any) -> None:
    """As zero_grad() of the optimizer that Horovod has extended; its own refuses in a step."""
    super(type(optimizer), optimizer).zero_grad(set_to_none=False)  # type: ignore[misc]


def rollback_step(optimizer: Any) -> None:
    """Makes Horovod's optimizer ready for the next backward pass, after a step whose collectives
    have all ended."""
    optimizer._handles.clear()
    optimizer._group_counts.update(dict.fromkeys(optimizer._group_counts, 0))
    optimizer.set_backward_passes_per_step(optimizer.backward_passes_per_step)
    optimizer._synchronized = False
    optimizer.zero_grad()
