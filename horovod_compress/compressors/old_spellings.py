"""Compressors of other packages that were written for an earlier contract: what is taken over, and
what is refused with what is in its place."""

from typing import Any

from ..deprecated import warn_of_old

# Methods that compressors once had, and what is to be done instead.
_GONE = {
    frozenset({"as_gradient", "owed", "owes_results", "take_over"}): (
        "a switch hands on what `residual` returns, and an array u with the momentum `m`"
    ),
    frozenset({"end_step"}): "override `commit`, `rollback` or `forget_sent`",
    frozenset({"for_part", "split", "with_options", "collective"}): (
        "hosts=true and exchange=split stand around an algorithm, and ask it for nothing more"
    ),
}


def refuse(cls: type) -> None:
    """TypeError for a compressor's class with methods that nothing calls any more."""
    for gone, instead in _GONE.items():
        found = sorted(vars(cls).keys() & gone)
        if found:
            raise TypeError(
                f"{cls.__name__} has {', '.join(found)}, which nothing calls any more: {instead}"
            )


def follow(cls: Any, base: type) -> None:
    """Takes over, with a DeprecationWarning, what a compressor's class says as they once did.

    They had `kept` for their `roles`. They, or what they are mixed with, had attributes of their
    own for what `traits` says now.

    Args:
        cls: the class, whose attributes change.
        base: `Compressor`.

    Raises:
        TypeError: what is no plain value.
    """
    # Warnings are for the class's own line, behind ABCMeta's frame.
    if "kept" in vars(cls):
        warn_of_old(f"{cls.__name__}.kept", "roles", frames=1)
        cls.roles = vars(cls)["kept"]
    mixed = [each for each in cls.__mro__ if each is cls or not issubclass(each, base)]
    found = {
        name: vars(each)[name]
        for each in reversed(mixed)
        for name in cls.traits._fields
        if name in vars(each)
    }
    for name, value in found.items():
        if hasattr(type(value), "__get__"):
            raise TypeError(
                f"{cls.__name__}: {name} must be a plain value: write traits = Traits({name}=…)"
            )
    if found:
        names = ", ".join(f"{name}=…" for name in found)
        old = f"{cls.__name__} has attributes of its own for what its `traits` say, which"
        warn_of_old(old, f"traits = Traits({names})", frames=1)
        cls.traits = cls.traits._replace(**found)
