#!/usr/bin/env python3
"""Points and picture of what loss_over_bytes.py has trained.

    .venv/bin/python benchmarks/bytes_figure.py loss_over_bytes.jsonl [--points FILE]
        [--machine "NVIDIA H200, 16 cores"] [--device cuda] [--plot FILE]

Of each run there is a point of its best rate with all seeds, and one of each rate of its grid with
seed 0. A point of the picture is the mean at the end, over the bytes that a rank sends a step; bars
are 95 % intervals.
"""

import argparse
import json
import math
import pathlib
import re
import statistics
import sys
from typing import Any, Dict, Iterator, List, NamedTuple, Tuple

import points

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "scripts"))
from results import Estimate

UNITS = {
    "bits": "bits a character",
    "fewer": "times fewer bytes than none",
    "sent": "bytes that a rank sends a step",
    "received": "bytes that a rank receives a step",
    "slow": "ms a step on the wire at 100 Mbit/s",
    "fast": "ms a step on the wire at 1 Gbit/s",
}
SLOW, FAST = 1e8, 1e9


# What a run's beginning and spec mean, for the picture.
class Group(NamedTuple):
    """Rows of a run at its best rate, and those of its grid, seed 0."""

    run: str
    best: List[Dict[str, Any]]
    grid: List[Dict[str, Any]]


def without_rate(run: str) -> str:
    """A RUN as tables have it: AdamW is the task's own."""
    return re.sub(":lr=[^/]+/", "/", run).removeprefix("adam/")


def grouped(rows: List[Dict[str, Any]]) -> List[Group]:
    """Groups of all runs, of the steps that most rows have."""
    steps = statistics.mode(row["steps"] for row in rows)
    by_run: Dict[str, List[Dict[str, Any]]] = {}
    for row in rows:
        if row["steps"] == steps:
            by_run.setdefault(without_rate(row["run"]), []).append(row)
    groups = []
    for run, found in by_run.items():
        grid = sorted((row for row in found if row["seed"] == 0), key=lambda row: row["rate"])
        rate = min(grid, key=end_of)["rate"]
        best = sorted((r for r in found if r["rate"] == rate), key=lambda row: row["seed"])
        groups.append(Group(run, best, grid))
    return groups


def end_of(row: Dict[str, Any]) -> float:
    """Where a run ends; infinitely high where it diverged."""
    loss = row["measured"][-1][1]
    return loss if math.isfinite(loss) else math.inf


def bytes_of(row: Dict[str, Any]) -> Tuple[float, float]:
    """(sent, received) a step of a rank. A sum of all ranks is reduced in a ring, as Horovod does:
    each rank sends and receives 2(N − 1)/N of it."""
    sent, received = row["measured"][-1][2] / row["steps"], row["received"]
    return sent, received


def figures_of(rows: List[Dict[str, Any]]) -> Dict[str, Any]:
    sent, received = (statistics.fmean(its) for its in zip(*map(bytes_of, rows)))
    ratios = [row["ratio"] for row in rows]
    wire = {"slow": SLOW, "fast": FAST}
    return {
        "bits": {str(row["seed"]): round(end_of(row), 4) for row in rows},
        "fewer": round(statistics.fmean(ratios), 1) if all(ratios) else None,
        "sent": round(sent),
        "received": round(received),
        **{name: round(8e3 * max(sent, received) / rate, 3) for name, rate in wire.items()},
    }


def measured(groups: List[Group], device: str) -> Iterator[Tuple[Any, Any, Any]]:
    """The points of all groups; those of best rates are compared with none at its own."""
    none = next(group for group in groups if group.run == "none").best[0]
    for group in groups:
        at, against = about(group.best, device), {}
        if group.run != "none":
            same = none["rate"] == group.best[0]["rate"]
            against = {"against": {"run": "none", **({} if same else {"rate": none["rate"]})}}
        yield at[0], figures_of(group.best), {**at[1], **against}
        for row in group.grid:
            its, more = about([row], device)
            yield {**its, "part": "grid"}, figures_of([row]), more


def about(rows: List[Dict[str, Any]], device: str) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """(settings, seeds and command) of rows that differ in their seeds."""
    row, seeds = rows[0], [row["seed"] for row in rows]
    command = (
        f".venv/bin/python benchmarks/convergence.py decoder {row['run']} --ranks {row['ranks']} "
        f"--steps {row['steps']} --seeds {' '.join(map(str, seeds))} --device {device}"
    )
    at = {"run": without_rate(row["run"]), "rate": row["rate"], "ranks": row["ranks"]}
    return at, {"seeds": seeds, "command": command}


def plot(groups: List[Group], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), constrained_layout=True)
    for group in groups:
        its = Estimate.of(list(map(end_of, group.best)))
        sent = bytes_of(group.best[0])[0]
        if not sent:
            axes.axhline(its.mean, color="gray", linestyle="--", zorder=0)
            axes.text(1, its.mean, "a rank alone", transform=axes.get_yaxis_transform(), ha="right")
            continue
        ours = "updates" in group.run and "adacomp" in group.run
        axes.errorbar(
            sent,
            its.mean,
            its.half or 0,
            color="tab:red" if ours else "tab:blue",
            marker="s" if group.run.startswith("muon/") else "o",
            capsize=3,
            linestyle="none",
        )
        axes.annotate(group.run, (sent, its.mean), (5, 3), textcoords="offset points", fontsize=6)
    axes.set_xscale("log")
    axes.set_xlabel("bytes that a rank sends a step")
    axes.set_ylabel("bits a character")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=pathlib.Path)
    parser.add_argument("--points", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--machine", help="that trained")
    parser.add_argument("--device", default="cuda", help="of that machine (default: cuda)")
    parser.add_argument("--plot", type=pathlib.Path)
    options = parser.parse_args()
    groups = grouped([json.loads(line) for line in options.rows.read_text().splitlines()])
    if options.points:
        found = measured(groups, options.device)
        points.write(options.points, UNITS, found, machine=options.machine)
    if options.plot:
        plot(groups, options.plot)


if __name__ == "__main__":
    main()
