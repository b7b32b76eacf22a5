"""`Compression.auto` in PyTorch: steps are seen from gradient to gradient, and another candidate
begins with a step's first one."""

import time
from typing import Any, Dict, Optional, Tuple

import torch

from ..choice import Automatic, Chosen, default_candidates
from ..compressors.base import Compressor
from .compression import BoundCompression, refuse_begun_within_step
from .sgd import can_take_over, is_plain_sgd
from .unbound import UnboundCompression


def _sparse_for(optimizer: torch.optim.Optimizer) -> Optional[str]:
    if not isinstance(optimizer, torch.optim.SGD):
        return None
    return "dgc" if can_take_over(optimizer) and not is_plain_sgd(optimizer) else "topk"


class ChosenCompression(Chosen, BoundCompression):
    """What AutoCompression becomes: a compression that is switched from candidate to candidate,
    until one is chosen."""

    def __init__(
        self,
        auto: Dict[str, Any],
        optimizer: torch.optim.Optimizer,
        named_parameters: Any,
        **options: Any,
    ) -> None:
        self.refuse_elastic()
        candidates = list(auto["candidates"] or default_candidates(_sparse_for(optimizer)))
        self._in_force = candidates[-1]
        super().__init__(self._in_force, optimizer, named_parameters, **options)
        for spec in candidates:
            # What cannot be is refused now, not when its turn comes.
            self._choose(spec)
        self._choice = self._new_choice(auto, candidates)
        self._began: Optional[float] = None  # when the last step did
        self._now = 0.0  # when the step that begins did

    def compress(self, tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        if self._choice.gradients is not None:
            self._choice.gradients[self._find(tensor).name] = (
                tensor.detach().float().cpu().numpy().copy()
            )
        return super().compress(tensor)

    def _begin_step(self) -> None:
        self._now = time.perf_counter()
        super()._begin_step()
        self._began = time.perf_counter()

    def _switch_where_due(self) -> None:
        super()._switch_where_due()
        if self._began is not None:
            self._choice.step_ended(self._now - self._began)
            self._follow(self._choice.current)


class AutoCompression(Automatic, UnboundCompression):
    __doc__ = Automatic.__doc__

    _bound_class = ChosenCompression

    @staticmethod
    def _check(compressor: Compressor) -> None:
        refuse_begun_within_step(compressor.config)

    def _made_for(
        self, optimizer: torch.optim.Optimizer, named_parameters: Any, options: Dict[str, Any]
    ) -> BoundCompression:
        return ChosenCompression(self._auto, optimizer, named_parameters, **options)
