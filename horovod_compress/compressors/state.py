"""The state that an algorithm keeps of a tensor between steps."""

import dataclasses
import enum
import threading
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ..kernels import beside, cpu


def zeros(numel: int) -> np.ndarray:
    """float32 zeros that begin on a cache line: unaligned state makes the pass over it up to half
    as long again."""
    # Unlike np.zeros, on huge pages where it is large: scattered reads are faster.
    memory = np.empty(numel + 16, np.float32)
    memory.fill(0)
    return memory[-memory.ctypes.data % 64 // 4 :][:numel]


class Role(enum.Enum):
    """The role of an array of the state: what this rank has not sent yet, or the same on all
    ranks."""

    LOCAL = "local"
    SHARED = "shared"


LOCAL, SHARED = Role


class Rollback(NamedTuple):
    """How a rollback restores an array of the state: it adds `values` to the elements `indices`, or
    with `replace` writes them there. Where indices is None, values is the body of a payload, which
    is decoded and added."""

    array: str
    indices: Optional[np.ndarray]
    values: np.ndarray
    replace: bool = False


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
                drawn = cpu.draw_coordinates(key=key, numel=self.numel, first=first, count=count)
                self._drawn = (key, first, count, self.numel), np.sort(drawn)
            drawn = self._drawn[1]
        start, end = self._starts[name]
        low, high = np.searchsorted(drawn, [start, end])
        return drawn[low:high] - np.uint32(start)


@dataclasses.dataclass
class State:
    """One tensor's state on one rank. An algorithm that needs more has a subclass of State as its
    `state_type`.

    arrays lives between steps, and is saved and loaded; `Compressor.roles` describes it. rollbacks
    lists how a rollback of the open step restores the arrays. undo is that of its payload, where
    `restore` does. sent is what `commit` needs of the open step. all_sent says whether the open
    step sent everything, densely. indices, uint32, are those that the last step worked on, where
    they or their memory are needed again. buffer is the memory of the last payload, for the next to
    use. model is all tensors, where this is one of several. overflows counts steps in which a
    finite element became infinite in a narrower type. factor is what a momentum u has been
    multiplied by, which depends on the last step's options; it is saved and loaded.
    """

    name: str
    arrays: Dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    rollbacks: List[Rollback] = dataclasses.field(default_factory=list)
    undo: Sequence[Any] = ()
    sent: Any = None
    all_sent: bool = False
    indices: Optional[np.ndarray] = None
    buffer: Optional[np.ndarray] = None
    model: Optional[Model] = None
    overflows: int = 0
    factor: float = 1.0

    def restore(self, *names: str) -> None:
        """Writes back the elements of arrays that `undo` has: indices, and a row for each array."""
        if self.undo:
            indices, rows = self.undo
            for name, row in zip(names, rows):
                self.arrays[name][indices] = row

    def replaced(self) -> None:
        """Called when arrays have been written from elsewhere."""

    def follow(self, grad: Any) -> None:
        """Brings what is kept to where the gradient is, on the CPU or on a device."""
        for key, array in self.arrays.items():
            self.arrays[key] = beside(array, grad)


def spares(memory: Sequence[Optional[np.ndarray]]) -> Optional[List[np.ndarray]]:
    """The tensors' memory of the last step, for a kernel to use again; None where some have none
    yet."""
    found = [each for each in memory if each is not None]
    return found if len(found) == len(memory) else None
