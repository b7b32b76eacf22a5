"""Ranks that have called hvd.join(): the error on the others.

Those are found missing before messages are gathered, where each step's ranks are counted:
`torch/counted_step.py`, in TensorFlow `Graph._counted`; and before sums are used, by the ranks'
numbers of the step: `check_step_numbers` of `protocol/handshake.py`. Over MPI nobody looks, and
ranks wait in vain: `torch/mpi.py`. `torch/uneven.py` is for ranks whose data end early.
"""

from typing import Sequence

REDUCES_ONLY = (
    "hvd.join() works with Horovod's own reductions only, and this compression exchanges more"
)


def error_of_joined(count: int, size: int, ranks: Sequence[int], why: str) -> RuntimeError:
    """The error for the remaining ranks after `count` ranks have joined, of which `ranks` are
    known."""
    which = f" ({'rank' if count == 1 else 'ranks'} {', '.join(map(str, ranks))})" if ranks else ""
    return RuntimeError(
        f"{count} of {size} ranks have called hvd.join(){which}: {why}. Let every rank take the "
        f"same number of steps, train inside `with "
        "hvdc.uneven(optimizer):` (PyTorch), or use none or fp16"
    )
