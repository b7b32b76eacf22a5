"""Runs the same compressors and exchange with N ranks in one process, on given gradients."""

import dataclasses
from typing import Dict, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ..compressors import Spec, for_gradients
from ..compressors.selective import decide_follow_lr
from ..transport.loopback import Loopback
from .lockstep import Named, make_ranks, run_step
from .record_types import Stats


@dataclasses.dataclass(repr=False)
class Run:
    """The results of `simulate`.

    Attributes:
        mean: `mean[step][name]` is every rank's result with op=Average, float32 in the gradient's
            shape.
        bytes_sent: `bytes_sent[step][rank]` counts the bytes that the rank hands to collectives,
            with frames, and the 4 bytes that are added up beside each gathered payload.
        state: `state[rank][name]` is {array name: array} after the last step.
        stats: `stats[rank]` are the rank's counters, as a compression's `stats()` has them.
    """

    mean: List[Named]
    bytes_sent: List[List[int]]
    state: List[Dict[str, Named]]
    stats: List[Stats]

    def __repr__(self) -> str:
        return f"<{len(self.mean)} steps of {len(self.stats)} ranks>"


def simulate(
    spec: Spec,
    gradients: Iterable[Iterable[Named]],
    lr: Optional[Iterable[float]] = None,
    local_size: int = 1,
) -> Run:
    """Runs a compression on given gradients with N ranks in one process.

    Args:
        spec: as for `get_compressor`.
        gradients: `gradients[step][rank]` is a dict of arrays by name. Every rank of every step
            must have the same names and shapes. The arrays are not changed.
        lr: the learning rate of each step, for residuals that follow it. At 0 all stay as they
            are.
        local_size: how many ranks that follow each other are on one machine, for `hosts=true`.

    Returns:
        A `Run`.

    Raises:
        ValueError: the spec needs samples, or names, shapes, steps or machines do not fit.
        AssertionError: replicas disagreed.

    Examples:
        Three steps of two ranks. What was sent and what waits add up to the gradients:

        >>> import numpy as np
        >>> import horovod_compress as hc
        >>> gradients = np.random.default_rng(0).standard_normal((3, 2, 64, 64))
        >>> run = hc.simulate("topk:ratio=0.01", [[{"w": g} for g in step] for step in gradients])
        >>> run, run.bytes_sent[0][0] < 4 * 64 * 64 / 50
        (<3 steps of 2 ranks>, True)
        >>> sent = sum(mean["w"] for mean in run.mean)
        >>> waiting = sum(arrays["w"]["residual"] for arrays in run.state) / 2
        >>> np.allclose(sent + waiting.reshape(64, 64), gradients.sum((0, 1)) / 2, atol=1e-5)
        True
    """
    compressor = decide_follow_lr(for_gradients(spec), lr is not None, lr is not None)
    steps = [list(ranks) for ranks in gradients]
    if not steps or not steps[0]:
        raise ValueError("gradients must hold at least one step of at least one rank")
    size = len(steps[0])
    rates = [None] * len(steps) if lr is None else [float(rate) for rate in lr]
    if len(rates) != len(steps):
        raise ValueError(f"lr has {len(rates)} learning rates for {len(steps)} steps")
    shapes = {name: np.shape(array) for name, array in steps[0][0].items()}
    for step, ranks in enumerate(steps):
        _check(step, ranks, size, shapes)
    exchanges = make_ranks(compressor, shapes, Loopback.group(size), local_size=local_size)
    mean, bytes_sent = [], []
    for step, ranks in enumerate(steps):
        sent = [exchange.stats()["bytes_sent"] for exchange in exchanges]
        grads = [{n: np.array(a, np.float32).ravel() for n, a in each.items()} for each in ranks]
        run_step(exchanges, grads, rates[step])
        _check_replicas(step, grads)
        mean.append({name: grads[0][name].reshape(shape) for name, shape in shapes.items()})
        after = (exchange.stats()["bytes_sent"] for exchange in exchanges)
        bytes_sent.append([now - before for now, before in zip(after, sent)])
    states = [exchange.arrays() for exchange in exchanges]
    return Run(mean, bytes_sent, states, [exchange.stats() for exchange in exchanges])


def _check_replicas(step: int, grads: Sequence[Named]) -> None:
    for name, first in grads[0].items():
        same = all(np.array_equal(named[name], first, equal_nan=True) for named in grads)
        assert same, f"replicas disagree on {name}, step {step}"


def _check(
    step: int, ranks: Sequence[Named], size: int, shapes: Dict[str, Tuple[int, ...]]
) -> None:
    if len(ranks) != size:
        raise ValueError(f"step {step} has {len(ranks)} ranks, step 0 has {size}")
    for rank, named in enumerate(ranks):
        found = {name: np.shape(array) for name, array in named.items()}
        for name in found:
            if not isinstance(name, str):
                raise ValueError(f"step {step}, rank {rank}: names must be str, not {name!r}")
        if any(np.iscomplexobj(array) for array in named.values()):
            raise ValueError(f"step {step}, rank {rank}: complex gradients cannot be compressed")
        if found != shapes:
            raise ValueError(
                f"step {step}, rank {rank}: names and shapes {found} are not those of step 0, rank "
                f"0: {shapes}"
            )
