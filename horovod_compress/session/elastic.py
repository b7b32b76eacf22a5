"""Compressions in elastic states, in every framework: nothing that ranks have not sent yet is lost.

What results are still to bring is the mean over ranks of what they have not sent. Ranks that stay
keep theirs and new ones get the mean of those, so the mean stays. Where ranks leave in good order,
all take the mean before; after a crash it is that of those that are left.
"""

import functools
from typing import Any, Callable, Dict, Iterable, Optional

from horovod.common.exceptions import HostsUpdatedInterrupt

from ..compressors import get_compressor
from ..engine import checkpoint
from ..protocol.handshake import gather
from .session import Session
from .step_lifecycle import Event


class Kept:
    """The state that a session's ranks keep where others come and go."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def entry(self, into: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
        """The state that this rank keeps; into: as for `Driver.state_dict`."""
        return {**self._session.exchange.state_dict(into=into), **self._settings()}

    def _settings(self) -> Dict[str, Any]:
        """The settings that are alike on all ranks, and may have changed since the start:
        JSON-able."""
        session = self._session
        return {
            "spec": session.choice.requested.config,
            "switches": list(session.switches),
            **session.port.kept(),
        }

    def _adopt(self, settings: Dict[str, Any]) -> None:
        """Goes on with `_settings` of another rank, or of before."""
        session, compressor = self._session, get_compressor(settings["spec"])
        if compressor != session.choice.requested:
            session.exchange.rollback()
            session.switch(compressor, compare=False)
        with session.port.changing():
            session.port.take(settings)
        session.switches = list(settings["switches"])

    def go_back_to(self, state: Dict[str, Any]) -> None:
        """Continues from what `entry` returned, as if nothing had been since."""
        session = self._session
        self._adopt(state)
        with session.port.changing():
            session.exchange.go_back_to(state)
        session.lifecycle.take(Event.ROLLBACK)

    def sync(self) -> None:
        """All ranks, those that stay and those that have just begun, go on from rank 0's step,
        under its names of collectives, which traced functions hold."""
        session, ranks = self._session, self._session.ranks
        # First, because ranks that have just begun name collectives where they switch.
        ranks.agree_on_number()  # type: ignore[attr-defined]
        self._adopt(gather(ranks.transport, "hvdc.elastic.spec", self._settings())[0])
        ranks.synced, session.agreed = True, False
        session.exchange.rollback()
        session.resize()
        session.handshake()
        self.go_back_to(checkpoint.synced(self.entry(), ranks.transport, ranks.label()))

    def even_out(self, saved: Dict[str, Any]) -> Dict[str, Any]:
        """All ranks, of which some are about to leave, go on with the mean of what they keep.
        saved: what this rank kept before; returns the mean of that."""
        ranks = self._session.ranks
        self._session.exchange.rollback()
        self.go_back_to(checkpoint.synced(self.entry(), ranks.transport, ranks.label(), even=True))
        return checkpoint.synced(saved, ranks.transport, ranks.label(), even=True)


class Entry:
    """A compression in an elastic state, with its copy from the last commit.

    kept: of a compression, or of an optimizer that has one, with the methods of `Kept`.
    """

    def __init__(self, kept: Any) -> None:
        self._kept = kept
        self._saved = kept.entry()

    def save(self) -> None:
        """Copies the state, into the memory of the last copy."""
        self._saved = self._kept.entry(self._saved)

    def restore(self) -> None:
        """Goes back to the last copy. What is under way is rolled back, and not waited for."""
        self._kept.go_back_to(self._saved)

    def sync(self) -> None:
        """All ranks go on from rank 0's step, as `checkpoint.synced` says."""
        self._kept.sync()

    def even_out(self) -> None:
        """Gives all ranks the mean of what they keep, now and in their last copies, so that it does
        not matter who leaves."""
        self._saved = self._kept.even_out(self._saved)


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
