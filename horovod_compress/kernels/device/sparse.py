"""Sparse payloads: decoded on the CPU, added on the device."""

from typing import Any, List, Sequence

from .. import cpu
from . import launches
from .dense import are_finite
from .programs import sparse as programs
from .shared import kernel, starts_of


@kernel
def decode_add_sparse(calls: List[Any]) -> Sequence[bool]:
    """out[indices] += scale·values of a sparse body, in place. ValueError, and nothing added, for
    an invalid body. Returns whether the new elements are finite."""
    found = cpu.decode_sparse(
        [call.body for call in calls], numel=[call.out.size for call in calls]
    )
    device, counts = calls[0].out.device, [len(indices) for indices, _ in found]
    indices, values = (launches.copied(each, device) for each in zip(*found))
    rows = [
        (count, call.out.tensor, float(call.scale), start)
        for count, call, start in zip(counts, calls, starts_of(counts))
    ]
    return are_finite(launches.largest(programs.add_entries, rows, indices, values))
