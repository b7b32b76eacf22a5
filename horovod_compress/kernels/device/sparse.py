"""Sparse payloads: decoded on the CPU, added on the device."""

from typing import Any, List, Tuple, Union

import numpy as np

from .. import cpu
from . import launches
from .dense import are_finite
from .programs import sparse as programs
from .shared import Kernel, starts_of


@Kernel
def decode_add_sparse(calls: List[Any]) -> List[Union[bool, ValueError]]:
    """out[indices] += scale·values of a sparse body, in place. ValueError, and nothing changed, for
    an invalid body. Returns whether the new elements are finite."""
    decoded = [_entries(call) for call in calls]
    entries = [
        (np.empty(0, np.uint32), np.empty(0, np.float32)) if isinstance(each, ValueError) else each
        for each in decoded
    ]
    device, counts = calls[0].out.tensor.device, [len(indices) for indices, _ in entries]
    indices, values = (launches.copied(arrays, device) for arrays in zip(*entries))
    rows = [
        (count, call.out.tensor, float(call.scale), start)
        for count, call, start in zip(counts, calls, starts_of(counts))
    ]
    finite = are_finite(launches.largest(programs.add_entries, rows, indices, values))
    return [
        each if isinstance(each, ValueError) else result for each, result in zip(decoded, finite)
    ]


def _entries(call: Any) -> Union[Tuple[np.ndarray, np.ndarray], ValueError]:
    try:
        return cpu.decode_sparse(call.body, numel=call.out.size)
    except ValueError as error:
        return error
