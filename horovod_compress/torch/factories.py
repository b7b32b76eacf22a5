"""`Compression` of PyTorch. Editors and type checkers read `factories.pyi` in place of this
file."""

from typing import Any, Optional, Sequence, Union

import torch

from ..compressors import Spec
from ..session.factories import Algorithms
from ..torch_common.parameters import NamedParameters
from .compression import BoundCompression
from .unbound import AutoCompression, UnboundCompression


class Compression(metaclass=Algorithms):
    """Makes compressions: one method an algorithm, and `from_spec`."""

    @staticmethod
    def from_spec(
        spec: Spec,
        optimizer: Optional[torch.optim.Optimizer] = None,
        *,
        named_parameters: Optional[NamedParameters] = None,
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> Union[BoundCompression, UnboundCompression]:
        """The compression of a spec: "dgc:ratio=0.001", {"id": "dgc", "ratio": 0.001} or "auto".

        It is bound here where the optimizer or parameters are given, else when it is used.

        Args:
            spec: as for `horovod_compress.get_compressor`, or "auto".
            optimizer: the torch optimizer that hvd.DistributedOptimizer will wrap.
            named_parameters: (name, parameter) pairs, as model.named_parameters().
            process_set: the one that hvd.DistributedOptimizer gets; default: all ranks.
            grad_scaler: the torch.amp.GradScaler that scales the loss.
            discardable: a step that is not used, or not finite, leaves no trace.

        Returns:
            A `BoundCompression`, or an `UnboundCompression` without optimizer and parameters.

        Raises:
            ValueError: for bad options and parameters.
        """
        options: Any = {
            "process_set": process_set,
            "grad_scaler": grad_scaler,
            "discardable": discardable,
        }
        is_bound = optimizer is not None or named_parameters is not None
        if spec == "auto":
            auto = AutoCompression(**options)
            return auto.made_for(optimizer, named_parameters, process_set) if is_bound else auto
        if is_bound:
            return BoundCompression(spec, optimizer, named_parameters=named_parameters, **options)
        return UnboundCompression(spec, **options)

    @staticmethod
    def auto(
        *,
        candidates: Optional[Sequence[str]] = None,
        probe_steps: int = 30,
        margin: float = 0.05,
        grad_scaler: Any = None,
        discardable: bool = False,
        process_set: Any = None,
    ) -> AutoCompression:
        """A compression that tries several while training begins, and goes on with the fastest
        where that is beyond the job's noise, else with the dense one.

        Args:
            candidates: as of `AutoCompression`.
            probe_steps: as of `AutoCompression`.
            margin: as of `AutoCompression`.
            grad_scaler: as of `AutoCompression`.
            discardable: as of `AutoCompression`.
            process_set: as of `AutoCompression`.

        Returns:
            An `AutoCompression`, which has not chosen yet.

        Raises:
            ValueError: as of `AutoCompression`.
        """
        return AutoCompression(
            candidates=candidates,
            probe_steps=probe_steps,
            margin=margin,
            grad_scaler=grad_scaler,
            discardable=discardable,
            process_set=process_set,
        )
