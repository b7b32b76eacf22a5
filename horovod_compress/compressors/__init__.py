"""One algorithm a file; a file that defines a Compressor with an id is found by it. Specs become compressors here.

Other packages add algorithms under the entry points `horovod_compress.compressors`: `id = "module:Class"`.
"""
import dataclasses
import functools
import importlib
import inspect
import pkgutil
import warnings
from importlib import metadata

from .base import Compressor

ENTRY_POINTS = "horovod_compress.compressors"


def _registry():
    """{id: class} of this package's own algorithms, in the order of their numbers."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for _, cls in inspect.getmembers(importlib.import_module(f"{__name__}.{module.name}"), inspect.isclass):
            if issubclass(cls, Compressor) and cls.id:
                found[cls.id] = cls
    return dict(sorted(found.items(), key=lambda item: item[1].number))


REGISTRY = _registry()


@functools.lru_cache(maxsize=None)
def _installed():
    """{id: entry point} of the algorithms of other packages."""
    found = metadata.entry_points()
    found = found.select(group=ENTRY_POINTS) if hasattr(found, "select") else found.get(ENTRY_POINTS, ())  # Python 3.9 has no select
    return {point.name: point for point in found if point.name not in REGISTRY}


def ids():
    """The ids of all algorithms, those of other packages last."""
    return [*REGISTRY, *sorted(_installed())]


@functools.lru_cache(maxsize=None)
def find(id):
    """The class of an algorithm. ValueError for an id that is not there, ImportError where another package's cannot be had."""
    if id in REGISTRY:
        return REGISTRY[id]
    if id not in _installed():
        raise ValueError(f"unknown compressor {id!r}; there are: {', '.join(ids())}")
    point = _installed()[id]
    try:
        cls = point.load()
    except Exception as error:
        raise ImportError(f"the compressor {id!r} is installed as {point.value}, which cannot be imported: {error!r}") from error
    if not (inspect.isclass(cls) and issubclass(cls, Compressor) and cls.id == id):
        raise ImportError(f"the compressor {id!r} is installed as {point.value}, which is no subclass of Compressor with that id")
    return cls


def package_of(id):
    """The package, with its version, that another package's algorithm comes from; None for this one's own."""
    package = getattr(_installed().get(id), "dist", None)
    return package and f"{package.name} {package.version}"


def _all():
    for id in ids():
        try:
            yield id, find(id)
        except ImportError as error:
            warnings.warn(f"horovod_compress: {error}", RuntimeWarning, stacklevel=3)


def available():
    """{id: {"road", "options": {name: {"default", "values", "doc"}}, "paper"}} for every algorithm. Those of other packages that
    cannot be imported are left out, with a warning."""
    return {
        id: {
            "road": cls.road,
            "options": {
                f.name: {"default": f.default, "values": str(f.metadata["kind"]), "doc": f.metadata["doc"]}
                for f in dataclasses.fields(cls)
            },
            "paper": cls.paper,
        }
        for id, cls in _all()
    }


def get_compressor(spec):
    """The compressor of a spec: "dgc:ratio=0.001,momentum=0.9", or {"id": "dgc", "ratio": 0.001}, or a compressor itself.

    Raises ValueError for an unknown id or option, naming the valid ones, and for a value out of range or of a wrong type;
    ImportError for an algorithm of another package that cannot be imported.
    """
    if isinstance(spec, Compressor):
        return spec
    if isinstance(spec, str):
        id, _, text = spec.partition(":")
        options = _parse(find(id.strip()), text)
    elif isinstance(spec, dict) and isinstance(spec.get("id"), str):
        id, options = spec["id"], {k: v for k, v in spec.items() if k != "id"}
    else:
        raise ValueError(f"a spec is a string 'id:option=value,…' or a dict with an 'id', not {spec!r}")
    cls = find(id.strip())
    _check_names(cls, options)
    return cls(**options)


def _check_names(cls, names):
    valid = [f.name for f in dataclasses.fields(cls)]
    for name in names:
        if name not in valid:
            raise ValueError(f"{cls.id} has no option {name!r}; its options: {', '.join(valid) or 'none'}")


def _parse(cls, text):
    options = {}
    kinds = {f.name: f.metadata["kind"] for f in dataclasses.fields(cls)}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(f"{cls.id}: expected option=value, found {part!r}")
        _check_names(cls, [name])
        if name in options:
            raise ValueError(f"{cls.id}: {name} is given twice")
        try:
            options[name] = kinds[name].parse(value)
        except ValueError:
            raise ValueError(f"{cls.id}: {name} must be {kinds[name]}, not {value!r}") from None
    return options
