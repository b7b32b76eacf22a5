"""Sparse payloads: decoded on the CPU, added on the device."""

from typing import Any, List, Optional, Tuple, Union

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
    found_indices, found_values, errors = zip(*map(_entries, calls))
    device, counts = calls[0].out.tensor.device, list(map(len, found_indices))
    indices, values = (launches.copied(each, device) for each in (found_indices, found_values))
    rows = [
        (count, call.out.tensor, float(call.scale), start)
        for count, call, start in zip(counts, calls, starts_of(counts))
    ]
    finite = are_finite(launches.largest(programs.add_entries, rows, indices, values))
    return [error or result for error, result in zip(errors, finite)]


def _entries(call: Any) -> Tuple[np.ndarray, np.ndarray, Optional[ValueError]]:
    """(indices, values, None), or no entries and what is wrong with the body."""
    try:
        indices, values = cpu.decode_sparse(call.body, numel=call.out.size)
        return indices, values, None
    except ValueError as error:
        return np.empty(0, np.uint32), np.empty(0, np.float32), error
