"""What a file of records shows: totals by tensor, and a plot over steps."""

from typing import Any, List, Mapping, Optional, Sequence, Tuple

Record = Mapping[str, Any]
WHOLE = "all tensors"
_SUMMED = (
    "bytes_sent",
    "dense_bytes",
    "elements_sent",
    "encode_seconds",
    "exchange_seconds",
    "decode_seconds",
)
_LISTED = 12  # tensors in a plot


def printable(text: str) -> str:
    """A text in one line, for terminals: what is no printable character is spelled as Python does.

    Args:
        text: of anyone's, as a tensor's name from a file.

    Returns:
        The text, with `\\x1b` for an escape character, and so on.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def by_tensor(records: Sequence[Record]) -> List[Record]:
    """For each tensor, those that send most first, and at last for all of them: "name", "numel" and
    "compressor" (None for all), what a step takes on average ("bytes_sent", "dense_bytes",
    "elements_sent", "encode_seconds", "exchange_seconds", "decode_seconds"), "ratio", and the last
    norms, "gradient_norm" and "residual_norm". Without records by tensor there is the last line
    alone."""
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
    line: Record = {key: sum(record[key] for record, _ in said) / max(steps, 1) for key in _SUMMED}
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
    """Draws bytes, norms and seconds over steps, and bytes by tensor where that is known, into a
    picture."""
    from matplotlib.figure import Figure

    tensors = by_tensor(records)[:-1][:_LISTED]
    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(2, 2).flat
    steps = [record["step"] for record in records]
    for axes, keys, unit, title in (
        (panels[0], ("bytes_sent", "dense_bytes"), 1e3, "kB a step"),
        (panels[2], ("encode_seconds", "exchange_seconds", "decode_seconds"), 1e-3, "ms a step"),
    ):
        for key in keys:
            axes.plot(
                steps,
                [record[key] / max(record["steps"], 1) / unit for record in records],
                label=key.replace("_", " "),
            )
        axes.set(title=title)
    panels[0].set_yscale("log")
    for key in ("gradient_norm", "residual_norm"):
        panels[1].plot(
            steps,
            [float("nan") if record[key] is None else record[key] for record in records],
            label=key.replace("_", " "),
        )
    panels[1].set(title="norms", yscale="log")
    # A dollar sign begins a formula.
    names = [printable(line["name"]).replace("$", r"\$") for line in reversed(tensors)]
    panels[3].barh(names, [line["bytes_sent"] / 1e3 for line in reversed(tensors)])
    panels[3].set(title="kB a step by tensor", visible=bool(tensors))
    for axes in panels[:3]:
        axes.set(xlabel="step")
        axes.legend(frameon=False)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
