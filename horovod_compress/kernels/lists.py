"""The grammar of all kernels that steps call: lists in, and a list out, which is late where a
device is still at work."""

import collections
from typing import Any, Callable, Dict, Hashable, Iterator, List, Mapping, Optional, Sequence, Tuple


class Late(Sequence[Any]):
    """Results that are on their way from a device. Whoever reads them waits.

    finish: waits, and returns the results, or others that are late.

    Attributes:
        there: what stands for the results on the device: of payloads a frame, for transports that
            gather there; of whether tensors are finite a number of each, -0 or NaN. None where they
            have to come to the CPU.
    """

    there: Any = None

    def __init__(self, finish: Callable[[], Sequence[Any]]) -> None:
        self._finish: Optional[Callable[[], Sequence[Any]]] = finish
        self._next: Sequence[Any] = ()

    def take(self) -> Sequence[Any]:
        """Waits once: returns the results, or others that are late."""
        if self._finish is not None:
            # What has failed fails again.
            self._next = self._finish()
            self._finish = None
        return self._next

    def _results(self) -> Sequence[Any]:
        found = self.take()
        while isinstance(found, Late):
            found = found.take()
        return found

    def __len__(self) -> int:
        return len(self._results())

    def __getitem__(self, number: Any) -> Any:
        return self._results()[number]

    def __iter__(self) -> Any:
        return iter(self._results())


def then(results: Sequence[Any], use: Callable[[Sequence[Any]], List[Any]]) -> Any:
    """Returns the list that `use` makes of results: now, or once late ones are there."""
    if not isinstance(results, Late):
        return use(results)
    used = Late(lambda: then(results.take(), use))
    used.there = results.there
    return used


def by_tensor(
    arrays: Sequence[Any], options: Mapping[str, Any]
) -> Iterator[Tuple[Sequence[Any], Dict[str, Any]]]:
    """Takes the arguments of a function of lists apart.

    Args:
        arrays: lists with one for each tensor; None is no array for any of them.
        options: of those a list has a value for each tensor; anything else counts for all.

    Yields:
        The arrays and options of each tensor.

    Raises:
        TypeError: something in place of a list of arrays.
        ValueError: lists of different lengths.
    """
    if not all(each is None or isinstance(each, list) for each in arrays):
        raise TypeError("arrays come in lists, one for each tensor")
    tensors, count = len(arrays[0]), len(arrays)
    columns = [
        each if isinstance(each, list) else [each] * tensors
        for each in (*arrays, *options.values())
    ]
    if any(len(each) != tensors for each in columns):
        raise ValueError("lists must have a value for each tensor")
    for row in zip(*columns):
        yield row[:count], dict(zip(options, row[count:]))


def in_groups(
    calls: Sequence[Any],
    key: Callable[[Any], Hashable],
    launched: Callable[[List[Any]], Sequence[Any]],
) -> Sequence[Any]:
    """The results of `launched` for calls with the same key, in the order of the calls."""
    groups: Dict[Hashable, List[int]] = collections.defaultdict(list)
    for number, call in enumerate(calls):
        groups[key(call)].append(number)
    if len(groups) == 1:
        return launched(list(calls))
    found = [launched([calls[number] for number in numbers]) for numbers in groups.values()]

    def in_order() -> List[Any]:
        results: List[Any] = [None] * len(calls)
        for numbers, its in zip(groups.values(), found):
            for number, result in zip(numbers, its):
                results[number] = result
        return results

    return Late(in_order) if any(isinstance(its, Late) for its in found) else in_order()
