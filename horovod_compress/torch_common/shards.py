"""The parts of parameters that this rank keeps, where fully_shard has cut those: DTensors. Here a
shard is what a rank holds of all parameters; its replicas are the ranks that hold the same."""

from typing import Any, Dict, Iterable, List, Mapping, Tuple

import torch

from ..compressors.state import SHARED, Role
from ..engine.tensors import Tensors

# Of the arrays that are alike on all replicas: the same number for all shards, and one that has a
# number for each element.
_RATE, _MOMENTUM = "lr", "u"


class ShardShape(Tuple[int, ...]):
    """The shape of the part of a tensor that a rank keeps, and the rank's replicas too. Ranks with
    the other parts are not among those that exchange.

    Attributes:
        whole: the tensor's own shape.
    """

    whole: Tuple[int, ...]

    def __new__(cls, shape: Iterable[int], whole: Tuple[int, ...]) -> "ShardShape":
        made = super().__new__(cls, tuple(shape))
        made.whole = whole
        return made


def is_shard(tensor: Any) -> bool:
    """Returns whether a tensor is a DTensor. No other type is looked for, because importing that
    one takes long."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local(tensor: Any) -> Any:
    """The part of a tensor that this rank keeps, in its own memory: the tensor itself, where it is
    whole."""
    return tensor.to_local() if is_shard(tensor) else tensor


def shape_of(param: torch.Tensor) -> Tuple[int, ...]:
    """The shape of the part that this rank keeps, with the parameter's own where that differs."""
    whole = tuple(param.shape)
    return ShardShape(local(param).shape, whole) if is_shard(param) else whole


def like(part: torch.Tensor, param: Any) -> torch.Tensor:
    """A DTensor with this rank's part, cut as a parameter is; the part itself, where that is
    whole."""
    if not is_shard(param):
        return part
    return type(param).from_local(
        part.view(local(param).shape),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def any_not_zero(grads: Iterable[Any]) -> bool:
    """Returns whether some element of this rank's parts is not 0. Waits once for a device."""
    found = [local(grad).any() for grad in grads]
    return bool(found) and bool(torch.stack(found).any())


def meshes_of(params: Iterable[Any]) -> List[Any]:
    """The meshes over which parameters were cut, each once."""
    return list(dict.fromkeys(param.device_mesh for param in params if is_shard(param)))


def place_of(param: Any) -> Dict[str, str]:
    """Words by which ranks and states tell shards of a parameter apart; none where it is whole."""
    if not is_shard(param):
        return {}
    mesh = param.device_mesh
    cuts = ", ".join(map(str, param.placements))
    return {"shard": f"{_shown(mesh.get_coordinate())} of {_shown(mesh.shape)} by {cuts}"}


def _shown(numbers: Iterable[int]) -> str:
    return "×".join(map(str, numbers))


def _places(params: Mapping[str, Any]) -> Dict[str, str]:
    """`place_of` all parameters, for a state."""
    found = {place["shard"] for place in map(place_of, params.values()) if place}
    return {"shard": "; ".join(sorted(found))} if found else {}


def as_saved(
    state: Dict[str, Any], params: Mapping[str, torch.Tensor], here: Tensors
) -> Dict[str, Any]:
    """A state of NumPy arrays, with tensors of their memory. A rank's own says of which shard it
    is. In a portable one arrays with a number for each element are DTensors, which
    torch.distributed.checkpoint cuts anew; what else a shard has begins anew where it is loaded.

    Args:
        state: as of `Driver.state_dict`, or `checkpoint.portable`.
        params: the parameters by name.
        here: the tensors that have it.
    """
    tensors = {
        name: {key: torch.from_numpy(array) for key, array in arrays.items()}
        for name, arrays in state["tensors"].items()
    }
    places = _places(params)
    if state["rank"] is not None or not places:
        return {**state, "tensors": tensors, **places}
    # For one replica alone, which has no tensors to load.
    holds_back = any(tensors.values())
    for name, arrays in tensors.items():
        param, roles = params[name], here[name].compressor.roles
        if is_shard(param):
            tensors[name] = {
                key: its if key == _RATE else like(its, param)
                for key, its in arrays.items()
                if not _begins_anew(key, roles)
            }
    # Shards differ in it.
    measured = dict.fromkeys(state["dense_until"], 0)
    return {**state, "tensors": tensors, "dense_until": measured, "holds_back": holds_back}


def as_here(
    state: Any, params: Mapping[str, torch.Tensor], here: Tensors, refused_alone: str
) -> Any:
    """A state of this shard, with flat arrays, as `Driver.load_state_dict` takes it.

    Args:
        state: as `as_saved` has made it, or a list of all ranks'. What is none is returned as it
            is, for those to refuse who read it.
        params: the parameters by name.
        here: the tensors that are to have it.
        refused_alone: why one replica alone cannot load what several had to send.

    Raises:
        ValueError: it is of another shard, or that.
    """
    own = _places(params)
    if isinstance(state, (list, tuple)):
        # What is no state is left to those who read them.
        its = [each for each in state if not isinstance(each, dict) or _is_of(own, each)]
        if state and not its:
            raise ValueError(
                f"none of these {len(state)} states is of shard {own.get('shard', 'whole')}: load "
                "on each rank those of its own shard, or one that was saved with portable=True"
            )
        return [as_here(each, params, here, refused_alone) for each in its]
    if not isinstance(state, dict) or not isinstance(state.get("tensors"), dict):
        return state
    portable = state.get("rank", 0) is None
    if not portable and not _is_of(own, state):
        raise ValueError(
            f"this state is of shard {state.get('shard', 'whole')}, and this rank has shard "
            f"{own.get('shard', 'whole')}: load what this rank has saved, or a state that was "
            "saved with portable=True"
        )
    if not portable or not own:
        return state
    if state.get("holds_back") and not list(here):
        raise ValueError(refused_alone)
    tensors = {
        name: _flat_arrays(name, arrays, params.get(name), here)
        for name, arrays in state["tensors"].items()
    }
    return {**state, "tensors": tensors}


def _is_of(own: Dict[str, str], state: Dict[str, Any]) -> bool:
    return state.get("shard") == own.get("shard")


def _flat_arrays(name: str, arrays: Any, param: Any, here: Tensors) -> Any:
    """The arrays of a parameter from a portable state."""
    if not isinstance(arrays, dict):
        return arrays
    found = {}
    for key, its in arrays.items():
        cut = is_shard(its) and is_shard(param)
        if cut and (its.device_mesh, its.placements) != (param.device_mesh, param.placements):
            raise ValueError(
                f"this state does not fit: {key} of {name} is cut as on "
                f"{place_of(its)['shard']}, and its parameter is as on {place_of(param)['shard']}: "
                "load the file by torch.distributed.checkpoint.load into what "
                "state_dict(portable=True) returns here, which cuts it anew"
            )
        found[key] = local(its).reshape(-1).cpu().numpy() if is_shard(its) else its
    if name in here:
        tensor = here[name]
        for key, array in tensor.state.arrays.items():
            if _begins_anew(key, tensor.compressor.roles):
                found.setdefault(key, array)
    return found


def _begins_anew(key: str, roles: Mapping[str, Role]) -> bool:
    """Returns whether an array is a shard's as a whole, so that it cannot be cut anew."""
    return roles.get(key) is SHARED and key not in (_RATE, _MOMENTUM)
