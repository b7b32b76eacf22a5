"""Products of matrices with few vectors: what kernels/reference/lowrank.py does, for many tensors
at once, of which nothing comes to the CPU. They equal the CPU's to rounding.

A matrix is read in regions. What a region adds to sums of rows or columns is a part, and parts are
added up by a launch of their own, always in the same order.
"""

import math
from typing import Any, List, NamedTuple, Sequence, Tuple

import torch

from . import launches
from .array import DeviceArray
from .dense import are_finite
from .programs import lowrank as programs
from .shared import kernel, same_length, starts_of

# Rows that a program works on at a time. The interpreter takes a NumPy call for each operation.
_CHUNK = programs.TALL if launches.INTERPRETED else 4
# Vectors whose sums a program keeps.
_VECTORS = 4


class _Matrix(NamedTuple):
    """Dimensions of a tensor as a matrix, and the number of its vectors."""

    n: int
    m: int
    rank: int

    @property
    def below(self) -> int:
        """How many regions lie below each other."""
        return -(-self.n // programs.TALL)

    @property
    def beside(self) -> int:
        """How many regions lie beside each other."""
        return -(-self.m // programs.WIDE)


def _matrix_of(matrix: DeviceArray, p: DeviceArray, q: DeviceArray, rank: int) -> _Matrix:
    """ValueError for lengths that do not fit each other."""
    if rank < 1 or p.size % rank or q.size % rank or matrix.size * rank**2 != p.size * q.size:
        raise ValueError(
            f"the matrix, of {matrix.size} elements, p and q, of {p.size} and {q.size}, and their "
            f"{rank} vectors must have the same dimensions"
        )
    return _Matrix(p.size // rank, q.size // rank, rank)


def _launch(
    program: Any,
    matrices: Sequence[_Matrix],
    rows: Sequence[Tuple[Any, ...]],
    *memory: torch.Tensor,
    start: Any = None,
    **constants: Any,
) -> Any:
    """`launches.launch`, or `start`, of a program whose blocks are regions of matrices."""
    table = [(of.below * of.beside, *of, *row) for of, row in zip(matrices, rows)]
    return (start or launches.launch)(program, table, *memory, BLOCK=1, CHUNK=_CHUNK, **constants)


def _parts(like: DeviceArray, sizes: Sequence[int]) -> Tuple[torch.Tensor, List[int]]:
    """(Memory for tensors' parts, where those of each begin.)"""
    starts = starts_of(sizes)
    return like.tensor.new_empty(starts[-1]), starts


def _add_parts(
    parts: torch.Tensor, starts: Sequence[int], outs: Sequence[DeviceArray], counts: Sequence[int]
) -> None:
    rows = [
        (out.size, out.tensor, start, count, out.size)
        for out, start, count in zip(outs, starts, counts)
    ]
    launches.launch(programs.add_parts, rows, parts)


@kernel
def project(calls: List[Any]) -> List[None]:
    """As `kernels.reference.project`."""
    for call in calls:
        same_length(grad=call.grad, residual=call.residual)
    matrices = [_matrix_of(call.residual, call.p, call.q, call.rank) for call in calls]
    parts, starts = _parts(
        calls[0].p, [call.p.size * of.beside for call, of in zip(calls, matrices)]
    )
    rows = [
        (
            *(each.tensor for each in (call.grad, call.residual, call.q, call.p)),
            int(call.pending),
            *_factors(call.length),
            start,
        )
        for call, start in zip(calls, starts)
    ]
    _launch(programs.project, matrices, rows, parts)
    _add_parts(parts, starts, [call.p for call in calls], [of.beside for of in matrices])
    return [None] * len(calls)


@kernel
def project_back(calls: List[Any]) -> List[None]:
    """As `kernels.reference.project_back`."""
    matrices = [_matrix_of(call.residual, call.p, call.q, call.rank) for call in calls]
    parts, starts = _parts(
        calls[0].q, [call.q.size * of.below for call, of in zip(calls, matrices)]
    )
    rows = [(call.residual.tensor, call.p.tensor, start) for call, start in zip(calls, starts)]
    _launch(programs.project_back, matrices, rows, parts, VECTORS=_VECTORS)
    _add_parts(parts, starts, [call.q for call in calls], [of.below for of in matrices])
    return [None] * len(calls)


@kernel
def product(calls: List[Any]) -> Sequence[bool]:
    """As `kernels.reference.product`."""
    for call in calls:
        same_length(sums=call.sums, q=call.q)
    matrices = [_matrix_of(call.out, call.p, call.q, call.rank) for call in calls]
    sums = _sums_of(calls, calls[0].q.device)
    averaged = [
        (call.q.size, its, call.q.tensor, float(call.size)) for call, its in zip(calls, sums)
    ]
    # Before regions read q, because it may have the sums' memory.
    launches.launch(programs.average, averaged, sums[0])
    rows = [(call.p.tensor, call.q.tensor, call.out.tensor, float(call.scale)) for call in calls]
    return are_finite(_launch(programs.multiply, matrices, rows, start=launches.largest))


@kernel
def subtract_product(calls: List[Any]) -> List[None]:
    """As `kernels.reference.subtract_product`."""
    matrices = [_matrix_of(call.residual, call.p, call.q, call.rank) for call in calls]
    rows = [tuple(each.tensor for each in (call.residual, call.p, call.q)) for call in calls]
    _launch(programs.subtract, matrices, rows, rows[0][0])
    return [None] * len(calls)


@kernel
def orthonormalize(calls: List[Any]) -> List[None]:
    """As `kernels.reference.orthonormalize`, by CholeskyQR2: Gauss's elimination of the vectors'
    dot products, in float64. Once is not orthogonal enough where vectors are nearly parallel, so it
    is done twice."""
    for call in calls:
        same_length(sums=call.sums, p=call.p)
    device, rank = calls[0].p.device, _power_of_two(calls)
    sizes = [call.p.size // call.rank for call in calls]
    dealt = launches.blocks(sizes, device, programs.TURNED)
    counts = [-(-size // programs.TURNED) for size in sizes]
    dots = torch.empty(len(dealt.owners) * rank**2, dtype=torch.float64, device=device)
    turns = torch.empty(len(calls) * rank**2, dtype=torch.float64, device=device)
    between = torch.empty(sum(call.p.size for call in calls), dtype=torch.float32, device=device)
    once = between.split([call.p.size for call in calls])

    def turn(sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], **stage: bool) -> None:
        rows = [
            (size, source, out, size, call.rank)
            for size, source, out, call in zip(sizes, sources, outs, calls)
        ]
        launches.launch(
            programs.turn,
            rows,
            dots,
            turns,
            **stage,
            RANK=rank,
            TILE=512 // rank,
            BLOCK=programs.TURNED,
        )

    def find_turns() -> None:
        rows = [
            (1, first, count, call.rank) for first, count, call in zip(dealt.firsts, counts, calls)
        ]
        launches.launch(programs.find_turns, rows, dots, turns, RANK=rank, BLOCK=1)

    sums, ps = _sums_of(calls, device), [call.p.tensor for call in calls]
    turn(sums, once, TURNS=False, COUNTS=True)
    find_turns()
    turn(sums, once, TURNS=True, COUNTS=True)
    find_turns()
    turn(once, ps, TURNS=True, COUNTS=False)
    return [None] * len(calls)


def _sums_of(calls: Sequence[Any], device: torch.device) -> Sequence[torch.Tensor]:
    """Sums of ranks, on the device, where they may have come from the CPU."""
    sizes = [call.sums.size for call in calls]
    return launches.there([call.sums for call in calls], device).split(sizes)


def _factors(length: float) -> Tuple[float, float]:
    """Two, whose product is 1/length: alone it may be out of the range of float32."""
    mantissa, exponent = math.frexp(1 / length)
    return math.ldexp(mantissa, exponent // 2), math.ldexp(1.0, exponent - exponent // 2)


def _power_of_two(calls: Sequence[Any]) -> int:
    """At least 4 and the number of vectors of each."""
    return max(4, 1 << (max(call.rank for call in calls) - 1).bit_length())
