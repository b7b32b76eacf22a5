"""Compressions for an optimizer that is not known yet."""

import functools
from abc import ABC, abstractmethod
from typing import Any, Tuple, Type

from ..compressors import get_compressor
from ..compressors.base import Compressor
from .bound import NO_COPIES, Bound


class NotBoundError(RuntimeError, AttributeError):
    """An unbound compression is asked for something that a single bound one has. hasattr() takes it
    for False."""


class Unbound(ABC):
    """A compression for an optimizer that is not known yet: it is bound to the one whose first
    gradient comes, or when it is first asked for something. Two optimizers that are given the same
    one get a compression each. Horovod need not be initialized. It can be copied and pickled until
    it is bound. Raises ValueError for bad options at once, as a bound one does; all else is that
    one's: stats(), state_dict(), ….

    options: keyword arguments for `_bound_class`.
    """

    _bound_class: Type[Bound]
    # The compressions that it has become.
    _bound: Any

    def __init__(self, spec: Any, **options: Any) -> None:
        # The first argument of `_bound_class`.
        self._asked: Any = get_compressor(spec)
        self._compressor: Compressor = self._asked
        self._options = options

    @property
    def compressor(self) -> Compressor:
        """That of the spec."""
        return self._compressor

    @abstractmethod
    def the_only(self) -> Bound:
        """The compression that this one has become. NotBoundError where there is none, or there are
        several."""

    def __reduce__(self) -> Tuple[Any, ...]:
        if len(self._bound):
            raise TypeError(NO_COPIES)
        return self._made_again()

    def _made_again(self) -> Tuple[Any, ...]:
        """A callable that makes a copy, and its arguments, as `__reduce__` returns them."""
        return functools.partial(type(self), **self._options), (self._asked,)

    def __repr__(self) -> str:
        return f"<{self._compressor!r}, bound to an optimizer when it is used>"

    def __getattr__(self, name: str) -> Any:
        known = None if name.startswith("_") else getattr(self._bound_class, name, None)
        if known is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not callable(known):
            return getattr(self.the_only(), name)

        # A method can be asked for before there is an optimizer, as hasattr() does, and needs one
        # only when it is called.
        @functools.wraps(known)
        def method(*arguments: Any, **named: Any) -> Any:
            return getattr(self.the_only(), name)(*arguments, **named)

        return method
