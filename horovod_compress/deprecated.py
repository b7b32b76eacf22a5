"""Old spellings, which keep working with a DeprecationWarning."""

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


def renamed(module: str, **names: str) -> None:
    """Has a module's old names lead to the new ones, with a DeprecationWarning.

    Args:
        module: its `__name__`.
        names: the new names, by the old ones.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_of_old(f"{module}.{name}", names[name])
        return getattr(sys.modules[module], names[name])

    # Not as a function of that name, because type checkers would then accept any attribute.
    vars(sys.modules[module])["__getattr__"] = find


def warn_of_old(old: str, new: str, frames: int = 0) -> None:
    """Warns the user's code of an old name.

    Args:
        old: what is deprecated.
        new: what to write instead.
        frames: calls between the user's code and this package that are of neither.
    """
    warnings.warn(
        f"horovod_compress: {old} is deprecated: write {new}",
        DeprecationWarning,
        stacklevel=_frames_of_package() + frames + 1,
    )


def _frames_of_package() -> int:
    """How many calls of this package lie between the caller and the user's code."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(_PACKAGE + "."):
        frame, count = frame.f_back, count + 1
    return count - 1
