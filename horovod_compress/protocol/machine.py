"""The ranks of each machine."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from .handshake import AnyTransport


class Placement(NamedTuple):
    """Where a launcher has put the ranks of a job.

    Args:
        rank: this rank.
        machine: the number of its machine.
        local, size: as of `Machine`, for this rank.
        even: whether every machine has as many ranks.
        refused: why the ranks that compress cannot share a machine's memory; None if they can.
    """

    rank: int
    machine: int
    local: int
    size: int
    even: bool
    refused: Optional[str] = None


class Machine:
    """The ranks of this rank's machine.

    local: which of them this is; size: how many they are, as many on every machine; places: the
    `local` of all ranks, by rank, once that is known; together: what the ranks of this machine
    share, by name, where they are in one process; held: what features hold on this rank, by name;
    due: what they have to arrange with all ranks before the next step.
    """

    def __init__(
        self,
        local: int,
        size: int,
        places: Sequence[int] = (),
        together: Optional[Dict[str, Any]] = None,
    ) -> None:
        self.local, self.size = local, size
        self.places, self.together = places, together
        self.held: Dict[str, Any] = {}
        self.due: List[Callable[[AnyTransport, str, int], None]] = []

    @classmethod
    def group(cls, ranks: int, size: int) -> List["Machine"]:
        """Those of `ranks` ranks in one process, of which every `size` that follow each other are
        on one. ValueError where that does not come out even."""
        _refuse_uneven(ranks, size)
        shared: List[Dict[str, Any]] = [{} for _ in range(ranks // size)]
        places = [rank % size for rank in range(ranks)]
        return [cls(places[rank], size, places, shared[rank // size]) for rank in range(ranks)]

    @classmethod
    def alone(cls, ranks: int, size: int) -> "Machine":
        """That of the first of `ranks` ranks, to measure what one does without the others: all
        places are taken for its own. ValueError where ranks do not come out even."""
        _refuse_uneven(ranks, size)
        return cls(0, size, [0] * ranks, {})

    def arrange(self, transport: AnyTransport, label: str, number: int) -> None:
        """Does what is due. All ranks call it alike; number: the machine that this rank says to be
        on."""
        for each in self.due:
            each(transport, label, number)
        self.due.clear()


def _refuse_uneven(ranks: int, size: int) -> None:
    if size < 1 or ranks % size:
        raise ValueError(f"{ranks} ranks are not hosts of {size}")
