"""The choice of how tensors are compressed: what a spec comes to with an optimizer, and what ranks
compare of it."""

from typing import Any, Dict, Iterator, Mapping, NamedTuple, Optional, Tuple

from .. import kernels
from ..compressors import get_compressor, package_of
from ..compressors.advice import ADAM
from ..compressors.base import Compressor
from ..compressors.selective import decide_follow_lr
from ..protocol import wire
from ..protocol.machine import Machine
from ..version import __version__
from .notices import warn_once

# Optimizers that divide by the size of earlier gradients, by the names of their classes.
_DIVIDING = frozenset(
    [
        "adam",
        "adamw",
        "adamax",
        "nadam",
        "radam",
        "sparseadam",
        "lamb",
        "adagrad",
        "adadelta",
        "adafactor",
        "rmsprop",
    ]
)


class Choice(NamedTuple):
    """How tensors are compressed.

    Attributes:
        requested: as the spec says.
        compressor: with the momentum that it applies.
        tensors: {name: (shape, compressor)} of those that are known.
        alike: what ranks must have alike beside the compressor: nested JSON-able values.
        held: the port's own objects that serve this choice.
        follows_momentum: as of `Exchange`.
        transport: what moves payloads.
        machine: the ranks of this rank's machine, where they are of use.
        elastic: True where ranks may come and go.
    """

    requested: Compressor
    compressor: Compressor
    tensors: Dict[str, Tuple[tuple, Compressor]]
    alike: Mapping[str, Any] = {}
    held: Any = None
    follows_momentum: bool = False
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
    for caution in _cautions(compressor, optimizer):
        warn_once(caution)
    return compressor


def _cautions(compressor: Compressor, optimizer: Any) -> Iterator[str]:
    """Advice against compressing gradients of this optimizer so: why, and an alternative."""
    names = {each.__name__.lower() for each in type(optimizer).__mro__}
    if compressor.traits.prefers_updates and names & _DIVIDING:
        yield (
            f"{compressor.id} compresses gradients of {type(optimizer).__name__}, which divides by "
            "their second moments. Entries that come late and large mislead those: trainings ended "
            "up to 66 % above none, some above ranks that exchange nothing. Compress updates in "
            "place of gradients: UpdateOptimizer(optimizer, …, "
            f"compression={ADAM.spec!r}), on 2 ranks with every={ADAM.every} "
            "(docs/guides/updates.md)"
        )
    if "moments" in compressor.config and compressor.policy.moments == "minibatch":
        yield (
            f"{compressor.id} with moments=minibatch takes the gradient of a step for one sample. "
            "That is not the paper's, and trainings (one seed each) ended 1.9 and 2.1 points below "
            "none's accuracy, and 9.4 % above its loss. Give "
            "moments=per_sample (PyTorch), or microbatch with several backward passes a step, and "
            "an alpha of 0.5 to 1 (docs/algorithms/variance.md)"
        )


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
