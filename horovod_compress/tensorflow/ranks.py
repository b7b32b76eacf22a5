"""Horovod's ranks in TensorFlow."""

from typing import Any

import horovod.tensorflow as hvd

from ..session.process_sets import HorovodRanks
from ..transport.loopback import Loopback
from .eager_transport import Eager


class TensorFlowRanks(HorovodRanks):
    """The ranks of a process set of horovod.tensorflow. Payloads are moved by operations of
    graphs; the transport is for what ranks compare outside of those."""

    def __init__(self, process_set: Any) -> None:
        super().__init__(hvd, process_set, "variables need not be named in TensorFlow, and ")

    def transport_of(self, compressor: Any) -> Any:
        return Eager(self.process_set) if self.active else Loopback.group(1)[0]
