"""`Compression.auto` in PyTorch, on Horovod."""

from typing import Any, Dict, Optional

import torch

from ..adapters.auto import Automatic, refuse_elastic
from ..pytorch.auto import OnTrial, candidates_of
from ..pytorch.compression import refuse_begun_within_step
from .compression import BoundCompression
from .unbound import UnboundCompression


class CompressionOnTrial(OnTrial, BoundCompression):
    """What AutoCompression becomes."""

    def __init__(
        self,
        auto: Dict[str, Any],
        optimizer: Optional[torch.optim.Optimizer],
        **options: Any,
    ) -> None:
        refuse_elastic()
        candidates = candidates_of(auto, optimizer)
        super().__init__(candidates[-1], optimizer, **options)
        self._begin_trial(auto, candidates)


class AutoCompression(Automatic, UnboundCompression):
    __doc__ = Automatic.__doc__

    _bound_class = CompressionOnTrial

    _check = staticmethod(refuse_begun_within_step)

    def made_for(
        self, optimizer: Optional[torch.optim.Optimizer], named_parameters: Any, process_set: Any
    ) -> BoundCompression:
        options = {**self._options, "process_set": process_set}
        return CompressionOnTrial(
            self._auto, optimizer, named_parameters=named_parameters, **options
        )
