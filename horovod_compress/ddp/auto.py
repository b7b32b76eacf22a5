"""The choice by trial under DistributedDataParallel."""

from typing import Any

from ..adapters.auto import trial_arguments
from ..pytorch.auto import OnTrial
from ..pytorch.compression import refuse_begun_within_step
from .compression import DDPCompression


class DDPCompressionOnTrial(OnTrial, DDPCompression):
    """A compression that is chosen by trial while training begins."""


def is_auto(spec: Any) -> bool:
    """Whether a spec leaves the choice to a trial."""
    return spec == "auto" or isinstance(spec, dict) and spec.get("id") == "auto"


def make_auto(spec: Any, model: Any, optimizer: Any, **options: Any) -> DDPCompression:
    """The compression of such a spec. As of `factories.make`."""
    chosen = {} if spec == "auto" else {key: spec[key] for key in spec if key != "id"}
    auto = trial_arguments(**chosen, check=refuse_begun_within_step)
    return DDPCompressionOnTrial(auto, model, optimizer, **options)
