"""The RUNs of convergence.py: their spelling, and tables, points and pictures of their results."""

import re
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np
from tasks import TASKS

from horovod_compress.session.updates import Nesterov


class Run(NamedTuple):
    """A parsed RUN. every: how many local steps' updates are exchanged together, 0 where gradients
    are; drops: whether what was not sent is forgotten; alone: whether one rank trains on its part
    of each batch and exchanges nothing."""

    optimizer: str
    rate: float
    every: int
    outer: Optional[Nesterov]
    spec: str
    drops: bool = False
    alone: bool = False


def parsed(run, task):
    """The Run that a RUN says."""
    number = "([0-9.e+-]+?)"
    optimizer = rf"(?:(sgd|adam|corrected|muon|signs)(?::lr={number})?/)?"
    exchanged = rf"(?:(updates)(?::every=(\d+)(?:,outer={number}\+{number})?)?/|(drop|alone)/)?"
    found = re.fullmatch(
        optimizer
        + exchanged
        + r"((?!(?:sgd|adam|corrected|muon|signs|updates|drop|alone)\b)[^/:]+(?::.+)?)",
        run,
    )
    if not found:
        raise ValueError(
            f"{run}: a run is [sgd/, adam/, muon/, signs/ or corrected/][updates/, drop/ or "
            "alone/]SPEC; "
            "sgd:lr=NUMBER/ is SGD with that rate, "
            "updates:every=H,outer=RATE+MOMENTUM/ exchanges every H steps, with an outer Nesterov; "
            "drop/ forgets what was not sent, alone/ has one rank train without the others"
        )
    kind, rate, updates, every, outer_rate, momentum, without, spec = found.groups()
    kind = kind or task.default
    if kind == "corrected" and not updates:
        raise ValueError(
            f"{run}: corrected/ is for updates/, as gradients that were exchanged are the whole "
            f"batch's"
        )
    outer = Nesterov(float(outer_rate), float(momentum)) if outer_rate else None
    lr = float(rate) if rate else (task.sgd if kind == "sgd" else task.adam)["lr"]
    every = int(every or 1) if updates else 0
    return Run(kind, lr, every, outer, spec, without == "drop", without == "alone")


# -- what was found


def key(row):
    return row["run"], row["ranks"], row["steps"], row["real"], row.get("local_size", 1)


def grouped(rows):
    """{(run, ranks, steps, real, local_size): its rows, by seed}"""
    groups: Dict[Any, List[dict]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def with_notes(task, run, steps, real, local_size, found):
    """A run, and what is not as usual about it."""
    seconds = f"real ranks, {np.mean([row['seconds'] for row in found]):.0f} s of steps"
    notes = {
        f"hosts of {local_size}": local_size > 1,
        seconds: real,
        f"{steps} steps": steps != task.steps,
    }
    return ", ".join([run, *(note for note, applies in notes.items() if applies)])


def uncompressed_of(run):
    """The Run that a run is compared with."""
    kind = "sgd" if run.optimizer == "sgd" else "adam"
    return run._replace(optimizer=kind, every=0, outer=None, spec="none", drops=False, alone=False)


def ratio_of(rows):
    """How many times fewer bytes than dense ones they have sent; None where they sent none."""
    ratios = [row["ratio"] for row in rows]
    return None if None in ratios else float(np.mean(ratios))


def figure_of(task):
    return "accuracy" if task.unit.startswith("accuracy") else "bits"


def setting(task, run, ranks, steps, real, local_size):
    """The settings of a point."""
    unusual = {"steps": steps != task.steps, "real": real, "local_size": local_size > 1}
    its = {"steps": steps, "real": real, "local_size": local_size}
    return {
        "run": re.sub(":lr=[^/]+/", "/", run).removeprefix(f"{task.default}/"),
        "rate": parsed(run, task).rate,
        "ranks": ranks,
        **{key: its[key] for key, shown in unusual.items() if shown},
    }


def ends(name, rows):
    """The points of where all runs end, and what each is compared with."""
    task, groups = TASKS[name], grouped(rows)
    for its, found in groups.items():
        at, uncompressed = setting(task, *its), uncompressed_of(parsed(its[0], task))
        alike = [
            setting(task, *other)
            for other in groups
            if other[2] == its[2] and parsed(other[0], task) == uncompressed
        ]
        more = {"seeds": [row["seed"] for row in found]}
        if alike and at not in alike:
            # Of as many ranks, if there.
            baseline = min(alike, key=lambda other: other["ranks"] != at["ranks"])
            keys = [key for key in {**at, **baseline} if at.get(key) != baseline.get(key)]
            more["against"] = {key: baseline.get(key) for key in keys}
        by_seed = {str(row["seed"]): round(row["measured"][-1][1], 4) for row in found}
        figures, ratio = {figure_of(task): by_seed}, ratio_of(found)
        yield at, {**figures, "fewer": round(ratio, 1)} if ratio else figures, more


def table(name, rows):
    task, groups = TASKS[name], grouped(rows)
    lines = [
        f"| {name} | ranks | seeds | {task.unit} | spread | against none | times fewer bytes |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (run, ranks, steps, real, local_size), found in groups.items():
        ends = [row["measured"][-1][1] for row in found]
        uncompressed = uncompressed_of(parsed(run, task))
        alike = [
            row
            for row in rows
            if row["steps"] == steps and parsed(row["run"], task) == uncompressed
        ]
        # Of as many, if there.
        baseline = {
            row["seed"]: row["measured"][-1][1]
            for row in sorted(alike, key=lambda row: row["ranks"] == ranks)
        }
        pairs = [
            end - baseline[row["seed"]] for end, row in zip(ends, found) if row["seed"] in baseline
        ]
        against = f"{np.mean(pairs):+.3f}" if pairs else ""
        spread = f"{np.std(ends, ddof=1):.3f}" if len(ends) > 1 else ""
        shown = with_notes(task, run, steps, real, local_size, found)
        ratio = ratio_of(found)
        lines.append(
            f"| {shown} | {ranks} | {len(ends)} | {np.mean(ends):.3f} | {spread} | {against} | "
            f"{f'{ratio:.1f}' if ratio else ''} |"
        )
    return "\n".join(lines)


def layers(name, rows):
    """How many times fewer bytes than dense each tensor has sent, of every run but none's."""
    task = TASKS[name]
    groups = [
        (*its, found) for its, found in grouped(rows).items() if parsed(its[0], task).spec != "none"
    ]
    titles = [f"{with_notes(task, run, *about)}, {ranks} ranks" for run, ranks, *about in groups]
    lines = [" | ".join(["| layer", *titles]) + " |", "|---|" + "---:|" * len(titles)]
    for layer in groups[0][-1][0]["ratios"] if groups else ():
        shown = [f"{np.mean([row['ratios'][layer] for row in found]):.0f}" for *_, found in groups]
        lines.append(" | ".join([f"| {layer}", *shown]) + " |")
    return "\n".join(lines)


def plot(name, rows, path, rate):
    """The measure over steps, over bytes that a rank sends, and over the seconds that a link needs
    for those that it receives."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for (run, ranks, *_), found in grouped(rows).items():
        points = np.mean([row["measured"] for row in found], axis=0)
        seconds = points[:, 0] * max(found[0]["received"], points[-1, 2] / points[-1, 0]) * 8 / rate
        for axis, x in zip(axes, (points[:, 0], points[:, 2] / 1e6, seconds)):
            axis.plot(x, points[:, 1], marker=".", label=f"{run} × {ranks}")
    for axis, label in zip(
        axes, ("steps", "MB that a rank sends", f"seconds on the wire at {rate / 1e6:g} Mbit/s")
    ):
        axis.set_xlabel(label)
        axis.set_xscale("linear" if label == "steps" else "log")
    axes[0].set_ylabel(TASKS[name].unit)
    axes[0].legend(fontsize="small")
    figure.savefig(path)
