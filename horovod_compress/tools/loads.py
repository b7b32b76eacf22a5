"""Load of a step with a compression: bytes and work, measured on this processor with few ranks and
extrapolated to many."""

import dataclasses
import math
from typing import Any, Callable, Dict, List, Optional, Sequence

from ..compressors import collective_of
from ..compressors.base import Step
from ..compressors.dense import dense_compressor
from ..engine.dense_policy import compressor_for, times_dense
from ..engine.lockstep import Named
from ..engine.wrappers import wrapped
from ..protocol.machine import Machine
from . import bench
from .cost import Load
from .models import MODELS, Shapes

# Measured steps.
STEPS = 5
GATHERED = "allgather uint8"
# Machines whose payloads are decoded. Their difference is what those of further machines take.
_FEW, _MANY = 2, 8
# Of a model of which only the size is known: tensors at least, and elements of one at most.
_TENSORS, _LARGEST = 16, 2**20
# Of such a model: tensors and elements that are measured at most.
_MOST_TENSORS, _MOST_ELEMENTS = 4096, 2**24


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of which a step is predicted. parameters: how many it has; shapes: of gradients that
    are measured, in the order of layers; factor, tensors: how many times their elements, and their
    number, the model has."""

    name: str
    parameters: int
    shapes: Shapes
    factor: float = 1.0
    tensors: float = 1.0

    @classmethod
    def known(cls, name: str) -> "Model":
        """One of `models.MODELS`."""
        shapes = MODELS[name]()
        return cls(name, sum(map(math.prod, shapes.values())), shapes)

    @classmethod
    def of_size(cls, number: float, tensors: Optional[int] = None) -> "Model":
        """One of which only the number of parameters is known, and perhaps that of its tensors."""
        parameters = max(1, round(number))
        count = tensors or max(_TENSORS, parameters / _LARGEST)
        each = min(max(1.0, parameters / count), _MOST_ELEMENTS if tensors else _LARGEST)
        rows = max(1, round(each / 1024))
        columns = round(each / rows)
        measured = int(min(count, _MOST_TENSORS, max(1, _MOST_ELEMENTS // (rows * columns))))
        shapes: Shapes = {f"t{i}": (rows, columns) for i in range(measured)}
        factor = parameters / (rows * columns * measured)
        return cls("a model", parameters, shapes, factor, count / measured)

    def gradients(self) -> List[Named]:
        return bench.random_gradients(self.shapes, seed=0)


def measured(
    compressor: Any,
    model: Model,
    gradients: Sequence[Named],
    counts: Sequence[int],
    progress: Callable[[], Any] = lambda: None,
    local_size: int = 1,
) -> List[Load]:
    """A compression's load in a step of the model, for each number of ranks.

    Sums are measured with as many ranks as are asked for, and so are those of small tensors, which
    `dense=int8` makes wider where there are more ranks. Gathered payloads have the same length on
    any number of ranks; the time to decode one more is measured. A tensor whose payloads would be
    more bytes than a dense exchange goes dense.

    Args:
        compressor: as it is after its warm-up.
        model: whose step it is.
        gradients: of some steps, by name, as `Model.gradients` makes them.
        counts: numbers of ranks, in ascending order.
        progress: called after each measured step.
        local_size: ranks of a machine.

    Returns:
        One load for each of the counts.

    Raises:
        ValueError: ranks do not make up machines of that size.
    """
    splits = compressor.policy.exchange == "split"
    alone = dataclasses.replace(compressor, exchange="gather") if splits else compressor
    # Ranks of a machine that add up their gradients before they compress them.
    size = local_size if alone.policy.hosts else 1

    def measure(ranks: int) -> Load:
        return _measured(alone, model, gradients, ranks, progress, size)

    if collective_of(alone) != "allgather":
        return _of_sums(measure, counts)
    if len(counts) == 1 and not splits and counts[0] <= size * _MANY:
        return [measure(counts[0])]
    few, many = (measure(size * machines) for machines in (_FEW, _MANY))
    if many.gathers == few.gathers:
        each = max(many.decode - few.decode, 0.0) / (size * (_MANY - _FEW))
    else:
        # Some went dense.
        each = few.decode / (size * _FEW)
    loads, dense = [], _dense(alone, model, gradients, [size * _FEW, *counts])
    for ranks, theirs in zip(counts, dense[1:]):
        load = dataclasses.replace(
            few,
            exchanged={
                kind: few.exchanged.get(kind, 0.0) - dense[0].get(kind, 0.0) + theirs.get(kind, 0.0)
                for kind in {**few.exchanged, **theirs}
            },
            decode=few.decode + each * (ranks - size * _FEW),
        )
        load = _where_dense_brings_less(compressor, alone, model, load, ranks, size)
        loads.append(_splitting(load, compressor, ranks) if splits else load)
    return loads


def _measured(
    compressor: Any,
    model: Model,
    gradients: Sequence[Named],
    ranks: int,
    progress: Callable[[], Any],
    local_size: int,
) -> Load:
    """The load with this number of ranks, all of whose payloads are decoded."""
    found = bench.measure(compressor, gradients, ranks, STEPS, progress, local_size)
    rounds = len(compressor.collectives(ranks)) - 1 + (local_size > 1)
    # Of small tensors, which hide nothing.
    dense_rounds = len(dense_compressor(compressor.policy.dense, 0).collectives(ranks)) - 1
    hides = (
        not rounds
        and compressor.policy.clip_norm is None
        and compressor.policy.transport == "horovod"
    )
    sizes = [math.prod(shape) for shape in model.shapes.values()]
    # With which Horovod looks at nothing.
    plain = compressor.id == "none"
    encode, decode = (0.0, 0.0) if plain else (found["encode_seconds"], found["decode_seconds"])
    return Load(
        exchanged=found["exchanged"],
        operations=sum(found["operations"].values()),
        rounds=rounds + dense_rounds,
        hides=hides,
        last=sizes[0] / sum(sizes),
        encode=encode,
        decode=decode,
        gathers=found["operations"].get(GATHERED, 0),
    ).times(model.factor, model.tensors)


def _splitting(gathering: Load, compressor: Any, ranks: int) -> Load:
    """The load with `exchange=split`, from that with `exchange=gather`. An owner decodes as many
    entries as one rank sends; every rank decodes `accept` times that."""
    from ..engine.split import accepted

    accept, payload = accepted(compressor, ranks), gathering.exchanged.get(GATHERED)
    if not payload:
        return gathering
    return dataclasses.replace(
        gathering,
        exchanged={
            **gathering.exchanged,
            "alltoall uint8": payload,
            GATHERED: accept / ranks * payload,
        },
        operations=gathering.operations - gathering.gathers + 2,
        rounds=gathering.rounds + 1,
        hides=False,
        decode=gathering.decode * (1 + accept) / ranks,
        gathers=1,
    )


def _of_sums(measure: Callable[[int], Load], counts: Sequence[int]) -> List[Load]:
    """The loads of summed payloads with each of the counts, which ascend. More ranks need fields
    as wide or wider, so where two send the same bytes all between them do, at the same work."""
    loads = {index: measure(counts[index]) for index in sorted({0, len(counts) - 1})}

    def fill(first: int, last: int) -> None:
        middle = (first + last) // 2
        if loads[first].exchanged == loads[last].exchanged:
            loads.update(dict.fromkeys(range(first + 1, last), loads[first]))
        elif middle > first:
            loads[middle] = measure(counts[middle])
            fill(first, middle)
            fill(middle, last)

    fill(0, len(counts) - 1)
    return [loads[index] for index in range(len(counts))]


def _dense(
    compressor: Any, model: Model, gradients: Sequence[Named], counts: Sequence[int]
) -> List[Dict[str, float]]:
    """Bytes by collective, for each of the counts, of the tensors that a gathering compressor
    leaves dense by name and shape; none where they do not depend on the number of ranks."""
    shapes = {
        name: shape
        for name, shape in model.shapes.items()
        if collective_of(compressor_for(compressor, name, shape)) != "allgather"
    }
    if len(dense_compressor(compressor.policy.dense, 0).collectives(2)) == 1 or not shapes:
        return [{} for _ in counts]
    part = dataclasses.replace(model, shapes=shapes)
    theirs = [{name: named[name] for name in shapes} for named in gradients]

    def measure(ranks: int) -> Load:
        return _measured(compressor, part, theirs, ranks, lambda: None, 1)

    ascending = sorted(set(counts))
    found = dict(zip(ascending, _of_sums(measure, ascending)))
    return [found[ranks].exchanged for ranks in counts]


def _where_dense_brings_less(
    compressor: Any, alone: Any, model: Model, load: Load, ranks: int, local_size: int
) -> Load:
    """The load where tensors go dense whose payloads from so many ranks would be more.

    Args:
        compressor: whose load it is to be.
        alone: the same, which gathers.
        model: whose step it is.
        load: measured with `_FEW` machines, where some may have gone dense already.
        ranks: how many.
        local_size: ranks of a machine.
    """
    few = _FEW * local_size
    gathered = []
    for name, shape in model.shapes.items():
        numel = math.prod(shape)
        here, there = (
            wrapped(compressor_for(its, name, shape), shape, Machine.alone(size, local_size))
            for its, size in ((alone, few), (compressor, ranks))
        )
        if collective_of(here) == "allgather":
            bits = here.payload_bits(numel, Step(0, 0, few))
            if bits is None or times_dense(bits, few) <= 1:
                gathered.append((numel, bits, there.payload_bits(numel, Step(0, 0, ranks))))
    elements = model.factor * sum(numel for numel, _, _ in gathered)
    measured_bits = 8 * load.exchanged.get(GATHERED, 0.0) / max(elements, 1)
    sizes = [tuple(measured_bits if each is None else each for each in its) for its in gathered]
    dense = [(numel, bits) for numel, bits, there in sizes if times_dense(there, ranks) > 1]
    if not dense:
        return load
    share = 1 - sum(numel * bits for numel, bits in dense) / sum(
        numel * bits for numel, bits, _ in sizes
    )
    exchanged = {**load.exchanged, GATHERED: share * load.exchanged[GATHERED]}
    summed = "allreduce float32"
    exchanged[summed] = exchanged.get(summed, 0.0) + 4 * model.factor * sum(
        numel for numel, _ in dense
    )
    fewer = load.gathers * len(dense) / len(gathered)
    return dataclasses.replace(
        load,
        exchanged=exchanged,
        operations=load.operations - fewer,
        decode=share * load.decode,
        gathers=load.gathers - fewer,
    )
