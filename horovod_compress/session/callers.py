"""The callers of a function."""

import sys
from types import FrameType
from typing import Any, Iterator, Optional


def callers(frame: Optional[FrameType] = None) -> Iterator[FrameType]:
    """The frames of the functions that have led here, or to this frame, the nearest first."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def owners(*methods: str) -> Iterator[Any]:
    """The objects whose methods have led here, the nearest first; methods: only of these names."""
    for frame in callers():
        if not methods or frame.f_code.co_name in methods:
            yield frame.f_locals.get("self")
