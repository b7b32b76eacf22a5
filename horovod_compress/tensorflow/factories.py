"""`Compression` of TensorFlow. Editors and type checkers read `factories.pyi` in place of this
file."""

from typing import Any, Union

from ..compressors import Spec, get_compressor
from ..session.factories import Algorithms
from .compression import BoundCompression
from .unbound import UnboundCompression, one_in_all_traces


class Compression(metaclass=Algorithms):
    """Makes compressions: one method an algorithm, and `from_spec`."""

    @staticmethod
    def from_spec(
        spec: Spec,
        optimizer: Any = None,
        *,
        process_set: Any = None,
        grad_scaler: Any = None,
        discardable: bool = False,
    ) -> Union[BoundCompression, UnboundCompression]:
        """The compression of a spec: "dgc:ratio=0.001", or {"id": "dgc", "ratio": 0.001}.

        It is bound here where the optimizer is given, else when it is used. In a function that is
        traced it is the same one in every trace.

        Args:
            spec: as for `horovod_compress.get_compressor`.
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
        compressor = get_compressor(spec)

        def make() -> Union[BoundCompression, UnboundCompression]:
            if optimizer is None:
                return UnboundCompression(compressor, **options)
            return BoundCompression(compressor, optimizer, **options)

        return one_in_all_traces((compressor, optimizer, *options.values()), make)
