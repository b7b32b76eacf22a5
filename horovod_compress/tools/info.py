"""hvdcompress info: all compressions, and the options of some."""

import argparse
import inspect
from typing import Any

from .. import available, get_compressor
from . import arguments
from .printing import console, table, write_json


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
        classes = {
            str(cls.id): cls
            for cls in (type(get_compressor(spec)) for spec in options.ids or available())
        }
    except ValueError as error:
        options.parser.error(str(error))
    chosen = {id: available()[id] for id in classes}
    if write_json(chosen, options.json):
        return
    terminal = console()
    if not options.ids:
        terminal.print(
            table(
                ("id", "collective", "paper"),
                [(id, about["collective"], about["paper"]) for id, about in chosen.items()],
            )
        )
    for id, about in chosen.items() if options.ids else ():
        terminal.print(f"{id} · {about['collective']} · {about['paper']}")
        terminal.print((inspect.getdoc(classes[id]) or "").partition("\n\n")[0].replace("\n", " "))
        lines = [
            (name, spelled(found["default"]), found["values"], found["doc"])
            for name, found in about["options"].items()
        ]
        terminal.print(
            table(("option", "default", "values", "meaning"), lines) if lines else "no options",
            end="\n\n",
        )


def spelled(value: Any) -> str:
    """A value as a spec spells it."""
    if isinstance(value, (tuple, list)):
        return "+".join(map(spelled, value)) or "-"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
