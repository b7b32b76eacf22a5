"""The features around algorithms, the innermost first. Each is deleted with its file and its line
in KINDS."""

from typing import Any, Callable, Optional, Tuple, Type

from ..compressors.base import Compressor
from ..compressors.wrapper import Wrapper
from ..protocol.machine import Machine, Placement
from . import hosts, split

KINDS: Tuple[Type[Wrapper], ...] = (
    split.Splitting,
    hosts.HostParts,
)


def wrapped(
    compressor: Compressor, shape: Tuple[int, ...], machine: Optional[Machine]
) -> Compressor:
    """The compressor of a tensor, with the features around it that its options say."""
    for kind in KINDS:
        compressor = kind.around(compressor, shape, machine)
    return compressor


def machine_for(
    compressor: Compressor, placement: Placement, tell: Callable[[str], Any]
) -> Optional[Machine]:
    """The ranks of this rank's machine, where features around a compressor have use for them; the
    arguments are those of `Wrapper.needs_machine`."""
    needed = [kind.needs_machine(compressor, placement, tell) for kind in KINDS]
    return Machine(placement.local, placement.size) if any(needed) else None
