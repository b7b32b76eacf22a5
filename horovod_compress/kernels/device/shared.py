"""How kernels on a device get the arguments of many tensors."""

import collections
import functools
import inspect
import itertools
from typing import Any, Callable, Hashable, List, Optional, Sequence

from .. import reference
from ..lists import by_tensor, in_groups
from .array import DeviceArray


def kernel(
    launched: Callable[[List[Any]], Sequence[Any]],
    arguments: Optional[Callable[..., Any]] = None,
    key: Callable[[Any], Hashable] = lambda call: None,
) -> Callable[..., Sequence[Any]]:
    """Makes a kernel of a function that works on many tensors at once.

    Args:
        launched: takes a list of calls, whose attributes are the arguments for one tensor, and
            returns a list of results, which may be late. It has the name of one of the reference's
            kernels.
        arguments: makes a call of its arguments; default: a named tuple of those of the reference's
            kernel.
        key: key(call) is alike for calls that `launched` takes at once; default: it takes all.

    Returns:
        A function of lists, as the reference's kernel is.
    """
    call_of = arguments or _arguments_of(launched.__name__)

    @functools.wraps(launched)
    def call(*arrays: Any, **options: Any) -> Sequence[Any]:
        calls = [call_of(*its, **own) for its, own in by_tensor(arrays, options)]
        return in_groups(calls, key, launched)

    return call


def _arguments_of(name: str) -> Callable[..., Any]:
    """A class of named tuples of the arguments of the reference's kernel of that name."""
    parameters = list(inspect.signature(getattr(reference, name)).parameters.values())
    optional = itertools.dropwhile(lambda each: each.default is each.empty, parameters)
    # Behind the first that may be left out a named tuple has defaults for all.
    defaults = [None if each.default is each.empty else each.default for each in optional]
    return collections.namedtuple(name, [each.name for each in parameters], defaults=defaults)


def starts_of(counts: Sequence[int]) -> List[int]:
    """The offsets of parts of these lengths, laid end to end, and then the total."""
    return [0, *itertools.accumulate(counts)]


def same_length(**arrays: Any) -> None:
    """ValueError where arrays differ in length; None is no array."""
    sizes = {name: array.size for name, array in arrays.items() if array is not None}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{', '.join(sizes)} must have the same length, not {list(sizes.values())}"
        )


def within_limits(array: DeviceArray) -> None:
    """ValueError for more elements than indices on a device reach."""
    if array.size >= 2**31:
        raise ValueError("a tensor on a device has at most 2^31 - 1 elements")
