"""The ranks of a compression, whoever started them."""

import os
from abc import ABC, abstractmethod
from typing import Any, List, Optional, Tuple

from ..compressors.base import Compressor
from ..engine.wrappers import machine_for
from ..protocol.handshake import gather
from ..protocol.machine import Machine, Placement
from .notices import warn_once


class Ranks(ABC):
    """The ranks of one compression: who they are, where, and what moves its payloads.

    Attributes:
        active: True where there is more than one, or may be. Else nothing is exchanged.
        elastic: True where ranks may come and go.
        synced: in such jobs, True where an elastic state has the compression.
        refused_alone: why one rank cannot load what several had to send.
        transport: that of the compression in force, which comparisons and states use too.
        machine: the ranks of this rank's machine, where that compression has use for them.
        gathers_on_device: True where payloads of a device are gathered there.
        known: (rank, size) since the last time that ranks met, where they may come and go.
    """

    elastic = False
    synced = True
    gathers_on_device = False
    refused_alone: str
    transport: Any
    known: Tuple[int, int]

    def __init__(self, active: bool) -> None:
        self.active = active
        self.machine: Optional[Machine] = None

    @property
    def included(self) -> bool:
        """True where this rank is one of them."""
        return True

    @abstractmethod
    def rank_and_size(self) -> Tuple[int, int]:
        """This rank and the number of ranks; a rank that compresses nothing counts as the only
        one."""

    @abstractmethod
    def transport_of(self, compressor: Compressor) -> Any:
        """The transport that moves a compressor's payloads. ValueError where there is none."""

    @abstractmethod
    def placement(self) -> Placement:
        """Where the ranks are, of which there are more than one, or may be."""

    def label(self) -> str:
        """The beginning of the names of collectives. All ranks ask for it together."""
        return "hvdc"

    def gathered(self, name: str, value: Any) -> List[Any]:
        """A JSON-able value of each rank that must decide as the others do."""
        return gather(self.transport, f"{self.label()}.{name}", value)

    def machine_of(self, compressor: Compressor) -> Optional[Machine]:
        """The ranks of this rank's machine, where features around a compressor have use for them.
        ValueError where those cannot have them."""
        if not self.active:
            return None
        machine = machine_for(compressor, self.placement(), warn_once)
        # The one in force is kept: it has shared memory.
        return machine and (self.machine or machine)

    def refuse_unsynced(self, state: str) -> None:
        """RuntimeError where the compression was not given to an elastic state. state: the call
        that does it, for the message."""
        if not self.synced:
            raise RuntimeError(
                f"in an elastic job new ranks get what the others keep from the elastic state: "
                f"give it the compression, as in {state}, and train in "
                "a function under @hvdc.elastic.run, and nowhere before it"
            )


def is_elastic() -> bool:
    """Returns whether ranks may come and go in this job, as horovodrun tells its ranks."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"
