"""The features around algorithms. Each is deleted with its file and what is here of it."""

from typing import Any, Callable, Optional, Tuple

from ..compressors.base import Compressor
from ..protocol.machine import Machine, Placement
from . import hosts, split


def wrapped(
    compressor: Compressor, shape: Tuple[int, ...], machine: Optional[Machine]
) -> Compressor:
    """The compressor of a tensor, with the features around it that its options say.

    Args:
        compressor: of the whole tensor.
        shape: the tensor's.
        machine: the ranks of this rank's, where that is known.
    """
    return hosts.around(split.around(compressor), shape, machine)


def machine_for(
    compressor: Compressor, placement: Placement, tell: Callable[[str], Any]
) -> Optional[Machine]:
    """The ranks of this rank's machine, where features around a compressor have use for them; the
    arguments are those of `hosts.needs_machine`."""
    needed = hosts.needs_machine(compressor, placement, tell)
    return Machine(placement.local, placement.size) if needed else None
