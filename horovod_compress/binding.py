"""What the adapters of both frameworks share: a method for each algorithm, and what all ranks must have alike."""
import dataclasses
import functools
import inspect

from . import wire
from .compressors import find, ids, package_of
from .handshake import kernels_in_use
from .version import __version__


class Algorithms(type):
    """The metaclass of a framework's `Compression`: gives it one method an algorithm, those of other packages included.

    `Compression.dgc(optimizer, ratio=0.01)` is `Compression.from_spec({"id": "dgc", "ratio": 0.01}, optimizer)`. Given to Horovod
    uncalled, the class and its methods say in `compress` what is missing.
    """

    def __getattr__(cls, id):
        try:
            if id.startswith("_"):
                raise ValueError(f"type object {cls.__name__!r} has no attribute {id!r}")
            return _factory(cls, find(id))
        except (ValueError, ImportError) as error:
            raise AttributeError(str(error)) from error

    def __dir__(cls):
        return sorted({*super().__dir__(), *ids()})


@functools.lru_cache(maxsize=None)
def _factory(compression, algorithm):
    """The function that makes a compression of an algorithm, with its options among its arguments, for editors to show."""
    arguments = dict(inspect.signature(compression.from_spec).parameters)
    del arguments["spec"]

    def make(*args, **keywords):
        options = {name: keywords.pop(name) for name in list(keywords) if name not in arguments and name != "id"}
        return compression.from_spec({"id": algorithm.id, **options}, *args, **keywords)

    fields = dataclasses.fields(algorithm)
    options = [inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.type) for f in fields]
    make.__signature__ = inspect.Signature([*arguments.values(), *options])
    make.__module__, make.__name__, make.__qualname__ = compression.__module__, algorithm.id, f"{compression.__qualname__}.{algorithm.id}"
    told = [f"    {f.name}: {f.metadata['doc']}; {f.metadata['kind']}" for f in fields]
    make.__doc__ = "\n".join([inspect.cleandoc(algorithm.__doc__ or ""), "", "Options:", *told, "", "Other arguments: see BoundCompression."])
    make.compress = compression.compress
    return make


def description_of(compressor):
    """What all ranks must have alike, whatever the framework: nested JSON-able values."""
    package = package_of(compressor.id)
    return {
        "version of horovod-compress": __version__,
        "wire version": wire.VERSION,
        "options": compressor.config,
        **({f"package of {compressor.id}": package} if package else {}),
        **kernels_in_use(compressor),
    }
