"""What a step would take with each of several compressions: their bytes and work are measured on
this processor, the rest is computed by `cost`."""

import dataclasses
import math
from typing import Any, Callable, Dict, List, Sequence

from . import bench
from .compressors import get_compressor
from .compressors.base import Step
from .compressors.dense import dense_compressor
from .cost import Load, Network, added_seconds, break_even
from .lockstep import Named
from .models import MODELS, Shapes

BASELINES = ("none", "fp16")
# Whose bytes random gradients tell.
DEFAULT = (
    "dgc:ratio=0.001",
    "dgc:ratio=0.01",
    "topk:ratio=0.01",
    "maxnorm:bits=4",
    "powersgd:rank=4",
)
STEPS = 5  # measured ones
GATHERED = "allgather uint8"
# Of a model of which only the size is known: how many are measured, and elements of each.
_TENSORS, _LARGEST = 16, 2**20


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of which a step is predicted. parameters: how many it has; shapes: of gradients that
    are measured, in the order of layers; factor: how many times their elements the model has."""

    name: str
    parameters: int
    shapes: Shapes
    factor: float = 1.0

    @classmethod
    def known(cls, name: str) -> "Model":
        """One of `models.MODELS`."""
        shapes = MODELS[name]()
        return cls(name, sum(map(math.prod, shapes.values())), shapes)

    @classmethod
    def of_size(cls, millions: float) -> "Model":
        """One of which only the number of parameters is known."""
        parameters = max(1, round(1e6 * millions))
        rows = min(max(1, round(parameters / _TENSORS / 1024)), _LARGEST // 1024)
        shapes: Shapes = {f"t{i}": (rows, 1024) for i in range(_TENSORS)}
        return cls("a model", parameters, shapes, parameters / (1024 * rows * _TENSORS))

    def gradients(self) -> List[Named]:
        return bench.random_gradients(self.shapes, seed=0)


def compressors_of(specs: Sequence[str]) -> Dict[str, Any]:
    """{spec: compressor, as it is after its warm-up}, the baselines first. ValueError for a spec
    that is none."""
    return {
        spec: get_compressor(spec).after_warmup()
        for spec in dict.fromkeys((*BASELINES, *(specs or DEFAULT)))
    }


def on_hosts(compressor: Any, local_size: int) -> bool:
    """Whether ranks of a host add up their gradients, where a host has so many."""
    return local_size > 1 and getattr(compressor, "hosts", False)


def measured(
    compressor: Any,
    model: Model,
    gradients: Sequence[Named],
    ranks: int,
    progress: Callable[[], Any] = lambda: None,
    local_size: int = 1,
) -> Load:
    """What a compression brings into a step of the model on `ranks` ranks, of which a host has
    `local_size`. gradients: the model's, as `Model.gradients` makes them. ValueError where ranks
    are not hosts of that size."""
    split = compressor.split(1, Step(0, 0, ranks))
    if split is not None:
        return splitting(
            measured(
                dataclasses.replace(compressor, exchange="gather"),
                model,
                gradients,
                ranks,
                progress,
            ),
            split.accept,
            ranks,
        )
    found = bench.measure(compressor, gradients, ranks, STEPS, progress, local_size)
    rounds = len(compressor.collectives(ranks)) - 1 + on_hosts(compressor, local_size)
    # Of small tensors, which hide nothing.
    dense_rounds = (
        len(dense_compressor(getattr(compressor, "dense", "fp32"), 0).collectives(ranks)) - 1
    )
    hides = (
        not rounds
        and compressor.clip_norm is None
        and getattr(compressor, "transport", "horovod") == "horovod"
    )
    sizes = [math.prod(shape) for shape in model.shapes.values()]
    # With which Horovod looks at nothing.
    plain = compressor.id == "none"
    encode, decode = (0.0, 0.0) if plain else (found["encode_seconds"], found["decode_seconds"])
    gathers = found["operations"].get(GATHERED, 0)
    operations = sum(found["operations"].values())
    return Load(
        found["exchanged"],
        operations,
        rounds + dense_rounds,
        hides,
        sizes[0] / sum(sizes),
        encode,
        decode,
        gathers,
    ).times(model.factor)


def splitting(gathering: Load, accept: float, ranks: int) -> Load:
    """What entries bring into a step that are split among owners, if an owner's sums take as long
    as decoding as many entries: those that all ranks send it, as many as one rank sends all, and
    those that all owners accept, `accept` times as many. gathering: what they bring where all ranks
    get them."""
    payload = gathering.exchanged[GATHERED]
    exchanged = {
        **gathering.exchanged,
        "alltoall uint8": payload,
        GATHERED: accept / ranks * payload,
    }
    return dataclasses.replace(
        gathering,
        exchanged=exchanged,
        operations=gathering.operations - gathering.gathers + 2,
        rounds=gathering.rounds + 1,
        hides=False,
        decode=gathering.decode * (1 + accept) / ranks,
        gathers=1,
    )


def predict(
    model: Model, loads: Dict[str, Load], network: Callable[[float], Network], backward: float
) -> Dict[str, Any]:
    """What a step takes with each of {spec: Load}, "none" among them. network(factor): the network
    with a rate `factor` times as high; backward: seconds of a backward pass. Returns a JSON-able
    dict: model, parameters, ranks, backward_seconds, network; predictions, the shortest step first,
    dicts of spec, bytes_sent and bytes_received of a rank, work_seconds to encode and decode,
    step_seconds, of_none; best, the first of those that compress; break_even, the factor from which
    on none is as fast as that, as of `cost.break_even`."""
    here = network(1.0)
    seconds = {spec: backward + added_seconds(load, here, backward) for spec, load in loads.items()}
    predictions: List[Dict[str, Any]] = [
        {
            "spec": spec,
            "bytes_sent": loads[spec].sent,
            "bytes_received": loads[spec].received(here.ranks),
            "work_seconds": loads[spec].encode + loads[spec].decode,
            "step_seconds": seconds[spec],
            "of_none": seconds[spec] / seconds["none"],
        }
        for spec in sorted(seconds, key=seconds.__getitem__)
    ]
    best = next(found["spec"] for found in predictions if found["spec"] != "none")
    return {
        "model": model.name,
        "parameters": model.parameters,
        "ranks": here.ranks,
        "backward_seconds": backward,
        "network": dataclasses.asdict(here),
        "predictions": predictions,
        "best": best,
        "break_even": break_even(loads[best], loads["none"], network, backward),
    }
