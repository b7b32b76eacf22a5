"""Results of kernels on a device, which their caller does not wait for."""

from typing import Any, Callable, List, Optional, Sequence


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
