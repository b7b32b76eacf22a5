"""The choice of how tensors are compressed: what a spec comes to with an optimizer, and what ranks
compare of it."""

from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from .. import kernels
from ..compressors import get_compressor, package_of
from ..compressors.base import Compressor
from ..compressors.learning_rate import decide_follow_lr
from ..protocol import wire
from ..protocol.machine import Machine
from ..version import __version__
from .cautions import cautions
from .notices import warn_once


class Choice(NamedTuple):
    """How tensors are compressed.

    Attributes:
        requested: as the spec says.
        compressor: with the momentum that it applies.
        tensors: {name: (shape, compressor)} of those that are known.
        alike: what ranks must have alike beside the compressor: nested JSON-able values.
        held: the port's own objects that serve this choice.
        links: attributes of the driver that depend on it.
        transport: what moves payloads.
        machine: the ranks of this rank's machine, where they are of use.
        elastic: True where ranks may come and go.
    """

    requested: Compressor
    compressor: Compressor
    tensors: Dict[str, Tuple[tuple, Compressor]]
    alike: Mapping[str, Any] = {}
    held: Any = None
    links: Mapping[str, Any] = {}
    transport: Any = None
    machine: Optional[Machine] = None
    elastic: bool = False


def requested_compressor(spec: Any, optimizer: Any, plain_sgd: bool) -> Any:
    """The compressor of a spec, with `follow_lr` decided; warns of what has cost accuracy.
    ValueError where it needs the optimizer, and that is None."""
    compressor: Any = decide_follow_lr(get_compressor(spec), optimizer is not None, plain_sgd)
    if compressor.traits.corrects_momentum and optimizer is None and compressor.momentum is None:
        raise ValueError(
            f"{compressor.id} needs the optimizer, to take over its momentum; or say momentum=…"
        )
    for caution in cautions(compressor, optimizer):
        warn_once(caution)
    return compressor


def momentum_of(compressor: Any, sgd: Mapping[str, Any]) -> Tuple[float, bool]:
    """(momentum, nesterov) to take over: the compressor's options, or where one is None an
    SGD's."""
    momentum = sgd["momentum"] if compressor.momentum is None else compressor.momentum
    nesterov = sgd["nesterov"] if compressor.nesterov is None else compressor.nesterov
    return float(momentum), bool(nesterov and momentum)


def description_of(compressor: Compressor) -> Dict[str, Any]:
    """The part of a configuration that does not depend on the framework: nested JSON-able values,
    the same on all ranks."""
    package = package_of(str(compressor.id))
    return {
        "version of horovod-compress": __version__,
        "wire version": wire.VERSION,
        "options": compressor.config,
        **({f"package of {compressor.id}": package} if package else {}),
        **(
            {f"kernels, on which {compressor.id}'s last bits depend": kernels.backend}
            if compressor.traits.same_kernels
            else {}
        ),
    }
