"""Compression for horovod.tensorflow and horovod.tensorflow.keras, on stock DistributedOptimizer and DistributedGradientTape.

    import horovod.tensorflow.keras as hvd
    import horovod_compress.tensorflow as hvdc

    compression = hvdc.Compression.dgc(optimizer, ratio=0.001)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=compression)
"""
from ..compressors import REGISTRY
from .checkpoint import StateCheckpoint
from .compression import BoundCompression

__all__ = ["BoundCompression", "Compression", "StateCheckpoint"]


class Compression:
    """Makes compressions, bound to an optimizer where the algorithm needs it: one method an algorithm, and `from_spec`."""

    @staticmethod
    def from_spec(spec, optimizer=None, process_set=None, discardable=False):
        """The compression of a spec, "dgc:ratio=0.001" or {"id": "dgc", "ratio": 0.001}; see `BoundCompression`."""
        return BoundCompression(spec, optimizer, process_set, discardable)

    @staticmethod
    def compress(tensor):
        """Horovod gets here where it was given this class, or one of its methods, instead of what those return."""
        raise TypeError("this is no compression yet: call it, as in compression=hvdc.Compression.dgc(optimizer)")


def _factory(id, cls):
    def make(optimizer=None, process_set=None, discardable=False, **options):
        return BoundCompression({"id": id, **options}, optimizer, process_set, discardable)

    make.compress = Compression.compress
    make.__name__, make.__qualname__ = id, f"Compression.{id}"
    make.__doc__ = f"{cls.__doc__}\n\n    Options: see horovod_compress.available()[{id!r}]; arguments: see BoundCompression."
    return make


Compression.from_spec.compress = Compression.compress
for _id, _cls in REGISTRY.items():
    setattr(Compression, _id, staticmethod(_factory(_id, _cls)))
