"""Gradient compression for unmodified Horovod.

Use it through `horovod_compress.torch`. What is here needs no framework: specs, the list of algorithms, and `simulate`.
"""
from .compressors import available, get_compressor
from .handshake import MismatchError
from .simulate import simulate
from .version import __version__
from .wire import WireError

__all__ = ["MismatchError", "WireError", "available", "get_compressor", "simulate", "__version__"]
