"""Factories of compressions: a method for each algorithm, on the class `Compression` of a
framework.

`Compression` of each framework has a generated stub beside it, `factories.pyi`, for editors and
type checkers. After a change here, in `factories.py` of a framework or in an algorithm's options
run `scripts/stubs.py`.
"""

import dataclasses
import functools
import inspect
import reprlib
import textwrap
from typing import Any, Callable, Dict, List, Tuple, Type

from ..compressors import find, ids
from ..compressors.base import Compressor


class Algorithms(type):
    """The metaclass of a framework's `Compression`: gives it one method for each algorithm, those
    of other packages included.

    `Compression.dgc(optimizer, ratio=0.01)` is `Compression.from_spec({"id": "dgc", "ratio": 0.01},
    optimizer)`.
    """

    # Of the class: makes the compression of a spec.
    from_spec: Any

    def __init__(cls, name: str, bases: Tuple[type, ...], members: Dict[str, Any]) -> None:
        super().__init__(name, bases, members)
        for maker in {"from_spec", "auto"} & members.keys():
            getattr(cls, maker).compress = cls.compress

    def compress(cls, tensor: Any) -> None:
        """Raises TypeError: a user has passed Compression.dgc instead of Compression.dgc()."""
        raise TypeError(
            "this is no compression yet: call it, as in compression=hvdc.Compression.dgc()"
        )

    def __getattr__(cls, id: str) -> Callable[..., Any]:
        try:
            if id.startswith("_"):
                raise ValueError(f"type object {cls.__name__!r} has no attribute {id!r}")
            return _factory(cls, find(id))
        except (ValueError, ImportError) as error:
            raise AttributeError(str(error)) from error

    def __dir__(cls) -> List[str]:
        return sorted({*super().__dir__(), *ids()})


@functools.lru_cache(maxsize=None)
def _factory(compression: Any, algorithm: Type[Compressor]) -> Callable[..., Any]:
    """The function that makes a compression of an algorithm. Its signature lists the options, for
    editors to show."""
    arguments = dict(inspect.signature(compression.from_spec).parameters)
    del arguments["spec"]

    def make(*args: Any, **keywords: Any) -> Any:
        if len(args) > 1:
            raise TypeError(
                f"{algorithm.id}: the optimizer alone goes by position, and here came "
                f"{reprlib.repr(args[1:])} too; an option goes by its name: ratio=0.01"
            )
        options = {
            name: keywords.pop(name)
            for name in list(keywords)
            if name not in arguments and name != "id"
        }
        return compression.from_spec({"id": algorithm.id, **options}, *args, **keywords)

    options = [
        inspect.Parameter(
            f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type
        )
        for f in dataclasses.fields(algorithm)
    ]
    vars(make).update(
        compress=compression.compress,
        __signature__=inspect.Signature([*arguments.values(), *options]),
    )
    make.__module__, make.__name__, make.__qualname__ = (
        compression.__module__,
        str(algorithm.id),
        f"{compression.__qualname__}.{algorithm.id}",
    )
    make.__doc__ = documentation(inspect.cleandoc(algorithm.__doc__ or ""), algorithm)
    return make


def documentation(text: str, algorithm: Type[Compressor]) -> str:
    """A factory's docstring: a text, and each option of an algorithm."""
    listed = [
        textwrap.fill(
            f"{f.name}: {f.metadata['doc']}; {f.metadata['kind']}",
            width=92,
            initial_indent=" " * 4,
            subsequent_indent=" " * 8,
        )
        for f in dataclasses.fields(algorithm)
    ]
    others = "For arguments that are no options see `BoundCompression`."
    return "\n".join([text, "", others, *(["", "Args:", *listed] if listed else [])])
