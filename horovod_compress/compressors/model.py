"""All tensors of a compressor as one vector."""

import threading
from typing import Any, Dict, Tuple

import numpy as np

from .. import kernels


class Model:
    """All tensors of a compressor, concatenated to one vector in an order that is the same on all
    ranks."""

    def __init__(self) -> None:
        self.numel = 0
        self._starts: Dict[str, Tuple[int, int]] = {}
        self._drawn: Tuple[Any, Any] = None, None
        # Graphs bring tensors in several threads.
        self._lock = threading.Lock()

    def add(self, name: str, numel: int) -> None:
        self._starts[name] = self.numel, self.numel + numel
        self.numel += numel

    def own(self, name: str, key: int, first: int, count: int) -> np.ndarray:
        """This tensor's share, ascending, of `count` coordinates drawn from the whole model by the
        kernel `draw_coordinates`. The tensors of a step share one draw."""
        with self._lock:
            if self._drawn[0] != (key, first, count, self.numel):
                drawn = kernels.cpu.draw_coordinates(
                    key=key, numel=self.numel, first=first, count=count
                )
                self._drawn = (key, first, count, self.numel), np.sort(drawn)
            drawn = self._drawn[1]
        start, end = self._starts[name]
        low, high = np.searchsorted(drawn, [start, end])
        return drawn[low:high] - np.uint32(start)
