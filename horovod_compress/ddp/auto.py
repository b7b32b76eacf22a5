"""The choice by trial under DistributedDataParallel."""

from typing import Any, Dict, Optional

import torch
from torch.nn.parallel import DistributedDataParallel

from ..adapters.auto import trial_arguments
from ..pytorch.auto import OnTrial, candidates_of
from ..pytorch.compression import refuse_begun_within_step
from .compression import DDPCompression


class DDPCompressionOnTrial(OnTrial, DDPCompression):
    """A compression that is chosen by trial while training begins."""

    def __init__(
        self,
        auto: Dict[str, Any],
        model: DistributedDataParallel,
        optimizer: Optional[torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        candidates = candidates_of(auto, optimizer)
        super().__init__(candidates[-1], model, optimizer, **options)
        self._begin_trial(auto, candidates)


def is_auto(spec: Any) -> bool:
    """Whether a spec leaves the choice to a trial."""
    return spec == "auto" or isinstance(spec, dict) and spec.get("id") == "auto"


def make_auto(spec: Any, model: Any, optimizer: Any, **options: Any) -> DDPCompression:
    """The compression of such a spec. As of `factories.make`."""
    chosen = {} if spec == "auto" else {key: spec[key] for key in spec if key != "id"}
    auto = trial_arguments(**chosen, check=refuse_begun_within_step)
    return DDPCompressionOnTrial(auto, model, optimizer, **options)
