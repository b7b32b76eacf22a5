"""Optimizers' updates in place of gradients: the compressors that serve, the rounds, and the use of
the mean."""

import dataclasses
import inspect
import itertools
import logging
import numbers
from typing import Any, Callable, Collection, Dict, Iterable, List, Optional, Set

from ..compressors import get_compressor
from ..compressors.base import Compressor
from ..compressors.selective import decide_follow_lr
from ..protocol.handshake import agree, gather, warning_when_stalled
from .ranks import Ranks
from .unbound import Unbound

# (what names of collectives begin with, {name: tensor}): makes tensors their mean over ranks.
Mean = Callable[[str, Dict[str, Any]], None]
_log = logging.getLogger("horovod_compress")
_NO_MEANING = {
    # Of options of algorithms, where updates are compressed.
    "momentum": "the optimizer's momentum is inside its updates",
    "nesterov": "the optimizer's momentum is inside its updates",
    "follow_lr": "the learning rate is inside the updates",
    "clip_norm": "each rank clips its own gradients: clip them with "
    "torch.nn.utils.clip_grad_norm_, or in Keras by the optimizer's clipnorm",
}


@dataclasses.dataclass(frozen=True)
class Nesterov:
    """The outer optimizer of the mean update Δ of all ranks: m ← momentum·m + Δ, and parameters
    move by lr·(Δ + momentum·m).

    This is Algorithm 1 of DiLoCo (arXiv 2311.08105) with SGD with Nesterov's momentum as the outer
    optimizer. m is alike on all ranks.

    Attributes:
        lr: the outer learning rate, above 0.
        momentum: the outer momentum, from 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not (self.lr > 0 and 0 <= self.momentum < 1):
            raise ValueError(
                f"Nesterov needs a learning rate above 0 and a momentum from 0 to below 1, not "
                f"{self}"
            )


def check_rounds(every: int, outer: Optional[Nesterov]) -> None:
    """Raises for what is no number of local steps, ValueError, and for what is no outer optimizer,
    TypeError."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every must be a number of steps, 1 or more, not {every!r}")
    if outer is not None and not isinstance(outer, Nesterov):
        raise TypeError(f"outer must be a Nesterov(lr, momentum) or None, not {outer!r}")


def check_ranks(ranks: Optional[int]) -> None:
    """ValueError for what is no number of ranks, nor None, of an AdamW of ours."""
    if ranks is not None and (
        isinstance(ranks, bool) or not isinstance(ranks, numbers.Integral) or ranks < 1
    ):
        raise ValueError(f"ranks must be a number of ranks, 1 or more, not {ranks!r}")


def check_ranks_of_set(ranks: Optional[int], process_set: Any) -> None:
    """ValueError where an AdamW of ours would count all ranks, though the optimizer exchanges in a
    process set."""
    if process_set is not None and process_set.ranks is not None:
        check_ranks_of_part(ranks, len(process_set.ranks), "hvdc.AdamW with this process set")


def check_ranks_of_part(ranks: Optional[int], size: int, known_as: str) -> None:
    """ValueError where an AdamW of ours would take all ranks for a part of them. size: of that;
    known_as: what users know both by."""
    if ranks is None:
        raise ValueError(
            f"{known_as} would take all ranks' samples for the whole batch: say ranks={size}"
        )


AVERAGED = (
    "hvdc.AdamW is for a rank's own gradients, and Horovod has averaged these: use the framework's "
    "own AdamW with hvd.DistributedOptimizer, or "
    "hvdc.UpdateOptimizer in its place"
)


def compressor_for_updates(spec: Any, rank: int) -> Compressor:
    """The compressor of a spec, or of an unbound compression, for updates. rank: this process's, of
    which the first tells what is different there. ValueError for options that have no meaning
    there."""
    compressor: Any = get_compressor(spec.compressor if isinstance(spec, Unbound) else spec)
    for key, why in _NO_MEANING.items():
        if compressor.config.get(key):
            raise ValueError(
                f"{compressor.id}: {key} has no meaning where updates are compressed, because "
                f"{why}: leave it out"
            )
    if compressor.policy.moments != "minibatch":
        raise ValueError(
            f"{compressor.id}: moments={compressor.moments} are of gradients; updates have "
            f"moments=minibatch only"
        )
    if compressor.traits.corrects_momentum:
        if rank == 0:
            _log.warning(
                "%s selects by size with error feedback here, as topk does: momentum is inside the "
                "updates",
                compressor.id,
            )
        compressor = compressor.bound(0.0, False)
    return decide_follow_lr(compressor, False, False)


def methods_of(cls: type, of_all: Iterable[str], framework: Collection[str]) -> Set[str]:
    """The names of the methods that an optimizer's class has from others than the framework, beside
    those that every optimizer has: what may change parameters outside of a step.

    of_all: names of what every optimizer has; framework: names of packages.
    """
    others = [each for each in cls.__mro__ if each.__module__.partition(".")[0] not in framework]
    names = {name for each in others for name in vars(each)} - set(of_all)
    return {
        name
        for name in names
        if not name.startswith("__") and inspect.isfunction(inspect.getattr_static(cls, name))
    }


def average(ranks: Ranks, tensors: Dict[str, Any], mean: Mean) -> None:
    """Makes the tensors that an optimizer keeps their mean over ranks.

    Args:
        ranks: those that share the compression.
        tensors: by name, alike on all ranks; tensors or variables of the framework.
        mean: makes tensors their mean over ranks, by what names of collectives begin with.

    Raises:
        MismatchError: ranks have not the same ones.
    """
    if not ranks.active:
        return
    name = f"{ranks.label()}.state"
    agree(
        ranks.transport,
        name,
        {name: list(tensor.shape) for name, tensor in tensors.items()},
        "called average_state()",
        "Where a rank has taken no step yet, or had no gradient of some of these, call "
        "average_state() later",
    )
    mean(name, tensors)


def make_alike(
    ranks: Ranks, method: str, sums: List[int], tensors: Dict[str, Any], mean: Mean
) -> None:
    """Makes tensors their mean over ranks where they differ. Warns of ranks that do not come.

    Args:
        ranks: as of `average`.
        method: what all ranks have called.
        sums: a checksum of each tensor of this rank.
        tensors: as of `average`.
        mean: as of `average`.
    """
    if not ranks.active:
        return
    name = f"{ranks.label()}.{method}"
    with warning_when_stalled(
        f"not all {ranks.transport.size} ranks have called {method}() of their optimizer yet "
        f"(collective {name})"
    ):
        found = gather(ranks.transport, name, sums)
    differ = (len(set(its)) > 1 for its in zip(*found))
    mean(name, dict(itertools.compress(tensors.items(), differ)))
