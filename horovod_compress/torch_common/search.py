"""Objects of the process that nobody hands over, such as the optimizer that has a compression."""

import gc
import sys
from typing import Any, Iterator, List, Set, Type

import torch

from ..session.callers import callers
from .optimizers import is_made_by_torch


def objects_of(*kinds: Type[Any]) -> List[Any]:
    """All objects of some classes, or of those that are derived from them. It takes 0.1 s or so,
    and after gc.freeze(), which hides objects from the collector, some times as long; nothing where
    there are no classes."""
    if not kinds:
        return []
    objects = list(_reachable()) if gc.get_freeze_count() else gc.get_objects()
    # isinstance() would ask objects for their class, which some make up.
    # By id, because some classes cannot be hashed.
    classes = {id(cls): cls for cls in map(type, objects)}
    wanted = {number for number, cls in classes.items() if issubclass(cls, kinds)}
    found = [each for each in objects if id(type(each)) in wanted]
    # In Python 3.13 this frame outlives the call where it has seen itself.
    objects.clear()
    return found


def subclasses_of(cls: Type[Any]) -> Iterator[Type[Any]]:
    """All classes that are derived from a class."""
    for each in cls.__subclasses__():
        yield each
        yield from subclasses_of(each)


def optimizers_of(module: torch.nn.Module) -> List[Any]:
    """The optimizers of a model's parameters, without wrappers, which have the same groups."""
    found = {
        id(optimizer.param_groups): optimizer
        for optimizer in objects_of(torch.optim.Optimizer)
        if is_made_by_torch(optimizer) and has_parameter_of(optimizer, module)
    }
    return list(found.values())


def has_others(module: torch.nn.Module, own: Any) -> bool:
    """Looks whether another optimizer than the given one has parameters of a model. It takes
    long."""
    return own is not None and optimizers_of(module) not in ([], [own])


def has_parameter_of(optimizer: Any, module: torch.nn.Module) -> bool:
    """Returns whether an optimizer has a parameter of a model."""
    own = {id(param) for param in module.parameters()}
    return any(id(param) in own for group in optimizer.param_groups for param in group["params"])


def _reachable() -> Iterator[Any]:
    """All objects that the collector cares for and modules or functions that are running reach."""
    seen: Set[int] = set()
    found = [*sys.modules.values(), *_variables()]
    while found:
        new = {id(each): each for each in filter(gc.is_tracked, found)}
        for known in new.keys() & seen:
            del new[known]
        seen.update(new)
        yield from new.values()
        found = gc.get_referents(*new.values())


def _variables() -> Iterator[Any]:
    """The variables of all functions that run, in any thread."""
    for frame in list(sys._current_frames().values()):
        for each in callers(frame):
            yield each.f_globals
            yield from list(each.f_locals.values())
    # A frame that one of its own variables holds outlives the call.
    del frame, each
