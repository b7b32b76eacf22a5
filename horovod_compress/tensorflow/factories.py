"""`Compression` of TensorFlow. Editors and type checkers read `factories.pyi` in place of this
file."""

from typing import Any, Optional, Sequence, Union

from ..adapters.factories import Algorithms
from ..compressors import Spec, get_compressor
from ..deprecated import by_name
from .auto import AutoCompression
from .compression import BoundCompression
from .unbound import UnboundCompression, one_in_all_traces


class Compression(metaclass=Algorithms):
    """Makes compressions: one method an algorithm, and `from_spec`."""

    @staticmethod
    @by_name
    def from_spec(
        spec: Spec,
        optimizer: Any = None,
        *,
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> Union[BoundCompression, UnboundCompression]:
        """The compression of a spec: "dgc:ratio=0.001", {"id": "dgc", "ratio": 0.001} or "auto".

        It is bound here where the optimizer is given, else when it is used. In a function that is
        traced it is the same one in every trace.

        Args:
            spec: as for `horovod_compress.get_compressor`, or "auto".
            optimizer: the Keras optimizer that will be wrapped, or that applies a tape's gradients.
            process_set: the one that Horovod's optimizer or tape gets; default: all ranks.
            grad_scaler: the LossScaleOptimizer that scales a tape's loss.
            discardable: a step that is not used, or not finite, leaves no trace.

        Returns:
            A `BoundCompression`, or an `UnboundCompression` without an optimizer.

        Raises:
            ValueError: for bad options and optimizers.
        """
        options: Any = {
            "process_set": process_set,
            "grad_scaler": grad_scaler,
            "discardable": discardable,
        }
        compressor = "auto" if spec == "auto" else get_compressor(spec)

        def make() -> Union[BoundCompression, UnboundCompression]:
            if compressor == "auto":
                auto = AutoCompression(**options)
                return auto if optimizer is None else auto.bind(optimizer)
            if optimizer is None:
                return UnboundCompression(compressor, **options)
            return BoundCompression(compressor, optimizer, **options)

        return one_in_all_traces((compressor, optimizer, *options.values()), make)

    @staticmethod
    @by_name
    def auto(
        *,
        candidates: Optional[Sequence[str]] = None,
        probe_steps: int = 30,
        margin: float = 0.05,
        grad_scaler: Any = None,
        discardable: bool = False,
        process_set: Any = None,
    ) -> AutoCompression:
        """The fastest of several on this job, where that is beyond its noise, else the dense one.
        See `AutoCompression`. In a function that is traced it is the same one in every trace."""
        options: Any = {
            # A tuple can be part of a key.
            "candidates": tuple(candidates) if isinstance(candidates, list) else candidates,
            "probe_steps": probe_steps,
            "margin": margin,
            "grad_scaler": grad_scaler,
            "discardable": discardable,
            "process_set": process_set,
        }
        return one_in_all_traces(("auto", *options.values()), lambda: AutoCompression(**options))
