"""One algorithm a file; a file that defines a Compressor with an id is found by it. Specs become compressors here."""
import dataclasses
import importlib
import inspect
import pkgutil

from .base import Compressor


def _registry():
    found = {}
    for module in pkgutil.iter_modules(__path__):
        for _, cls in inspect.getmembers(importlib.import_module(f"{__name__}.{module.name}"), inspect.isclass):
            if issubclass(cls, Compressor) and cls.id:
                found[cls.id] = cls
    return dict(sorted(found.items(), key=lambda item: item[1].number))


REGISTRY = _registry()


def available():
    """{id: {"road", "options": {name: {"default", "values", "doc"}}, "paper"}} for every algorithm."""
    return {
        id: {
            "road": cls.road,
            "options": {
                f.name: {"default": f.default, "values": str(f.metadata["kind"]), "doc": f.metadata["doc"]}
                for f in dataclasses.fields(cls)
            },
            "paper": cls.paper,
        }
        for id, cls in REGISTRY.items()
    }


def get_compressor(spec):
    """The compressor of a spec: "dgc:ratio=0.001,momentum=0.9", or {"id": "dgc", "ratio": 0.001}, or a compressor itself.

    Raises ValueError for an unknown id or option, naming the valid ones, and for a value out of range or of a wrong type.
    """
    if isinstance(spec, Compressor):
        return spec
    if isinstance(spec, str):
        id, _, text = spec.partition(":")
        options = _parse(_find(id.strip()), text)
    elif isinstance(spec, dict) and isinstance(spec.get("id"), str):
        id, options = spec["id"], {k: v for k, v in spec.items() if k != "id"}
    else:
        raise ValueError(f"a spec is a string 'id:option=value,…' or a dict with an 'id', not {spec!r}")
    cls = _find(id.strip())
    _check_names(cls, options)
    return cls(**options)


def _find(id):
    try:
        return REGISTRY[id]
    except KeyError:
        raise ValueError(f"unknown compressor {id!r}; there are: {', '.join(REGISTRY)}") from None


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
