"""Methods that are generators, and return their result plainly where they ask for nothing."""

import functools
from types import GeneratorType
from typing import Any, Callable, Generator


def plain_where_it_can(method: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a subclass of another package look at what `super()` returns, or leave it alone.

    Args:
        method: one that may be a generator.

    Returns:
        The method, begun at once: a generator only comes of it where something is asked for.
    """

    @functools.wraps(method)
    def begun(*arguments: Any, **named: Any) -> Any:
        asking = method(*arguments, **named)
        if not isinstance(asking, GeneratorType):
            return asking
        try:
            request = asking.send(None)
        except StopIteration as stop:
            return stop.value
        return _rest(asking, request)

    return begun


def _rest(asking: Generator[Any, Any, Any], request: Any) -> Generator[Any, Any, Any]:
    """What comes of a generator that has asked already."""
    try:
        while True:
            request = asking.send((yield request))
    except StopIteration as stop:
        return stop.value
    finally:
        asking.close()
