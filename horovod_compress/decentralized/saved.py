"""Checks whether a rank's state of decentralized training fits where it is loaded."""

from typing import Any, Dict, Sequence

import numpy as np

from ..engine import checkpoint
from ..protocol.handshake import first_difference, shown
from .gossip import Gossip
from .rules import names_of_arrays


def identity_of(gossip: Gossip, portable: bool) -> Dict[str, Any]:
    """The rank, topology and algorithm that a state belongs to; None for all of them in a portable
    one."""
    its = {
        "rank": gossip.transport.rank,
        "size": gossip.transport.size,
        "algorithm": gossip.algorithm,
        "topology": gossip.topology.description(),
    }
    return dict.fromkeys(its) if portable else its


def check(kept: Any, gossip: Gossip, slots: Sequence[Any]) -> None:
    """Looks whether a state fits.

    Args:
        kept: what `DecentralizedOptimizer.state_dict` has under "decentralized".
        gossip: this rank's side of the exchanges.
        slots: of the parameters that are exchanged: each has a name and a `param`.

    Raises:
        ValueError: it does not fit, or is no such state.
    """
    try:
        portable = kept["rank"] is None
        found = {key: kept[key] for key in identity_of(gossip, portable)}
        arrays = {
            name: {key: np.asarray(tensor) for key, tensor in its.items()}
            for name, its in kept["tensors"].items()
        }
        counts = kept["exchanges"], kept["local_steps"]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a state of a DecentralizedOptimizer: {error!r}") from None
    expected = {**identity_of(gossip, portable), "tensors": {}}
    keys = sorted(names_of_arrays(gossip.algorithm))
    for slot in slots if portable or arrays else ():
        numel, shape = slot.param.numel(), list(slot.param.shape)
        expected["tensors"][slot.name] = (
            {"parameter": shape} if portable else {key: [numel] for key in keys}
        )
    shapes = {
        name: {key: list(its[key].shape) for key in sorted(its)} for name, its in arrays.items()
    }
    difference = first_difference(expected, {**found, "tensors": shapes})
    if difference:
        (where,), (wanted, its) = shown(difference[0]), shown(*difference[1:])
        raise ValueError(
            f"this state does not fit: {where} is {its} in it and {wanted} here. Load on every "
            "rank what that rank has saved, at the same number of ranks and with the same model "
            "and options; or a portable state"
        )
    for count in counts:
        checkpoint.refuse(checkpoint.wrong_count("steps", count))
    checkpoint.refuse_not_finite(arrays)
