"""Messages that operations of a graph move for a step: one array; of an alltoall the bytes and,
int32, how many go to each rank."""

from typing import Any, List, Sequence

import numpy as np

from ..protocol.requests import Alltoall, Collective

Message = Sequence[np.ndarray]


def dtypes_of(collectives: Sequence[Collective]) -> List[str]:
    """The dtypes of the arrays in messages of these collectives. What the reducer reduces is in
    none."""
    return [
        dtype
        for c in collectives
        if c.verb != "reducer"
        for dtype in ((c.dtype, "int32") if c.verb == "alltoall" else (c.dtype,))
    ]


def message_of(request: Any) -> List[np.ndarray]:
    """The message of a request."""
    if isinstance(request, Alltoall):
        return [request.array, np.array(request.splits, np.int32)]
    return [request.array]


def empty(collectives: Sequence[Collective], size: int) -> List[np.ndarray]:
    """A message of one of these collectives, if any, that brings nothing. size: how many ranks
    there are."""
    # Of an alltoall, nothing to each of the ranks.
    return [np.zeros(size if i else 0, dtype) for i, dtype in enumerate(dtypes_of(collectives))]


def answer_of(request: Any, arrived: Message) -> Any:
    """A request's result, from what its operation brought."""
    if isinstance(request, Alltoall):
        payload, splits = arrived[:2]
        return np.split(payload, np.cumsum(splits)[:-1])
    return arrived[0]
