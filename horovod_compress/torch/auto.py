"""`Compression.auto` in PyTorch, on Horovod."""

from ..adapters.auto import Automatic
from ..pytorch.auto import OnTrial
from ..pytorch.compression import refuse_begun_within_step
from .compression import BoundCompression
from .unbound import UnboundCompression


class CompressionOnTrial(OnTrial, BoundCompression):
    """A bound AutoCompression."""


class AutoCompression(Automatic, UnboundCompression):
    __doc__ = Automatic.__doc__

    _bound_class = CompressionOnTrial
    _check = staticmethod(refuse_begun_within_step)
