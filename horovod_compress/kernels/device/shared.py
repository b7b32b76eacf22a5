"""Kernels that tensors call together: what makes the calls of many tensors, and is called for one
alone by the name of the CPU's kernel."""

import collections
import functools
import inspect
import itertools
from typing import Any, Callable, Dict, Generic, Hashable, List, Optional, Sequence, TypeVar, Union

import torch

from .. import reference
from ..calls import DeviceCall
from .array import DeviceArray, stream_of

Result = TypeVar("Result")


class Kernel(Generic[Result]):
    """A kernel, called with one tensor's arguments: a decorator of the function that makes the
    calls of many tensors.

    Args:
        together: makes a list of calls, whose attributes are their arguments; what it returns for
            one may be a ValueError. It has the name of one of the reference's kernels.
        arguments: makes a call of its arguments; default: a named tuple of those of the reference's
            kernel.
        key: key(call) is alike for calls that `together` makes at once; default: it makes all.
    """

    def __init__(
        self,
        together: Callable[[List[Any]], Sequence[Union[Result, ValueError]]],
        arguments: Optional[Callable[..., Any]] = None,
        key: Optional[Callable[[Any], Hashable]] = None,
    ) -> None:
        self.together: Callable[..., Sequence[Union[Result, ValueError]]] = (
            functools.partial(in_groups, key=key, together=together) if key else together
        )
        self.__doc__ = together.__doc__
        self.arguments = arguments or arguments_of(together.__name__)

    def __call__(self, *arrays: Any, **options: Any) -> Result:
        (result,) = self.together([self.arguments(*arrays, **options)])
        if isinstance(result, ValueError):
            raise result
        return result


def arguments_of(name: str) -> Callable[..., Any]:
    """A class of named tuples of the arguments of the reference's kernel of that name."""
    parameters = list(inspect.signature(getattr(reference, name)).parameters.values())
    optional = itertools.dropwhile(lambda each: each.default is each.empty, parameters)
    # Behind the first that may be left out a named tuple has defaults for all.
    defaults = [None if each.default is each.empty else each.default for each in optional]
    return collections.namedtuple(name, [each.name for each in parameters], defaults=defaults)


def together(calls: Sequence[DeviceCall]) -> List[Any]:
    """Makes calls on the streams that are current; they wait there until their arrays can be used.
    What is returned for a call may be an exception."""

    def made(alike: List[DeviceCall]) -> Sequence[Any]:
        where = alike[0].where
        one, device = getattr(where.kernels, alike[0].name), where.tensor.device
        for stream in {call.stream for call in alike} - {None, stream_of(device)}:
            # ExternalStream(0) is a new stream; 0 is the number of the default one.
            other = (
                torch.cuda.ExternalStream(stream, device)
                if stream
                else torch.cuda.default_stream(device)
            )
            torch.cuda.current_stream(device).wait_stream(other)
        if isinstance(one, Kernel):
            return one.together([one.arguments(*call.arrays, **call.options) for call in alike])
        return [one(*call.arrays, **call.options) for call in alike]

    return in_groups(calls, lambda call: (call.name, call.where.tensor.device), made)


def in_groups(
    calls: Sequence[Any],
    key: Callable[[Any], Hashable],
    together: Callable[[List[Any]], Sequence[Any]],
) -> List[Any]:
    """What `together` returns for calls with the same key, in the order of the calls."""
    groups: Dict[Hashable, List[int]] = collections.defaultdict(list)
    for number, call in enumerate(calls):
        groups[key(call)].append(number)
    results: List[Any] = [None] * len(calls)
    for numbers in groups.values():
        for number, result in zip(numbers, together([calls[number] for number in numbers])):
            results[number] = result
    return results


def starts_of(counts: Sequence[int]) -> List[int]:
    """Where each of so many begins, one behind the other, and where the last ends."""
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
