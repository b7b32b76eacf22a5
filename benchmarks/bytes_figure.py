#!/usr/bin/env python3
"""Points and picture of what loss_over_bytes.py has trained.

    .venv/bin/python benchmarks/bytes_figure.py loss_over_bytes.jsonl ... [--points FILE]
        [--machine "NVIDIA H200, 16 cores"] [--device cuda] [--plot FILE]

Of each run there is a point of its best rate with all seeds, and one of each rate of its grid with
seed 0. The picture is of the number of ranks that has most runs: the mean at the end, over the
bytes that a rank sends a step; bars are 95 % intervals.
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
# Kinds of runs in the picture: name, color, and the expression of which the first that matches a
# run without its optimizer is the one.
FAMILIES = (
    ("none, fp16", "black", "none|fp16"),
    ("updates by adacomp, every H steps", "tab:red", r"updates:every=\d+/adacomp"),
    ("the same with an outer Nesterov", "tab:pink", "updates:.*outer=.*/adacomp"),
    ("SparseLoCo's topk, every H steps", "tab:blue", "updates:.*/topk:chunk"),
    ("DiLoCo; MuLoCo (square), also in 2 bits", "tab:green", "updates:"),
    ("DeMo", "tab:orange", "signs/demo"),
    ("gradients by dgc, adacomp, powersgd", "tab:gray", ""),
)
# Those whose labels are to the left of their points, where others would be beneath.
LEFT = re.compile("muon/none|signs/demo|updates:every=15/topk")
ALONE = "a rank alone, without exchange"


class Group(NamedTuple):
    """Rows of a run at its best rate, and those of its grid, seed 0."""

    ranks: int
    run: str
    best: List[Dict[str, Any]]
    grid: List[Dict[str, Any]]


def without_rate(run: str) -> str:
    """A RUN as tables have it: AdamW is the task's own."""
    name = re.sub(":lr=[^/]+/", "/", run).removeprefix("adam/")
    return ALONE if name == "alone/none" else name


def grouped(rows: List[Dict[str, Any]]) -> List[Group]:
    """Groups of all runs, of the steps that most rows have, the most bytes first."""
    steps = statistics.mode(row["steps"] for row in rows)
    by_run: Dict[Tuple[int, str], List[Dict[str, Any]]] = {}
    for row in rows:
        if row["steps"] == steps:
            by_run.setdefault((row["ranks"], without_rate(row["run"])), []).append(row)
    groups = []
    for (ranks, run), found in by_run.items():
        grid = sorted((row for row in found if row["seed"] == 0), key=lambda row: row["rate"])
        rate = min(grid, key=end_of)["rate"]
        best = sorted((r for r in found if r["rate"] == rate), key=lambda row: row["seed"])
        groups.append(Group(ranks, run, best, grid))
    return sorted(groups, key=lambda its: (its.ranks, -bytes_of(its.best[0])[0], its.run != "none"))


def end_of(row: Dict[str, Any]) -> float:
    """Where a run ends; infinitely high where it diverged."""
    loss = row["measured"][-1][1]
    return loss if math.isfinite(loss) else math.inf


def bytes_of(row: Dict[str, Any]) -> Tuple[float, float]:
    """(sent, received) a step of a rank, as `stats` counts payloads: one that is gathered is
    received from each other rank, one that is reduced counts once each way. A ring of N ranks moves
    2(N − 1)/N times the latter, which is not in these counts."""
    return row["measured"][-1][2] / row["steps"], row["received"]


def three_digits(number: float) -> float:
    number = float(f"{number:.3g}")
    return round(number) if number >= 100 else number


def figures_of(rows: List[Dict[str, Any]]) -> Dict[str, Any]:
    sent, received = (statistics.fmean(its) for its in zip(*map(bytes_of, rows)))
    ratios = [row["ratio"] for row in rows]
    wire = {"slow": SLOW, "fast": FAST} if sent else {}
    return {
        "bits": {str(row["seed"]): round(end_of(row), 4) for row in rows},
        "fewer": three_digits(statistics.fmean(ratios)) if all(ratios) else None,
        "sent": round(sent),
        "received": round(received),
        **{name: three_digits(8e3 * max(sent, received) / rate) for name, rate in wire.items()},
    }


def measured(groups: List[Group], device: str) -> Iterator[Tuple[Any, Any, Any]]:
    """The points of all groups; those of best rates are compared with none at its own."""
    nones = {group.ranks: group.best[0] for group in groups if group.run == "none"}
    for group in groups:
        none = nones[group.ranks]
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


def label(run: str) -> str:
    """A run's, beside its point: local steps, or the algorithm."""
    steps = re.search(r"every=(\d+)", run)
    if not steps:
        return re.split("[:/]", run.removeprefix("signs/"))[-1 if run.endswith("none") else 0]
    return f"H={steps[1]}" + ", 2 bits" * ("ratio=1," in run)


def plot(groups: List[Group], path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    ranks = statistics.mode(group.ranks for group in groups)
    for group in groups:
        if group.ranks != ranks:
            continue
        its = Estimate.of(list(map(end_of, group.best)))
        muon, run = group.run.startswith("muon/"), group.run.removeprefix("muon/")
        if group.run in ("none", ALONE):
            axes.axhline(its.mean, color="silver", linestyle="--", zorder=0)
        if group.run == ALONE:
            at = axes.get_yaxis_transform()
            axes.text(0.99, its.mean, ALONE, transform=at, ha="right", va="bottom", fontsize=8)
            continue
        sent = bytes_of(group.best[0])[0]
        color = next(color for _, color, kind in FAMILIES if re.match(kind, run))
        marker = "s" if muon else "o"
        axes.errorbar(sent, its.mean, its.half or 0, None, marker, color=color, capsize=3)
        side = -1 if LEFT.match(group.run) else 1
        axes.annotate(
            label(run),
            (sent, its.mean),
            (6 * side, 0),
            textcoords="offset points",
            ha="left" if side > 0 else "right",
            va="center",
            fontsize=8,
            color=color,
        )
    for name, color, _ in FAMILIES:
        axes.plot([], [], "o", color=color, label=name)
    axes.plot([], [], "s", color="white", markeredgecolor="black", label="squares: Muon inside")
    axes.legend(fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.1)
    axes.set_xlabel(f"bytes that a rank sends a step, {ranks} ranks")
    axes.set_ylabel("bits a character at the end, 95 % intervals")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=pathlib.Path, nargs="+")
    parser.add_argument("--points", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--machine", help="that trained")
    parser.add_argument("--device", default="cuda", help="of that machine (default: cuda)")
    parser.add_argument("--plot", type=pathlib.Path)
    options = parser.parse_args()
    lines = [line for file in options.rows for line in file.read_text().splitlines()]
    groups = grouped(list(map(json.loads, lines)))
    if options.points:
        found = measured(groups, options.device)
        points.write(options.points, UNITS, found, machine=options.machine)
    if options.plot:
        plot(groups, options.plot)


if __name__ == "__main__":
    main()
