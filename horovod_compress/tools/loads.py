"""Load of a step with a compression: bytes and work, measured on this processor with few ranks and
extrapolated to many."""

import dataclasses
import math
from typing import Any, List, Optional, Sequence

from ..compressors import collective_of
from ..compressors.dense import dense_compressor
from ..engine.lockstep import Named
from . import bench
from .cost import Load
from .models import MODELS, Shapes
from .place import HERE, Place

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
    local_size: int = 1,
    place: Place = HERE,
) -> List[Load]:
    """A compression's load in a step of the model, for each number of ranks.

    Sums are measured with as many ranks as are asked for. Gathered payloads have the same length on
    any number of ranks; the time to decode one more is measured.

    Args:
        compressor: as it is after its warm-up.
        model: whose step it is.
        gradients: of some steps, by name, as `Model.gradients` makes them.
        counts: numbers of ranks.
        local_size: ranks of a machine.
        place: where it is measured, as of `bench.measure`.

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
        return _measured(alone, model, gradients, ranks, size, place)

    if collective_of(alone) != "allgather" or (
        len(counts) == 1 and not splits and counts[0] <= size * _MANY
    ):
        return [measure(ranks) for ranks in counts]
    few, many = (measure(size * machines) for machines in (_FEW, _MANY))
    each = max(many.decode - few.decode, 0.0) / (size * (_MANY - _FEW))
    loads = []
    for ranks in counts:
        load = dataclasses.replace(few, decode=few.decode + each * (ranks - size * _FEW))
        load = _splitting(load, compressor, ranks) if splits else load
        loads.append(_dense_where_less(load, model, ranks))
    return loads


def _measured(
    compressor: Any,
    model: Model,
    gradients: Sequence[Named],
    ranks: int,
    local_size: int,
    place: Place,
) -> Load:
    """The load with this number of ranks, all of whose payloads are decoded."""
    found = bench.measure(compressor, gradients, ranks, STEPS, local_size, place)
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
        operations=found["operations"],
        rounds=rounds + dense_rounds,
        hides=hides,
        last=sizes[0] / sum(sizes),
        encode=encode,
        decode=decode,
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
        operations={**gathering.operations, "alltoall uint8": 1, GATHERED: 1},
        rounds=gathering.rounds + 1,
        hides=False,
        decode=gathering.decode * (1 + accept) / ranks,
    )


def _dense_where_less(load: Load, model: Model, ranks: int) -> Load:
    """The load where all payloads would bring a rank more than an allreduce of all gradients. In
    training each tensor goes dense by itself."""
    payloads = ranks * load.exchanged.get(GATHERED, 0.0) + load.exchanged.get("alltoall uint8", 0.0)
    if payloads <= 2 * 4 * model.parameters:
        return load
    return dataclasses.replace(
        load,
        exchanged={"allreduce float32": 4.0 * model.parameters},
        operations={"allreduce float32": model.tensors * len(model.shapes)},
        decode=0.0,
    )
