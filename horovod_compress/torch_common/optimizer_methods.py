"""Methods of an optimizer that may change parameters outside of its step, such as train() and
eval() of schedule-free optimizers: each call is told of, so that ranks can be kept alike."""

import contextlib
import functools
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Sequence, Set

import torch

from ..session.updates import methods_of

# Elements of a tensor that are looked at.
_PROBED = 64
Around = ContextManager[None]


def watch(optimizer: torch.optim.Optimizer, around: Callable[[str], Around]) -> Set[str]:
    """Has the methods that others than PyTorch have given this optimizer run within `around(name)`,
    whoever calls them. Where one returns a context manager, entering and leaving that do, too.
    Returns their names."""
    names = methods_of(type(optimizer), dir(torch.optim.Optimizer), ("torch",))
    for name in names:
        setattr(optimizer, name, _within(getattr(optimizer, name), functools.partial(around, name)))
    return names


def _within(method: Callable[..., Any], around: Callable[[], Around]) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        with around():
            result = method(*args, **keywords)
        managing = isinstance(result, contextlib.AbstractContextManager)
        return _managed(result, around) if managing else result

    return call


@contextlib.contextmanager
def _managed(manager: ContextManager[Any], around: Callable[[], Around]) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        with around():
            entered = manager.__enter__()

        def leave(*error: Any) -> Any:
            with around():
                return manager.__exit__(*error)

        stack.push(leave)
        yield entered


class Probe:
    """Tells whether tensors were changed in between, in little time: by PyTorch's own count of
    changes, which does not see those through `tensor.data`, and some of the elements."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._versions = [each._version for each in tensors]
        some: Dict[torch.device, List[torch.Tensor]] = {}
        for each in tensors:
            some.setdefault(each.device, []).append(_some_of(each.detach()))
        self._some = {device: torch.cat(those) for device, those in some.items()}

    def differs(self, other: "Probe") -> bool:
        """Returns whether the same tensors, probed at another time, were changed in between."""
        if self._versions != other._versions or self._some.keys() != other._some.keys():
            return True
        return any(not torch.equal(its, other._some[device]) for device, its in self._some.items())


def _some_of(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes, of which those of a NaN are equal."""
    step = max(1, tensor.numel() // _PROBED)
    size = (tensor.numel() + step - 1) // step
    return torch.as_strided(tensor, (size,), (step,)).contiguous().view(torch.uint8)
