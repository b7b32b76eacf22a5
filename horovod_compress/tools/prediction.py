"""Predicted times of a step with several compressions, by `cost`'s arithmetic on their measured
loads."""

import dataclasses
from typing import Any, Callable, Dict, List, Sequence

from ..compressors import for_gradients
from ..compressors.advice import ADVICE
from .cost import Load, Network, added_seconds, break_even
from .loads import Model
from .printing import figure

BASELINES = ("none", "fp16")
# What is recommended for gradients, but for what needs machines of several ranks, or many.
DEFAULT = tuple(
    each.spec
    for each in ADVICE
    if each.every is None
    and each.spec not in BASELINES
    and not {"hosts=true", "exchange=split"} & set(each.spec.split(","))
)


def compressors_of(specs: Sequence[str]) -> Dict[str, Any]:
    """{spec: compressor, as it is after its warm-up}, the baselines first. ValueError for a spec
    that is none, or needs samples."""
    return {
        spec: for_gradients(spec).after_warmup()
        for spec in dict.fromkeys((*BASELINES, *(specs or DEFAULT)))
    }


def predict(
    model: Model, loads: Dict[str, Load], network: Callable[[float], Network], backward: float
) -> Dict[str, Any]:
    """Predicts a step with each compression on one network.

    Args:
        model: whose step it is.
        loads: by spec, "none" among them.
        network: network(factor) has links that are `factor` times as fast.
        backward: seconds of a backward pass.

    Returns:
        A JSON-able dict: "model", "parameters", "ranks", "backward_seconds", "network";
        "predictions", the shortest step first, dicts of "spec", "bytes_sent" and "bytes_received"
        of a rank, as `stats` counts them, "link_bytes", which cross a rank's link each way,
        "work_seconds" to encode and decode, "step_seconds", and "of_none", the same over that of
        none; "best", the first spec that compresses; "break_even", the factor from which on none is
        as fast as that, as `cost.break_even` defines it.
    """
    here = network(1.0)
    seconds = {spec: backward + added_seconds(load, here, backward) for spec, load in loads.items()}
    predictions: List[Dict[str, Any]] = [
        {
            "spec": spec,
            "bytes_sent": loads[spec].sent,
            "bytes_received": loads[spec].received(here.ranks),
            "link_bytes": loads[spec].crossing(here),
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


def by_ranks(runs: Sequence[Dict[str, Any]]) -> Dict[str, Any]:
    """Joins predictions of the same model and specs for several numbers of ranks.

    Args:
        runs: what `predict` returns, by ascending number of ranks.

    Returns:
        A JSON-able dict: "model", "parameters", "backward_seconds"; "ranks", the numbers; and
        "by_spec", {spec: dict of lists}, with one entry for each number: "step_seconds",
        "bytes_sent", "bytes_received", "link_bytes", "work_seconds", "of_none"; and "dense_from",
        the number from which on none is as fast, None where it is not with the last.
    """
    counts = [run["ranks"] for run in runs]
    by_spec: Dict[str, Dict[str, Any]] = {}
    for run in runs:
        for found in run["predictions"]:
            its = by_spec.setdefault(found["spec"], {})
            for key in found.keys() - {"spec"}:
                its.setdefault(key, []).append(found[key])
    for its in by_spec.values():
        # The most ranks with which it is faster.
        most = max((n for n, of_none in zip(counts, its["of_none"]) if of_none < 1), default=0)
        its["dense_from"] = next((n for n in counts if n > most), None)
    return {
        **{key: runs[0][key] for key in ("model", "parameters", "backward_seconds")},
        "ranks": counts,
        "by_spec": by_spec,
    }


def plot(found: Dict[str, Any], title: str, path: str) -> None:
    """Draws a step's time and a rank's bytes over the number of ranks, in the table's units."""
    shown = {
        "step_seconds": ("step, ms", 1e-3),
        "link_bytes": ("MB on link: what crosses a rank's link in a step, each way", 1e6),
    }
    with figure(path, figsize=(13, 5.5)) as made:
        for axes, (key, (label, unit)) in zip(made.subplots(1, 2), shown.items()):
            for spec, its in found["by_spec"].items():
                values = [value / unit for value in its[key]]
                line = "--" if spec in BASELINES else "-"
                axes.plot(found["ranks"], values, marker=".", label=spec, linestyle=line)
            axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=label)
            axes.set_xticks(found["ranks"], [str(ranks) for ranks in found["ranks"]])
            axes.set_xticks([], minor=True)
            axes.legend()
        made.suptitle(title, x=0.01, ha="left")
