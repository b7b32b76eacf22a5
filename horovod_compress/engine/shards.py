"""Tensors of which ranks keep parts: what a state says of those, {tensor: Shard} as "shards" in its
header, and its arrays, from parts to whole tensors and back."""

import collections
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from ..compressors.wrapper import Shard, shard_of
from ..protocol.handshake import shown
from .averaging import Arrays
from .tensor import DEBT, Tensor


def of_tensors(tensors: Iterable[Tensor]) -> Dict[str, List[int]]:
    """What a state's header says of these."""
    found = ((tensor.name, shard_of(tensor.compressor)) for tensor in tensors)
    return {name: list(shard) for name, shard in found if shard is not None}


def refuse_missing(of_ranks: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Raises ValueError where all ranks' parts do not make tensors up."""
    for name in of_ranks[0]:
        shards = [Shard(*its[name]) for its in of_ranks]
        found = collections.Counter((shard.first, shard.last) for shard in shards)
        numel, ranks = shards[0].numel, shards[0].ranks
        starts = [*(first for first, _ in sorted(found)), numel]
        ends = [0, *(last for _, last in sorted(found))]
        if starts != ends or len(found) != ranks or set(found.values()) != {len(shards) / ranks}:
            (where,), (said,) = shown(f"shards.{name}"), shown(sorted(found))
            raise ValueError(
                f"the states of all ranks do not belong together: {where} is {said}, which are not "
                f"{ranks} parts of {numel} elements on each host. Load the states that one job has "
                "saved"
            )


def shape(array: np.ndarray, shard: Optional[Sequence[int]]) -> Tuple[int, ...]:
    """That of a tensor's array, were it of the whole tensor."""
    return (shard[2],) if shard and _is_part(array, shard) else array.shape


def whole(arrays: Arrays, shards: Mapping[str, Sequence[int]]) -> Arrays:
    """A rank's arrays, as long as its tensors. They are zero outside of its parts: means over ranks
    are then what results are still to bring."""

    def filled(array: np.ndarray, shard: Optional[Sequence[int]]) -> np.ndarray:
        return Shard(*shard).whole(array) if shard and _is_part(array, shard) else array

    return {
        name: {key: filled(array, shards.get(name)) for key, array in named.items()}
        for name, named in arrays.items()
    }


def own(tensor: Tensor, arrays: Dict[str, np.ndarray]) -> Dict[str, np.ndarray]:
    """A rank's part of means over ranks of a tensor's whole arrays."""
    shard = shard_of(tensor.compressor)
    if shard is None:
        return arrays
    # A rank keeps its part for all ranks of its machine, but what is its own as it is.
    return {
        key: shard.ranks * array[shard.first : shard.last]
        if key != DEBT and array.shape == (shard.numel,)
        else array
        for key, array in arrays.items()
    }


def _is_part(array: np.ndarray, shard: Sequence[int]) -> bool:
    return array.shape == (shard[1] - shard[0],)
