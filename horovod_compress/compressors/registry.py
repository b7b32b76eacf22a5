"""The algorithms by id, and the specs that name them. A Compressor with an id is found in its file.
Other packages add algorithms as entry points of the group `horovod_compress.compressors`:
`id = "module:Class"`."""

import dataclasses
import functools
import importlib
import inspect
import os
import pkgutil
import warnings
from importlib import metadata
from typing import Any, Dict, List, Optional, Type, Union

from .base import Compressor
from .options import Kind

ENTRY_POINTS = "horovod_compress.compressors"
Spec = Union[str, Dict[str, Any], Compressor]
_RESERVED_IDS = ("auto", "compress", "from_spec")
_RESERVED_OPTIONS = (
    "id",
    "spec",
    "optimizer",
    "named_parameters",
    "process_set",
    "grad_scaler",
    "discardable",
    "traits",
    "policy",
)


def _registry() -> Dict[str, Type[Compressor]]:
    """{id: class} of this package's own algorithms, in the order of their numbers."""
    modules = [
        importlib.import_module(f".{module.name}", __package__)
        for module in pkgutil.iter_modules([os.path.dirname(__file__)])
    ]
    classes = {
        cls
        for module in modules
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, Compressor) and cls.id
    }
    return {str(cls.id): cls for cls in sorted(classes, key=lambda cls: cls.traits.number)}


REGISTRY = _registry()


@functools.lru_cache(maxsize=None)
def _installed() -> Dict[str, List[metadata.EntryPoint]]:
    """{id: entry points} of the algorithms of other packages. An id has several where packages
    clash."""
    points: Any = metadata.entry_points()
    # Python 3.9 has no select.
    points = (
        points.select(group=ENTRY_POINTS)
        if hasattr(points, "select")
        else points.get(ENTRY_POINTS, ())
    )
    found: Dict[str, Dict[str, metadata.EntryPoint]] = {}
    for point in points:
        if point.name in REGISTRY:
            warnings.warn(
                f"horovod_compress has a compressor {point.name!r} of its own: {point.value} is "
                f"not used",
                RuntimeWarning,
                stacklevel=3,
            )
        else:
            found.setdefault(point.name, {})[point.value] = point
    return {id: list(by_value.values()) for id, by_value in found.items()}


def ids() -> List[str]:
    """The ids of all algorithms, those of other packages last."""
    return [*REGISTRY, *sorted(_installed())]


@functools.lru_cache(maxsize=None)
def find(id: str) -> Type[Compressor]:
    """The class of an algorithm. Raises ValueError for an unknown id, and ImportError where another
    package's cannot be used."""
    if id in REGISTRY:
        return REGISTRY[id]
    points = _installed().get(id)
    if not points and id == "auto":
        raise ValueError(
            "auto is no algorithm: in PyTorch it tries several while training begins, where "
            "Compression.auto(candidates=[…]), or for ddp.compress {'id': 'auto', 'candidates': "
            "['none', 'dgc:ratio=0.01']}, says so. As text it is auto, without options. In "
            "TensorFlow name one: `hvdcompress check` says what pays"
        )
    if not points:
        raise ValueError(f"unknown compressor {id!r}; there are: {', '.join(ids())}")
    where = (
        f"the compressor {id!r} is installed as {' and as '.join(point.value for point in points)}"
    )
    if len(points) > 1:
        raise ImportError(f"{where}: uninstall all but one of these packages")
    try:
        cls = points[0].load()
    except Exception as error:
        raise ImportError(f"{where}, which cannot be imported: {error!r}") from error
    wrong = _wrong_with(cls, id)
    if wrong:
        raise ImportError(f"{where}, {wrong}")
    return cls


def _wrong_with(cls: Any, id: str) -> Optional[str]:
    """The reason why a class cannot be the algorithm of that id; None where it can."""
    if not (inspect.isclass(cls) and issubclass(cls, Compressor)):
        return "which is no subclass of horovod_compress.compressors.base.Compressor"
    if cls.id != id:
        return f"whose id is {cls.id!r}"
    if not id.isidentifier() or id.startswith("_") or id in _RESERVED_IDS or hasattr(type, id):
        return "which is no id that works: it must be a Python name, and not " + ", ".join(
            _RESERVED_IDS
        )
    if "__dataclass_params__" not in vars(cls):
        return "which is not decorated as @dataclasses.dataclass(frozen=True, repr=False)"
    for field in dataclasses.fields(cls):
        if not {"kind", "doc"} <= set(field.metadata):
            return (
                f"whose field {field.name} is not made by "
                "horovod_compress.compressors.options.option(…)"
            )
        if field.name in _RESERVED_OPTIONS:
            return (
                f"whose option {field.name} has the name of an argument of compressions: "
                "call it something else"
            )
    return None


def package_of(id: str) -> Optional[str]:
    """The name and version of the package that an algorithm comes from; None for this package's
    own, for an unknown id, and in Python 3.9, which does not tell it."""
    points = () if id in REGISTRY else _installed().get(id, ())
    package = getattr(points[0], "dist", None) if points else None  # unknown in Python 3.9
    return package and f"{package.name} {package.version}"


def collective_of(compressor: Compressor) -> str:
    """The collective that moves payloads: "allgather", or "allreduce" where they are summed, by us
    or by the reducer."""
    return "allgather" if compressor.collectives(2)[-1].verb == "allgather" else "allreduce"


def available() -> Dict[str, Dict[str, Any]]:
    """Describes every algorithm.

    Returns:
        By id a dict of "collective", "paper" and "options", which has by name a dict of "default",
        "values" and "doc". Algorithms of other packages that cannot be imported are left out, with
        a warning.

    Examples:
        >>> import horovod_compress as hc
        >>> hc.available()["powersgd"]["collective"]
        'allreduce'
        >>> hc.available()["powersgd"]["options"]["rank"]["default"]
        4
    """
    listed = {}
    for id in ids():
        try:
            cls = find(id)
        except ImportError as error:
            warnings.warn(f"horovod_compress: {error}", RuntimeWarning, stacklevel=2)
            continue
        options = {
            f.name: {
                "default": f.default,
                "values": str(f.metadata["kind"]),
                "doc": f.metadata["doc"],
            }
            for f in dataclasses.fields(cls)
        }
        listed[id] = {
            "collective": collective_of(cls()),
            "options": options,
            "paper": cls.traits.paper,
        }
    return listed


def get_compressor(spec: Spec) -> Compressor:
    """The compressor of a spec.

    Args:
        spec: text, {"id": …} with options, or a compressor itself.

    Returns:
        The compressor. Its options are its attributes, and those that differ from the defaults are
        in its repr.

    Raises:
        ValueError: an unknown id or option, and then the valid ones are named, or a value out of
            range or of a wrong type.
        ImportError: an algorithm of another package, which cannot be imported.

    Examples:
        >>> import horovod_compress as hc
        >>> compressor = hc.get_compressor("dgc:ratio=0.01,exclude=embedding*+*.bias")
        >>> compressor
        DGC(exclude=('embedding*', '*.bias'), ratio=0.01)
        >>> compressor.ratio
        0.01
        >>> hc.get_compressor({"id": "dgc", "ratio": 0.01}) == hc.DGC(ratio=0.01)
        True
        >>> hc.get_compressor("dgc:ratio=2")
        Traceback (most recent call last):
        ValueError: dgc: ratio must be a number above 0 and at most 1, not 2.0
    """
    if isinstance(spec, Compressor):
        return spec
    if isinstance(spec, str):
        id, _, text = spec.partition(":")
        options = _parse(find(id.strip()), text)
    elif isinstance(spec, dict) and isinstance(spec.get("id"), str):
        id, options = spec["id"], {k: v for k, v in spec.items() if k != "id"}
    else:
        raise ValueError(
            f"a spec is a string 'id:option=value,…' or a dict with an 'id', not {spec!r}"
        )
    cls = find(id.strip())
    for name in options:
        _kind(cls, name)
    return cls(**options)


def for_gradients(spec: Spec) -> Compressor:
    """As `get_compressor`, where gradients alone will be given. Raises ValueError also for a spec
    that needs samples."""
    compressor = get_compressor(spec)
    moments = compressor.policy.moments
    if moments != "minibatch":
        raise ValueError(
            f"{compressor.id}: moments={moments} needs a model's samples, and here gradients alone "
            "are given: leave out moments, or train with it and look at stats()"
        )
    return compressor


def _kind(cls: Type[Compressor], name: str) -> Kind:
    kinds = {f.name: f.metadata["kind"] for f in dataclasses.fields(cls)}
    if name not in kinds:
        raise ValueError(
            f"{cls.id} has no option {name!r}; its options: {', '.join(kinds) or 'none'}"
        )
    return kinds[name]


def _parse(cls: Type[Compressor], text: str) -> Dict[str, Any]:
    options: Dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(f"{cls.id}: expected option=value, found {part!r}")
        kind = _kind(cls, name)
        if name in options:
            raise ValueError(f"{cls.id}: {name} is given twice")
        try:
            options[name] = kind.parse(value)
        except ValueError:
            raise ValueError(f"{cls.id}: {name} must be {kind}, not {value!r}") from None
    return options
