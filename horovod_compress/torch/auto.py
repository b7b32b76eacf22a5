"""`Compression.auto` in PyTorch, on Horovod."""

import dataclasses
import functools
from typing import Any, Optional, Sequence, Tuple

from ..compressors.advice import ADAM
from ..compressors.base import Compressor
from ..session.auto import auto_of
from ..torch_common.steps import refuse_begun_within_step
from .unbound import UnboundCompression


class AutoCompression(UnboundCompression):
    """A compression for hvd.DistributedOptimizer that chooses among candidates while training
    begins, as `Trials` says.

    It weighs speed only, not how well a candidate trains. The rule: another candidate than the
    first, the dense one, wins if its median step is shorter by more than the margin and by more
    than both interquartile ranges together, with eight steps of each, or if every dense step took
    over twice its median. Candidates take turns of three steps, of which the first does not count.

    Each step that is tried is a step of training, and what a candidate has held back goes on with
    the next: nothing is lost. How long a step takes is seen from one to the next, so all that
    happens in one counts, and the slowest rank's seconds count. Where steps later take 1.3 times as
    long as they did for 50 steps, candidates are tried again.

    Args:
        candidates: specs, the dense one first; default: none, fp16, and for an SGD 1 % by dgc
            (where it has momentum) or topk, with two limits for small tensors.
        probe_steps: at most so many steps are tried.
        margin: a share of the dense one's median step.
        grad_scaler: as of `BoundCompression`.
        discardable: as of `BoundCompression`.
        process_set: as of `UnboundCompression`.

    Raises:
        ValueError: bad candidates, or an elastic job.
    """

    def __init__(
        self,
        *,
        candidates: Optional[Sequence[str]] = None,
        probe_steps: int = 30,
        margin: float = 0.05,
        grad_scaler: Any = None,
        discardable: bool = False,
        process_set: Any = None,
    ) -> None:
        super().__init__(
            "none", process_set=process_set, grad_scaler=grad_scaler, discardable=discardable
        )
        asked = {"candidates": candidates, "probe_steps": probe_steps, "margin": margin}
        self._asked = auto_of({"id": "auto", **asked}, refuse_begun_within_step)

    def _made_again(self) -> Tuple[Any, ...]:
        return functools.partial(type(self), **dataclasses.asdict(self._asked), **self._options), ()

    def __repr__(self) -> str:
        return "<a compression that is chosen when training begins>"

    @property
    def compressor(self) -> Compressor:
        """Raises ValueError."""
        raise ValueError(
            f"auto() tries compressions of gradients: name one for updates, such as {ADAM.spec}"
        )
