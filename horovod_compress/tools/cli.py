"""hvdcompress, the command line tool: one module a command."""

import argparse
import importlib.util
import io
import sys
from typing import NoReturn, Optional, Sequence

from ..version import __version__
from . import bench, check, info, plan, report
from .printing import printable


class _Parser(argparse.ArgumentParser):
    """Its errors are one line, whatever files and arguments hold."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def main(argv: Optional[Sequence[str]] = None) -> None:
    # Where a terminal's encoding has no ‖, a question mark is better than no results.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    options = parser().parse_args(argv)
    for module in ["rich"] + ["matplotlib"] * bool(getattr(options, "plot", None)):
        if importlib.util.find_spec(module) is None:
            sys.exit(f"hvdcompress needs {module}: pip install 'horovod-compress[cli]'")
    try:
        options.run(options)
    # A file that cannot be written, or a disk that is full.
    except OSError as error:
        sys.exit(printable(f"hvdcompress: {error}"))


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    about = "Gradient compression for unmodified Horovod and PyTorch's DistributedDataParallel."
    made = _Parser(prog="hvdcompress", description=about)
    made.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = made.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for command in (info, bench, plan, check, report):
        command.add(commands)
    return made
