"""What real ranks are asked to prove of the TensorFlow adapter; test_tensorflow.py asks. See
cases/__init__.py."""

from checks import joined

from . import (
    agreement,
    applied,
    asked,
    fits,
    functions,
    hosts,
    mistakes,
    numbers,
    recording,
    switches,
    unbound,
    updates,
)
from .training import start

__all__ = ["CASES", "start"]

CASES = joined(
    agreement,
    applied,
    fits,
    functions,
    hosts,
    numbers,
    unbound,
    switches,
    updates,
    recording,
    # Makes compressions on one rank alone, after which those of threads part.
    asked,
    mistakes,
)
