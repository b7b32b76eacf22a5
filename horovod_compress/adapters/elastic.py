"""Compressions in elastic states, in every framework: nothing that ranks have not sent yet is lost.

What results are still to bring is the mean over ranks of what they have not sent. Ranks that stay
keep theirs and new ones get the mean of those, so the mean stays. Where ranks leave in good order,
all take the mean before; after a crash it is that of those that are left.
"""

import functools
from typing import Any, Callable, Iterable

from horovod.common.exceptions import HostsUpdatedInterrupt


class Entry:
    """A compression in an elastic state, with its copy from the last commit.

    value: a compression, see `HorovodBinding`, or an optimizer that has one and the same methods.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._saved = value._entry()

    def save(self) -> None:
        """Copies the state, into the memory of the last copy."""
        self._saved = self.value._entry(self._saved)

    def restore(self) -> None:
        """Goes back to the last copy. What is under way is rolled back, and not waited for."""
        self.value._go_back_to(self._saved)

    def sync(self) -> None:
        """All ranks go on from rank 0's step, as `checkpoint.synced` says."""
        self.value._sync()

    def even_out(self) -> None:
        """Gives all ranks the mean of what they keep, now and in their last copies, so that it does
        not matter who leaves."""
        self._saved = self.value._even_out(self._saved)


def evening_out(
    func: Callable[..., Any], entries_of: Callable[[Any], Iterable[Entry]]
) -> Callable[..., Any]:
    """func(state, …), after which, where hosts come or go in good order, all ranks have the mean of
    what they keep."""

    @functools.wraps(func)
    def evened(state: Any, *args: Any, **keywords: Any) -> Any:
        try:
            return func(state, *args, **keywords)
        except HostsUpdatedInterrupt:
            # Raised at the same call on all ranks, which are all still here.
            for entry in entries_of(state):
                entry.even_out()
            raise

    return evened
