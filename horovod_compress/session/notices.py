"""Warnings that come once."""

import warnings
from typing import Set

_warned: Set[str] = set()


def warn_once(message: str) -> None:
    """Issues a RuntimeWarning the first time that it is called with this message."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(f"horovod_compress: {message}", RuntimeWarning, stacklevel=3)
