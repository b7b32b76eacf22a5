"""Decentralized training with N ranks in one process."""

import dataclasses
import numbers
from typing import Any, Callable, Dict, List, Optional

import numpy as np

from ..compressors import Spec
from ..engine.checkpoint import mean_of
from ..engine.lockstep import Named
from ..transport.loopback import Loopback
from .gossip import Gossip, compressor_of_messages
from .rules import zeta_of
from .topology import Topology


@dataclasses.dataclass(repr=False)
class DecentralizedRun:
    """The results of `simulate_decentralized`. parameters[rank][name] are each rank's own after the
    last step, and mean[name] their mean, float32 in their shapes; consensus[rank] is ‖x − mean‖ /
    ‖mean‖; stats[rank] are the counters of `Gossip.stats`; gossips[rank] has the copies."""

    parameters: List[Named]
    mean: Named
    consensus: List[float]
    stats: List[Dict[str, Any]]
    gossips: List[Gossip]

    def __repr__(self) -> str:
        return f"<{self.stats[0]['steps']} steps of {len(self.stats)} ranks>"


def simulate_decentralized(
    spec: Spec,
    start: Named,
    local_step: Callable[[int, int, Named], Any],
    ranks: int,
    steps: int,
    topology: Any = "ring",
    algorithm: str = "dcd",
    step: Optional[float] = None,
) -> DecentralizedRun:
    """Trains N models in one process, with the messages of real ranks.

    Args:
        spec: the compression of messages, as for `get_compressor`. algorithm="exact" sends
            parameters themselves: exactly with "none", which is D-PSGD, and with others quantized
            naively, which is there to be compared with.
        start: the parameters that all ranks begin with, {name: array}. They are not changed.
        local_step: local_step(number of the step, rank, parameters) moves a rank's parameters,
            {name: float32 array}, in place, as its optimizer does.
        ranks: N.
        steps: how many.
        topology: "ring", "torus", "complete", or a matrix of weights; see `Topology`.
        algorithm: "dcd", "choco", "ecd" or "exact".
        step: choco's ζ.

    Returns:
        A DecentralizedRun.

    Raises:
        ValueError: bad options, a compression that cannot serve, or a local_step that puts other
            arrays in place of those that it is given.
        FloatingPointError: training has diverged beyond float32.
    """
    _check(start, steps)
    zeta, graph = zeta_of(algorithm, step), Topology(topology, ranks)
    compressor = compressor_of_messages(spec)
    shapes = {name: np.shape(array) for name, array in start.items()}
    gossips = [
        Gossip(compressor, algorithm, zeta, graph, each, shapes) for each in Loopback.group(ranks)
    ]
    shaped = [
        {name: np.array(array, np.float32, order="C") for name, array in start.items()}
        for _ in range(ranks)
    ]
    flat = [{name: x.reshape(-1) for name, x in named.items()} for named in shaped]
    for gossip, values in zip(gossips, flat):
        gossip.begin(values)
    for number in range(steps):
        for rank, gossip in enumerate(gossips):
            local_step(number, rank, shaped[rank])
            _check_in_place(shaped[rank], flat[rank])
            gossip.start(flat[rank])
        for gossip, values in zip(gossips, flat):
            gossip.finish(values)
    for gossip in gossips:
        gossip.raise_failure()
    mean = mean_of([{"x": its} for its in shaped])["x"]
    apart = [distance(its, mean) for its in shaped]
    return DecentralizedRun(shaped, mean, apart, [each.stats() for each in gossips], gossips)


def _check(start: Named, steps: int) -> None:
    """ValueError for a model without parameters, and for what is no number of steps."""
    if not start:
        raise ValueError("start must have the parameters of a model, {name: array}: it is empty")
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 0:
        raise ValueError(f"steps must be a whole number, 0 or more, not {steps!r}")


def _check_in_place(shaped: Named, flat: Named) -> None:
    """ValueError where arrays are no longer those of which `flat` has the memory."""
    for name, x in flat.items():
        if not np.may_share_memory(shaped[name], x):
            raise ValueError(
                f"local_step has put another array in place of {name!r}: it must change the one "
                "that it is given"
            )


def distance(x: Named, mean: Named) -> float:
    """‖x − mean‖ / ‖mean‖ over all tensors."""
    apart = sum(float(np.square(x[name] - mean[name], dtype=np.float64).sum()) for name in mean)
    size = sum(float(np.square(each, dtype=np.float64).sum()) for each in mean.values())
    return float(np.sqrt(apart / size)) if size else float(np.sqrt(apart))
