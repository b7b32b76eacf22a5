"""What a step takes as ranks grow in number: bytes and work are measured on this processor, with
few ranks, and carried on by `cost`'s arithmetic."""

import dataclasses
import math
from typing import Any, Callable, Dict, List, Optional, Sequence

from .compressors.base import Step
from .cost import Load, Network, added_seconds
from .hosts import Host, sharded
from .lockstep import Named
from .plan import compressor_for
from .prediction import GATHERED, Model, measured, on_hosts, splitting
from .step import times_dense

# Hosts whose payloads are decoded to find out what those of one more take.
_FEW, _MANY = 2, 8


def counts_up_to(largest: int, local_size: int = 1) -> List[int]:
    """Numbers of ranks on hosts of `local_size`: powers of two of hosts below the largest, and
    that."""
    hosts = largest // local_size
    return [
        local_size * count
        for count in (*(2**power for power in range(1, (hosts - 1).bit_length())), hosts)
    ]


def loads_by_ranks(
    compressor: Any,
    model: Model,
    gradients: Sequence[Named],
    counts: Sequence[int],
    progress: Callable[[], Any] = lambda: None,
    local_size: int = 1,
) -> List[Load]:
    """What a compression brings into a step of the model with each number of ranks, of which a host
    has `local_size`. Sums are measured as they are with so many. Gathered payloads are as long with
    any number; what those of one rank more take to decode is measured. A tensor whose payloads
    would bring a rank more bytes than a dense exchange goes dense.

    gradients: the model's, as `Model.gradients` makes them; progress: called after each step that
    is measured.
    """
    splits = [compressor.split(1, Step(0, 0, ranks)) for ranks in counts]
    alone = compressor if splits[0] is None else dataclasses.replace(compressor, exchange="gather")

    def measure(ranks: int, local_size: int = 1) -> Load:
        return measured(alone, model, gradients, ranks, progress, local_size)

    if alone.collective != "allgather":
        return _of_sums(measure, counts)
    size = local_size if on_hosts(alone, local_size) else 1
    few, many = (measure(size * hosts, size) for hosts in (_FEW, _MANY))
    each = max(many.decode - few.decode, 0.0) / (size * (_MANY - _FEW))
    loads = []
    for ranks, split in zip(counts, splits):
        load = dataclasses.replace(few, decode=few.decode + each * (ranks - size * _FEW))
        loads.append(
            _where_dense_brings_less(alone, model, load, ranks, size)
            if split is None
            else splitting(load, split.accept, ranks)
        )
    return loads


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


def _where_dense_brings_less(
    compressor: Any, model: Model, load: Load, ranks: int, local_size: int
) -> Load:
    """The load where tensors go dense whose payloads from so many ranks would be more."""
    host = Host.alone(ranks, local_size)
    tensors = [
        (math.prod(shape), sharded(compressor_for(compressor, name, shape), host, shape))
        for name, shape in model.shapes.items()
    ]
    gathered = [(numel, chosen) for numel, chosen in tensors if chosen.collective == "allgather"]
    elements = model.factor * sum(numel for numel, _ in gathered)
    measured_bits = 8 * load.exchanged.get(GATHERED, 0.0) / max(elements, 1)
    known = [(numel, chosen.payload_bits(numel, Step(0, 0, ranks))) for numel, chosen in gathered]
    sizes = [(numel, measured_bits if bits is None else bits) for numel, bits in known]
    dense = [(numel, bits) for numel, bits in sizes if times_dense(bits, ranks) > 1]
    if not dense:
        return load
    share = 1 - sum(numel * bits for numel, bits in dense) / sum(
        numel * bits for numel, bits in sizes
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


def predict(
    model: Model,
    loads: Dict[str, List[Load]],
    counts: Sequence[int],
    network: Callable[[int], Network],
    backward: float,
) -> Dict[str, Any]:
    """What a step takes with each of {spec: its Load for each of the counts of ranks}, "none" among
    them. network(ranks): that of so many; backward: seconds of a backward pass. Returns a JSON-able
    dict: model, parameters, backward_seconds, ranks, the counts; and by_spec, {spec: dict of lists
    step_seconds, bytes_sent, bytes_received, link_bytes, one entry for each count, and dense_from,
    the count from which on none is as fast, None where it is not with the last}. The first bytes
    are as `stats` counts them, and link_bytes cross a rank's link each way."""
    by_spec: Dict[str, Dict[str, Any]] = {}
    for spec, each in loads.items():
        pairs = list(zip(each, counts))
        by_spec[spec] = {
            "step_seconds": [
                backward + added_seconds(load, network(ranks), backward) for load, ranks in pairs
            ],
            "bytes_sent": [load.sent for load in each],
            "bytes_received": [load.received(ranks) for load, ranks in pairs],
            "link_bytes": [load.crossing(network(ranks)) for load, ranks in pairs],
        }
    for found in by_spec.values():
        found["dense_from"] = _dense_from(
            found["step_seconds"], by_spec["none"]["step_seconds"], counts
        )
    return {
        "model": model.name,
        "parameters": model.parameters,
        "backward_seconds": backward,
        "ranks": list(counts),
        "by_spec": by_spec,
    }


def _dense_from(
    seconds: Sequence[float], dense: Sequence[float], counts: Sequence[int]
) -> Optional[int]:
    slower = [step >= without for step, without in zip(seconds, dense)]
    first = len(slower) - next((i for i, it in enumerate(reversed(slower)) if not it), len(slower))
    return counts[first] if first < len(counts) else None


def plot(found: Dict[str, Any], path: str) -> None:
    """Draws a step's seconds and a rank's bytes over the number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    shown = {
        "step_seconds": "seconds of a step",
        "link_bytes": "bytes that cross a rank's link in a step, each way",
    }
    for axes, (key, label) in zip(figure.subplots(1, 2), shown.items()):
        for spec, its in found["by_spec"].items():
            axes.plot(
                found["ranks"],
                its[key],
                marker=".",
                label=spec,
                linestyle="--" if spec in ("none", "fp16") else "-",
            )
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=label)
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.suptitle(
        f"{found['model']}, {found['parameters'] / 1e6:.4g} million parameters", x=0.01, ha="left"
    )
    figure.savefig(path, dpi=130)
