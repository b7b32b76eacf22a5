"""The algorithms, one in each file, and the specs that name them."""

from .registry import (
    REGISTRY,
    Spec,
    available,
    collective_of,
    find,
    for_gradients,
    get_compressor,
    ids,
    package_of,
)

__all__ = [
    "REGISTRY",
    "Spec",
    "available",
    "collective_of",
    "find",
    "for_gradients",
    "get_compressor",
    "ids",
    "package_of",
]
