"""Arguments by position that go by name, which keep working with a DeprecationWarning."""

import functools
import inspect
import sys
import warnings
from typing import Any, Callable, TypeVar, cast

_PACKAGE = __name__.partition(".")[0]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def by_name(function: _Function) -> _Function:
    """Lets a function take its keyword-only arguments by position too, in their order, with a
    DeprecationWarning.

    Args:
        function: one with keyword-only arguments that could once be given by position.

    Returns:
        The function for both spellings, with the signature of the new one.
    """
    parameters = list(inspect.signature(function).parameters.values())
    names = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    by_position = len(parameters) - len(names)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        old = dict(zip(names, arguments[by_position:]))
        # Python itself refuses too many arguments, and one that is given twice.
        if old and len(arguments) <= len(parameters) and not old.keys() & named.keys():
            warnings.warn(
                f"horovod_compress: give {', '.join(old)} by name: "
                f"{', '.join(f'{name}=…' for name in old)}. By position is deprecated",
                DeprecationWarning,
                stacklevel=_frames_of_package() + 1,
            )
            return function(*arguments[:by_position], **old, **named)
        return function(*arguments, **named)

    return cast(_Function, call)


def _frames_of_package() -> int:
    """How many calls of this package lie between the caller and the user's code."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(_PACKAGE + "."):
        frame, count = frame.f_back, count + 1
    return count - 1
