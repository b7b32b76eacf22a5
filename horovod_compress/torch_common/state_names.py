"""Names of parameters in saved states, where a wrapper came or went between saving and loading."""

from typing import Any, Callable, Collection, Dict, Iterable, List, Set, Tuple

from ..engine.names import bare_name

# DistributedDataParallel, DataParallel and AveragedModel put one here; users may have such modules.
_WRAPPED = "module"
_BY_NAME = ("tensors", "dense_until", "factors", "shards", "shared", "momentum")


def renamed(state: Any, names: Iterable[str], others: Collection[str] = ()) -> Any:
    """A state whose tensors have the names that they have here, for wrappers of the model or parts.

    Args:
        state: a state_dict, or a list of all ranks'. Anything else is returned as it is, for those
            to refuse who read it.
        names: those of the tensors here.
        others: those of the model's parameters that have no tensor here.

    Returns:
        The state, or a copy that shares its arrays; unchanged where it is not certain which is
        which.
    """
    if isinstance(state, (list, tuple)):
        return [renamed(each, names, others) for each in state]
    return rekeyed(state, renaming(state, names, others))


def renaming(state: Any, names: Iterable[str], others: Collection[str] = ()) -> Dict[str, str]:
    """{a name in the state: the name here}, of those that differ, as `renamed` takes them.

    Args:
        state, names, others: as for `renamed`, of one rank.

    Returns:
        An empty dict where nothing is to be renamed.
    """
    tensors = state.get("tensors") if isinstance(state, dict) else None
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        return {}
    saved, here = list(tensors), list(names)
    # What stands under the name of another parameter was saved when that one was trained.
    if set(saved) == set(here) or set(_bare(saved)) & set(_bare(others)):
        return {}
    ways: Tuple[Callable[[List[str]], List[str]], ...] = (_bare, _unwrapped)
    for way in ways:
        found = dict(zip(way(here), here))
        keys = way(saved)
        if len(found) == len(here) == len(set(keys)) == len(saved) and found.keys() == set(keys):
            return {name: found[key] for name, key in zip(saved, keys) if found[key] != name}
    return {}


def rekeyed(state: Any, found: Dict[str, str]) -> Any:
    """A copy of a state whose parts by tensor are under other names: found[name]."""
    if not found:
        return state
    parts = {key: state[key] for key in _BY_NAME if isinstance(state.get(key), dict)}
    named = {key: {found.get(k, k): v for k, v in part.items()} for key, part in parts.items()}
    return {**state, **named}


def _bare(names: Iterable[str]) -> List[str]:
    return list(map(bare_name, names))


def _unwrapped(names: List[str]) -> List[str]:
    """Names without wrappers. A module is one where its parent has nothing else that is named."""
    paths = [name.split(".") for name in _bare(names)]
    children: Dict[Tuple[str, ...], Set[Tuple[str, bool]]] = {}
    for path in paths:
        for depth, part in enumerate(path):
            is_parameter = depth == len(path) - 1
            children.setdefault(tuple(path[:depth]), set()).add((part, is_parameter))
    wrappers = {parent for parent, parts in children.items() if parts == {(_WRAPPED, False)}}
    return [
        ".".join(part for depth, part in enumerate(path) if tuple(path[:depth]) not in wrappers)
        for path in paths
    ]
