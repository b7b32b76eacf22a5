"""Drives the ranks of one process in lockstep, for `simulate`, `bench` and tests: all ranks start a
round before any waits for it."""

import itertools
from typing import Dict, List, Optional, Sequence

import numpy as np

from ..compressors.base import Compressor
from ..protocol.machine import Machine
from ..transport.base import Transport
from .exchange import Exchange

Named = Dict[str, np.ndarray]


def make_ranks(
    compressor: Compressor,
    shapes: Dict[str, tuple],
    transports: Sequence[Transport],
    local_size: int = 1,
) -> List[Exchange]:
    """The exchanges of connected ranks whose tensors have these names and shapes. local_size: how
    many ranks that follow each other are on one machine."""
    machines = Machine.group(len(transports), local_size)
    tensors = {name: (shape, compressor) for name, shape in shapes.items()}
    return [
        Exchange(compressor, transport, tensors, machine=machine)
        for transport, machine in zip(transports, machines)
    ]


def start_step(
    exchanges: Sequence[Exchange],
    grads: Sequence[Named],
    lr: Optional[float] = None,
    squares: Sequence[Named] = (),
) -> List[Named]:
    """Submits grads[rank] = {name: flat float32 array} and runs all rounds of the step. Returns
    carriers[rank]. squares: alike, where known."""
    known = squares or [{}] * len(exchanges)
    carriers = [
        {name: ex.submit(name, grad, its.get(name), lr) for name, grad in named.items()}
        for ex, named, its in zip(exchanges, grads, known)
    ]
    for ex, named in zip(exchanges, carriers):
        sent = sum(carrier.nbytes for carrier in named.values())
        ex.transport.count(sent, sent)
    for _ in itertools.zip_longest(*(ex.rounds() for ex in exchanges)):
        pass
    return carriers


def mean_of(carriers: Sequence[np.ndarray]) -> np.ndarray:
    """The mean of carriers in their own precision, as a reducer computes it with op=Average."""
    return np.add.reduce(carriers, axis=0) / carriers[0].dtype.type(len(carriers))


def run_step(
    exchanges: Sequence[Exchange], grads: Sequence[Named], lr: Optional[float] = None
) -> Sequence[Named]:
    """Runs one whole step with op=Average. The results replace grads[rank] = {name: flat float32
    array}, which are returned."""
    return finish_step(exchanges, start_step(exchanges, grads, lr), grads)


def finish_step(
    exchanges: Sequence[Exchange], carriers: Sequence[Named], grads: Sequence[Named]
) -> Sequence[Named]:
    """Brings the carriers' means back, and returns grads[rank], which hold the results then."""
    for name in grads[0]:
        reduced = mean_of([named[name] for named in carriers])
        for exchange in exchanges:
            exchange.finish(name, reduced)
    return grads
