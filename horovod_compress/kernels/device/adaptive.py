"""Variance-based compression and AdaComp on a device, for many tensors at once: each element, or
each bin of them, decides by itself whether it is sent.

One pass advances the states and marks what is sent, a byte an element. `collect_marked` writes the
indices of what is marked, in order, once the CPU knows how many those are, and they come to the
CPU with what the states hold there. AdaComp's marks depend on its bins' largest, which a pass over
whole bins finds before.
"""

import functools
from typing import Any, List, Sequence, Tuple

import numpy as np
import torch

from .. import cpu
from ..encoded import Encoded
from ..lists import Late, then
from ..reference.dense import Float
from . import launches
from .array import DeviceArray
from .entries import payloads_of, put
from .programs import adaptive as programs
from .shared import kernel, same_length, starts_of, within_limits


class _Marks:
    """The elements of tensors that are sent: a mark for each element, and for each block how many
    are marked and a largest magnitude.

    starts: where each tensor's marks are."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.sizes, self.device = [tensor.numel() for tensor in tensors], tensors[0].device
        self.blocks = launches.blocks(self.sizes, self.device, launches.MARK_BLOCK)
        self.starts = starts_of(self.sizes)
        self.marks = torch.empty(self.starts[-1], dtype=torch.int8, device=self.device)
        self.counts, self.peaks = self.blocks.new(2)

    def collected(
        self, counts: Sequence[int], states: Sequence[Sequence[DeviceArray]], wanted: Sequence[bool]
    ) -> Late:
        """On the CPU, for each tensor indices of the marked elements, uint32, ascending, and what
        its states hold there, in one copy. counts: how many are marked; of a tensor that is not
        wanted none are collected."""
        if self.marks.is_cuda:
            # They were made on what may have been another stream.
            for memory in (self.marks, self.counts):
                memory.record_stream(torch.cuda.current_stream(self.device))
        ends, one = self.counts.cumsum(0), len(states[0])
        starts, before = (
            starts_of([count * want for count, want in zip(counts, wanted)]),
            starts_of(counts),
        )
        rows = torch.empty((1 + one, starts[-1]), dtype=torch.int32, device=self.device)
        table = [
            (size, its[0].tensor, its[-1].tensor, start, first, to - less)
            for size, its, start, first, to, less, want in zip(
                self.sizes, states, self.starts, self.blocks.firsts, starts, before, wanted
            )
            if want
        ]
        if table:
            held = rows.view(torch.float32)
            launches.launch(
                programs.collect_marked,
                table,
                self.marks,
                self.counts,
                ends,
                rows[0],
                held[1],
                held[-1],
                TWO=one == 2,
                BLOCK=launches.MARK_BLOCK,
            )
        landed = launches.landing(rows)

        def collected() -> List[List[np.ndarray]]:
            indices, *numbers = landed()
            return [
                [
                    indices[start:end].view(np.uint32),
                    *(each[start:end].view(np.float32) for each in numbers),
                ]
                for start, end in zip(starts, starts[1:])
            ]

        return Late(collected)


@functools.partial(kernel, key=lambda call: call.squares is not None)
def encode_variance(calls: List[Any]) -> Sequence[Encoded]:
    """As `kernels.reference.encode_variance`; squares may be on the CPU, and what was sent is
    coded there. `spare` is not used."""
    for call in calls:
        same_length(grad=call.grad, r=call.r, v=call.v, squares=call.squares)
        within_limits(call.grad)
    given, marks = calls[0].squares is not None, _Marks([call.grad.tensor for call in calls])
    # Which live until the program has run.
    squares = [call.grad.beside(call.squares if given else call.grad) for call in calls]
    rows = [
        (
            size,
            call.grad.tensor,
            its.tensor,
            call.r.tensor,
            call.v.tensor,
            start,
            float(call.alpha),
            float(call.zeta),
            float(call.tau),
        )
        for size, call, its, start in zip(marks.sizes, calls, squares, marks.starts)
    ]
    launches.launch(
        programs.accumulate_variance,
        rows,
        marks.marks,
        marks.counts,
        marks.peaks,
        GIVEN=given,
        BLOCK=launches.MARK_BLOCK,
    )
    states = [(call.r, call.v) for call in calls]

    def collected(facts: List[List[int]]) -> Sequence[Encoded]:
        largest, counts = facts
        finite = [peak < launches.INFINITY for peak in largest]
        return then(marks.collected(counts, states, finite), functools.partial(encoded, finite))

    def encoded(finite: List[bool], entries: Sequence[List[np.ndarray]]) -> List[Encoded]:
        coded = [_code_variance(call, *its) for call, its in zip(calls, entries)]
        indices, values, scales, before, after = map(list, zip(*coded))
        put(states, indices, after)
        kinds = ["sign" if call.tau > 0 else "power" for call in calls]
        return payloads_of(indices, values, kinds, scales, finite, zip(indices, before))

    facts = [marks.blocks.largest(marks.peaks), marks.blocks.sums(marks.counts)]
    return launches.late(torch.stack(facts), collected)


def _code_variance(
    call: Any, indices: np.ndarray, old_r: np.ndarray, old_v: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, Sequence[Float], np.ndarray, np.ndarray]:
    """(indices, values, scales, rows of r and v before, the same after) of what fires."""
    limit = np.float32(call.tau)
    if limit > 0:
        values, scales = np.copysign(limit, old_r), [limit]
        left = np.maximum(old_v - 2 * np.abs(old_r) * limit + limit * limit, 0)
    else:
        places = np.arange(len(old_r), dtype=np.uint32)
        ((places, _, values, scales),) = cpu.take_entries(
            [places], [old_r.copy()], None, kind="power", masked=0
        )
        indices, old_r, old_v = indices[places], old_r[places], old_v[places]
        left = np.zeros(len(places), np.float32)
    new_r = old_r - values if limit > 0 or call.error_feedback else np.zeros_like(old_r)
    return indices, values, scales, np.stack([old_r, old_v]), np.stack([new_r, left])


def _length(call: Any) -> int:
    """Elements of a bin."""
    return min(call.bin_length, max(call.grad.size, 1))


def _width(call: Any) -> int:
    """Elements of a bin that a block has at a time."""
    return 1 << min(_length(call) - 1, launches.MARK_BLOCK - 1).bit_length()


def _subtract_sent(calls: List[Any]) -> None:
    """Takes out of the residuals what the last step has sent."""
    pending = starts_of([len(call.sent) for call in calls])
    rows: List[launches.Row] = [
        (len(call.sent), call.residual.tensor, float(call.sent_scale), start)
        for call, start in zip(calls, pending)
    ]
    sent = launches.copied([call.sent for call in calls], calls[0].grad.device)
    launches.launch(programs.subtract_signs, rows, sent)


@functools.partial(kernel, key=_width)
def encode_adacomp(calls: List[Any]) -> Sequence[Encoded]:
    """As `kernels.reference.encode_adacomp`; `sent` and the body are on the CPU. The sum of the
    bins' largest is the same to rounding of float64. A bin is one block's work, so that few bins of
    millions of elements leave a device idle."""
    for call in calls:
        same_length(grad=call.grad, residual=call.residual)
        within_limits(call.grad)
        if len(call.sent) and call.sent.max() >= call.residual.size:
            raise ValueError("index outside the tensor")
    _subtract_sent(calls)
    device, width = calls[0].grad.device, _width(calls[0])
    marks, together = _Marks([call.grad.tensor for call in calls]), launches.MARK_BLOCK // width
    lengths = [_length(call) for call in calls]
    bins = [-(-call.grad.size // length) for call, length in zip(calls, lengths)]
    starts = starts_of(bins)
    maxima = torch.empty(starts[-1], dtype=torch.float32, device=device)
    sums = torch.empty(len(calls), dtype=torch.float64, device=device)
    rows: List[launches.Row] = [
        (number, call.grad.tensor, call.residual.tensor, start, call.grad.size, length)
        for call, start, number, length in zip(calls, starts, bins, lengths)
    ]
    peaks = launches.largest(programs.accumulate_bins, rows, maxima, WIDTH=width, BLOCK=together)
    table = [(1, start, number) for start, number in zip(starts, bins)]
    launches.launch(programs.add_maxima, table, maxima, sums)
    rows = [
        (
            call.grad.size,
            call.grad.tensor,
            call.residual.tensor,
            start,
            its,
            length,
            float(call.scale_factor - 1),
        )
        for call, start, its, length in zip(calls, starts, marks.starts, lengths)
    ]
    launches.launch(
        programs.mark_bins,
        rows,
        maxima,
        marks.marks,
        marks.counts,
        BLOCK=launches.MARK_BLOCK,
    )
    facts = [peaks, marks.blocks.sums(marks.counts), sums.view(torch.int64)]
    return launches.late(torch.stack(facts), functools.partial(_coded, calls, marks, bins))


def _coded(
    calls: List[Any], marks: _Marks, bins: Sequence[int], facts: List[List[int]]
) -> Sequence[Encoded]:
    """The payloads, once the entries have come too. facts: of each tensor the largest magnitude, as
    bits; how many are marked; the sum of bins' largest, as bits of float64."""
    largest, counts, bits = facts
    finite = [peak < launches.TOO_LARGE for peak in largest]
    scales = [
        np.float32(total / max(number, 1))
        for total, number in zip(np.array(bits).view(np.float64), bins)
    ]
    wanted = [bool(whether and scale) for whether, scale in zip(finite, scales)]

    def encoded(entries: Sequence[List[np.ndarray]]) -> List[Encoded]:
        indices, held = map(list, zip(*entries))
        values = list(map(np.copysign, scales, held))
        undo = zip(indices, map(float, scales))
        return payloads_of(indices, values, "sign", [[its] for its in scales], finite, undo)

    return then(marks.collected(counts, [(call.residual,) for call in calls], wanted), encoded)
