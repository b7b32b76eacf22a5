"""Output of commands: text, tables, JSON, a progress bar."""

import json
import pathlib
import sys
from typing import Any, Collection, Iterable, Optional, Sequence


def printable(text: str) -> str:
    """A text in one line, for terminals: what is no printable character is spelled as Python does.

    Args:
        text: of anyone's, as a tensor's name from a file.

    Returns:
        The text, with `\\x1b` for an escape character, and so on.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def console(stderr: bool = False) -> Any:
    """Rich's console, which prints text as it is."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 140
    return Console(markup=False, highlight=False, stderr=stderr, width=width)


def table(titles: Iterable[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> Any:
    """A table of text; columns named in `right` are aligned right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for title in titles:
        made.add_column(title, justify="right" if title in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*map(printable, row))
    return made


def with_progress(items: Collection[Any]) -> Iterable[Any]:
    """The items, one after the other, behind a progress bar: on standard error, and only on a
    terminal."""
    from rich.progress import track

    hidden = not sys.stderr.isatty()
    return track(items, "measuring", console=console(stderr=True), transient=True, disable=hidden)


def digits(number: Optional[float]) -> str:
    """A number with three digits, or more before the point; - for None."""
    if number is None:
        return "-"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def write_json(found: Any, path: Optional[str]) -> bool:
    """Writes the results, where --json asks for it.

    Args:
        found: the results.
        path: a file; - for standard output; None for nowhere.

    Returns:
        Whether standard output has the JSON, and must get nothing else.
    """
    if path:
        text = json.dumps(found, indent=2) + "\n"
        sys.stdout.write(text) if path == "-" else pathlib.Path(path).write_text(text)
    return path == "-"


def save_figure(figure: Any, path: str) -> None:
    """Draws grids, legends and numbers, as in all figures, and writes the picture."""
    from matplotlib.ticker import LogFormatterSciNotation

    class Plain(LogFormatterSciNotation):
        """Labels the ticks that a power of ten would label, with numbers as tables have them."""

        def __call__(self, x: float, pos: Optional[int] = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_formatter(), LogFormatterSciNotation):
                axis.set_major_formatter(Plain())
                axis.set_minor_formatter(Plain(minor_thresholds=(2, 0.5)))
        axes.grid(alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=130)
