"""The contract that a step holds an algorithm to: requests and payloads are those that it has
declared, and ones that all ranks can add to."""

from typing import Any, Sequence

import numpy as np

from ..compressors.base import GATHER, Step
from ..kernels import Encoded
from ..protocol.requests import Allgather, Allreduce, Alltoall, Joint, ToReducer
from .group import Group


def check_request(group: Group, request: Any, size: int) -> None:
    """Checks what a compressor yields before its payload.

    Args:
        group: whose first tensor says what is declared.
        request: what it yields.
        size: the number of ranks.

    Raises:
        TypeError: it is no collective.
        ValueError: it is not declared, or its splits do not fit.
    """
    name, declared = group.compressor.id, group.tensors[0].declared
    if not isinstance(request, (Allreduce, Allgather, Alltoall)):
        raise TypeError(
            f"{name}: encode yields Allreduce, Allgather or Alltoall, not an object of "
            f"{type(request)}"
        )
    if not group.checked and request.collective not in declared:
        raise ValueError(
            f"{name}: encode yields {request.collective}, and `collectives` declares {declared}"
        )
    if isinstance(request, Alltoall) and (
        len(request.splits) != size
        or min(request.splits) < 0
        or sum(request.splits) != request.array.size
    ):
        raise ValueError(
            f"{name}: an alltoall of {request.array.size} bytes on {size} ranks needs {size} "
            f"splits that add up to those, not {list(request.splits)}"
        )


def check_payloads(
    group: Group, payloads: Sequence[Any], grads: Sequence[np.ndarray], steps: Sequence[Step]
) -> None:
    """Checks a group's first payloads.

    Args:
        group: which counts as checked then.
        payloads: those of tensors of the group.
        grads: their gradients' memory.
        steps: what is known of each.

    Raises:
        TypeError: one is no payload, or of another type than others.
        ValueError: one is not declared, or its gradient is not zero.
    """
    group.checked = True
    name, declared = group.compressor.id, group.tensors[0].declared
    for payload, grad, step in zip(payloads, grads, steps):
        if not isinstance(payload, (ToReducer, Allreduce, Encoded, Joint)) or (
            type(payload) is not type(payloads[0])
        ):
            raise TypeError(
                f"{name}: encode returns Encoded, Allreduce or ToReducer, the same for all tensors "
                f"of a step, not an object of {type(payload)}"
            )
        found = GATHER if isinstance(payload, Encoded) else payload.collective
        if found != declared[-1] and not isinstance(payload, (ToReducer, Joint)):
            raise ValueError(
                f"{name}: encode returns {found}, and `collectives` declares {declared}"
            )
        if (
            isinstance(payload, (Encoded, Joint))
            and payload.finite
            and (grad.any() if step.base is None else (grad != step.base).any())
        ):
            raise ValueError(
                f"{name}: encode must leave the gradient zero, because payloads are added to it"
            )
