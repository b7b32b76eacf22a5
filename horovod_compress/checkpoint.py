"""A compression's state in and out: plain values and arrays, of one rank."""
import numbers
from typing import Any, Callable, Dict, Iterable, Optional, Tuple

import numpy as np

from .handshake import first_difference
from .step import Tensor

Difference = Optional[Tuple[str, Any, Any]]
_FORMAT = 1


def saved(identity: Dict[str, Any], tensors: Iterable[Tensor], step: Any, unit: float) -> Dict[str, Any]:
    """A state_dict: what `identity` says of algorithm and rank, and copies of the tensors' arrays, without the loss scale `unit`."""
    tensors = list(tensors)
    return {
        "format": _FORMAT,
        **identity,
        "step": step,
        "dense_until": {tensor.name: tensor.dense_until for tensor in tensors},
        "tensors": {t.name: {key: array / _unit(t, key, unit) for key, array in t.state.arrays.items()} for t in tensors},
    }


def checked(state: Any, identity: Dict[str, Any], wrong_step: Callable[[Any], Difference]) -> Tuple[Dict[str, Dict[str, np.ndarray]], Any]:
    """(arrays by tensor, step) of a state_dict. ValueError for one of another algorithm, seed, rank or number of ranks."""
    expected = {"format": _FORMAT, **identity}
    try:
        found = {key: state[key] for key in expected}
        arrays = {name: {key: np.asarray(a) for key, a in named.items()} for name, named in state["tensors"].items()}
        step = state["step"]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not a state_dict of a compression: {error!r}") from None
    refuse(first_difference(expected, found) or wrong_step(step) or _wrong_dense_until(state))
    return arrays, step


def restore(tensors: Iterable[Tensor], arrays: Dict[str, Dict[str, np.ndarray]], unit: float) -> None:
    """Copies a state's arrays into the tensors', under the loss scale `unit`. ValueError, and nothing changed, where they do not fit."""
    tensors = list(tensors)
    refuse(first_difference(_layout({t.name: t.state.arrays for t in tensors}), _layout(arrays)))
    for tensor in tensors:
        for key, array in tensor.state.arrays.items():
            np.multiply(arrays[tensor.name][key], _unit(tensor, key, unit), out=array)


def dense_until(state: Dict[str, Any], name: str) -> int:
    """The step in a state_dict until which a tensor goes dense; files of before that have none."""
    return state.get("dense_until", {}).get(name, 0)


def wrong_count(where: str, number: Any) -> Difference:
    """The difference to a whole number of steps, if there is one."""
    whole = isinstance(number, numbers.Integral) and not isinstance(number, bool)
    return None if whole and number >= 0 else (where, "a whole number", number)


def refuse(difference: Difference) -> None:
    """Raises ValueError for a difference between a state and what it is loaded into."""
    if difference:
        where, expected, found = difference
        raise ValueError(
            f"this state does not fit: {where} is {found} in it and {expected} here. A compression's state belongs to one rank: "
            "save and load one file a rank, at the same number of ranks and with the same model"
        )


def _unit(tensor: Tensor, key: str, unit: float) -> np.float32:
    """What a 1 in this array stands as, under the loss scale."""
    return np.float32(unit ** tensor.compressor.kept[key].degree)


def _wrong_dense_until(state: Dict[str, Any]) -> Difference:
    until = state.get("dense_until", {})
    good = isinstance(until, dict) and not any(wrong_count(name, step) for name, step in until.items())
    return None if good else ("dense_until", "steps by tensor", until)


def _layout(arrays: Dict[str, Dict[str, np.ndarray]]) -> Dict[str, Dict[str, str]]:
    return {name: {k: f"{a.dtype} of {a.shape}" for k, a in named.items()} for name, named in arrays.items()}
