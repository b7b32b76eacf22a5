"""hvdcompress report: totals of a file of records by tensor, and a plot over steps."""

import argparse
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from ..engine import recording
from ..engine.tensor import SENT, SPENT
from . import arguments
from .printing import Columns, console, digits, figure, printable, table, write_json

Record = Mapping[str, Any]
WHOLE = "all tensors"
_LISTED = 12  # tensors in a plot

_COLUMNS: Columns = {
    "tensor": lambda line: line["name"],
    "sent by": lambda line: line["compressor"] or "",
    "elements": lambda line: "" if line["numel"] is None else f"{line['numel']}",
    "kB/step": lambda line: digits(line["bytes_sent"] / 1e3),
    "ratio": lambda line: digits(line["ratio"]),
    "gradient\nnorm": lambda line: digits(line["gradient_norm"]),
    "residual\nnorm": lambda line: digits(line["residual_norm"]),
    "encode\nms": lambda line: f"{1e3 * line['encode_seconds']:.2f}",
    "wait\nms": lambda line: f"{1e3 * line['exchange_seconds']:.2f}",
    "decode\nms": lambda line: f"{1e3 * line['decode_seconds']:.2f}",
}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="show what compression.record() has written",
        description="Shows a file that compression.record() has written: a table by tensor.",
    )
    parser.add_argument("file", metavar="FILE", help="a file of JSON lines")
    arguments.add_plot(parser, "draw bytes, norms and times over steps")
    arguments.add_json(parser)
    parser.set_defaults(run=_run, parser=parser)


def _run(options: argparse.Namespace) -> None:
    try:
        records = recording.read(options.file)
    except (OSError, ValueError) as error:
        options.parser.error(str(error))
    if not records:
        options.parser.error(f"{options.file}: no record yet")
    lines = by_tensor(records)
    if not write_json(lines, options.json):
        first, last = records[0], records[-1]
        said = printable(
            f"{options.file}: {last['spec']['id']}, rank {last['rank']} of {last['size']}, steps "
            f"{first['step']} to {last['step']}, {len(records)} records"
        )
        console().print(said, table(_COLUMNS, lines, left=("tensor", "sent by")), sep="\n")
    if options.plot:
        plot(records, options.plot)


def by_tensor(records: Sequence[Record]) -> List[Record]:
    """Averages records by tensor.

    Args:
        records: as `recording.read` returns them.

    Returns:
        A dict for each tensor, those that send most first, and then one for all tensors, with
        None as "numel" and "compressor". It has "name", "numel", "compressor"; averages of a step,
        of all that a record counts; "ratio"; and the last "gradient_norm" and "residual_norm". If
        records are not by tensor, there is only the one for all.
    """
    names = dict.fromkeys(name for record in records for name in record.get("tensors", {}))
    found = [
        (name, [(r["tensors"][name], r["steps"]) for r in records if name in r.get("tensors", {})])
        for name in names
    ]
    lines = [_line(name, said) for name, said in found]
    lines.sort(key=lambda line: -line["bytes_sent"])
    return [*lines, _line(WHOLE, [(record, record["steps"]) for record in records])]


def _line(name: str, said: Sequence[Tuple[Record, int]]) -> Record:
    steps = sum(count for _, count in said)
    line: Record = {
        key: sum(record[key] for record, _ in said) / max(steps, 1) for key in (*SENT, *SPENT)
    }
    last = said[-1][0]
    return {
        "name": name,
        "numel": last.get("numel"),
        "compressor": last.get("compressor"),
        **line,
        "ratio": line["dense_bytes"] / line["bytes_sent"] if line["bytes_sent"] else None,
        "gradient_norm": _last(said, "gradient_norm"),
        "residual_norm": _last(said, "residual_norm"),
    }


def _last(said: Sequence[Tuple[Record, int]], key: str) -> Optional[float]:
    return next((record[key] for record, _ in reversed(said) if record[key] is not None), None)


def plot(records: Sequence[Record], path: str) -> None:
    """Plots bytes, norms and seconds over steps, and bytes by tensor if records have them."""
    tensors = by_tensor(records)[:-1][:_LISTED]
    steps = [record["step"] for record in records]
    seconds = {"encode": "encode_seconds", "wait": "exchange_seconds", "decode": "decode_seconds"}
    norms = {"gradient": "gradient_norm", "residual": "residual_norm"}
    with figure(path, figsize=(11, 8)) as made:
        panels = made.subplots(2, 2).flat
        for axes, keys, unit, title, scale in (
            (panels[0], {"sent": "bytes_sent", "dense": "dense_bytes"}, 1e3, "kB a step", "log"),
            (panels[1], norms, None, "norms", "log"),
            (panels[2], seconds, 1e-3, "ms a step", "linear"),
        ):
            for label, key in keys.items():
                # Norms are those of the last step; the rest is of all steps since the record
                # before.
                values = [r[key] / max(r["steps"], 1) / unit if unit else r[key] for r in records]
                axes.plot(steps, values, label=label)
            axes.set(title=title, xlabel="step", yscale=scale)
            axes.legend()
        # A dollar sign begins a formula.
        names = [printable(line["name"]).replace("$", r"\$") for line in reversed(tensors)]
        panels[3].barh(names, [line["bytes_sent"] / 1e3 for line in reversed(tensors)])
        panels[3].set(title="kB a step by tensor", visible=bool(tensors))
