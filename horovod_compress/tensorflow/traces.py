"""The functions whose traces have operations of a compression."""

import weakref
from typing import Any

from .horovod_internals import call_before, functions_under_trace, trace_again


class Traces:
    """The traced functions of a compression.

    Attributes:
        generation: how often traces have become void.
    """

    def __init__(self) -> None:
        self._functions: "weakref.WeakSet[Any]" = weakref.WeakSet()
        self.generation = 0

    def note(self) -> None:
        """Keeps the functions whose traces now get operations that depend on the compression."""
        self._functions.update(functions_under_trace())

    def note_exchange(self) -> None:
        """The same for functions whose traces now get an exchange. Others that call these, which
        are traced already, are noted when they do."""
        self.note()
        for function in functions_under_trace():
            call_before(function, self, self.note_exchange)

    def again(self) -> None:
        """Has all of them traced again when they are called next."""
        self.generation += 1
        for function in self._functions:
            trace_again(function)
