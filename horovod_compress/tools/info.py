"""hvdcompress info: all compressions, and the options of some."""

import argparse
import inspect
from typing import Any

from ..compressors import available, find, get_compressor
from . import arguments
from .printing import Columns, console, table, write_json

_ALGORITHMS: Columns = {
    "id": lambda item: item[0],
    "collective": lambda item: item[1]["collective"],
    "paper": lambda item: item[1]["paper"],
}
_OPTIONS: Columns = {
    "option": lambda item: item[0],
    "default": lambda item: spelled(item[1]["default"]),
    "values": lambda item: item[1]["values"],
    "meaning": lambda item: item[1]["doc"],
}


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "info",
        help="list all algorithms, or the options of some",
        description="Lists all algorithms. With IDs, says what these do and lists their options.",
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="algorithms to describe, such as dgc")
    arguments.add_json(parser)
    parser.set_defaults(run=_run, parser=parser)


def _run(options: argparse.Namespace) -> None:
    try:
        ids = [str(get_compressor(spec).id) for spec in options.ids or available()]
    except ValueError as error:
        options.parser.error(str(error))
    chosen = {id: available()[id] for id in ids}
    if write_json(chosen, options.json):
        return
    terminal = console()
    if not options.ids:
        terminal.print(table(_ALGORITHMS, chosen.items(), left=_ALGORITHMS))
        return
    for id, about in chosen.items():
        terminal.print(f"{id} · {about['collective']} · {about['paper']}")
        terminal.print((inspect.getdoc(find(id)) or "").partition("\n\n")[0].replace("\n", " "))
        its = table(_OPTIONS, about["options"].items(), left=_OPTIONS)
        terminal.print(its if about["options"] else "no options", end="\n\n")


def spelled(value: Any) -> str:
    """A value as a spec spells it."""
    if isinstance(value, (tuple, list)):
        return "+".join(map(spelled, value)) or "-"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
