"""Operations on whole tensors: norms, finiteness, momentum after averaging."""

from typing import Any, List, Sequence

import torch

from ..lists import in_groups
from . import launches
from .array import DeviceArray
from .programs import dense as programs
from .shared import kernel, same_length


@kernel
def max_abs(calls: List[Any]) -> Sequence[float]:
    """max |x|; infinity where anything is infinite or NaN, 0 for no elements."""
    return launches.magnitudes(largest_magnitudes([call.x for call in calls]))


@kernel
def squared_norm(calls: List[Any]) -> Sequence[float]:
    """Σ x², in float64, to rounding what the CPU's kernels find."""
    norms = [torch.linalg.vector_norm(call.x.tensor, dtype=torch.float64) for call in calls]
    return launches.late(torch.stack(norms), lambda found: [norm**2 for norm in found])


@kernel
def apply_momentum(calls: List[Any]) -> Sequence[bool]:
    """new_u ← m·u + out, then out ← new_u, or out + m·new_u for Nesterov. Where `out` is not finite
    everywhere, nothing is written. Returns whether out, before and after, and new_u are finite.
    ValueError where lengths differ."""
    for call in calls:
        same_length(out=call.out, u=call.u, new_u=call.new_u)
    return in_groups(calls, lambda call: call.nesterov, _moved)


def _moved(calls: List[Any]) -> Sequence[bool]:
    before = largest_magnitudes([call.out for call in calls])
    rows = [
        (call.out.size, call.out.tensor, call.u.tensor, call.new_u.tensor, float(call.momentum))
        for call in calls
    ]
    return are_finite(
        launches.largest(programs.average_momentum, rows, before, NESTEROV=calls[0].nesterov)
    )


def largest_magnitudes(arrays: Sequence[DeviceArray]) -> torch.Tensor:
    """Of each array the largest magnitude, as bits, on the device."""
    return launches.largest(programs.find_largest, [(each.size, each.tensor) for each in arrays])


def are_finite(largest: torch.Tensor) -> Sequence[bool]:
    """Returns whether largest magnitudes, as bits, are of finite numbers."""
    return launches.late(largest, lambda found: [bits < launches.INFINITY for bits in found])
