"""Output of commands: text, tables, JSON, a progress bar."""

import contextlib
import json
import pathlib
import sys
from typing import Any, Callable, Collection, Dict, Iterable, Iterator, Optional

# {title: function that shows a result}.
Columns = Dict[str, Callable[[Any], str]]
_STYLE = {
    "axes.grid": True,
    "axes.grid.which": "both",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "legend.fontsize": "small",
    "legend.frameon": False,
    "savefig.dpi": 130,
    # Numbers as tables have them, not powers of ten.
    "axes.formatter.min_exponent": 9,
}


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


def table(columns: Columns, *groups: Iterable[Any], left: Collection[str]) -> Any:
    """A table of results.

    Args:
        columns: how a result is shown in each.
        groups: results, with an empty line between those of two groups.
        left: titles of columns that are aligned left; others are aligned right.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for title in columns:
        made.add_column(title, justify="left" if title in left else "right", overflow="fold")
    for group in groups:
        made.add_section()
        for result in group:
            made.add_row(*(printable(shown(result)) for shown in columns.values()))
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


@contextlib.contextmanager
def figure(path: str, **options: Any) -> Iterator[Any]:
    """An empty figure of matplotlib's, with these options, which is written to a file where the
    body of the `with` statement ends."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        made = Figure(layout="constrained", **options)
        yield made
        made.savefig(path)
