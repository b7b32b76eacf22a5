"""Arguments that several commands take, and the kinds of their values."""

import argparse
import contextlib
import math
import os
import pathlib
import re
from typing import Callable

from .models import MODELS

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


def add_model(parser: "argparse._ActionsContainer") -> None:
    parser.add_argument(
        "--model",
        choices=MODELS,
        default="resnet50",
        metavar="NAME",
        help=f"a known model: {', '.join(MODELS)} (default: resnet50)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=output,
        help="write the results to this JSON file; - prints them and nothing else",
    )


def add_plot(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--plot", metavar="FILE.png", type=_picture, help=help)


def number(text: str) -> float:
    """A finite number of at least 0."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number of at least 0, not {text!r}")


def rate(text: str) -> float:
    """Bits a second."""
    return _with_unit(r"([0-9.]+)([kmgt]?)bit", text, "a rate above 0, as 100mbit or 2.5gbit")


def parameters(text: str) -> float:
    """A number of parameters."""
    # A fraction without a unit would be meant in millions.
    pattern = r"(?=\d+$|.*[kmgbt])([0-9.]+)([kmgbt]?)"
    return _with_unit(pattern, text, "a number above 0, as 350k or 25.6M")


def _with_unit(pattern: str, text: str, wanted: str) -> float:
    """A number above 0 and its unit, the pattern's groups."""
    match = re.fullmatch(pattern, text.lower())
    with contextlib.suppress(ValueError):
        if match and float(match[1]):
            return float(match[1]) * _UNITS[match[2]]
    raise argparse.ArgumentTypeError(f"must be {wanted}, not {text!r}")


def whole(least: int) -> Callable[[str], int]:
    """Whole numbers of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}")
        return int(text)

    return read


def output(text: str) -> str:
    """A file in a folder that exists."""
    text = os.path.expanduser(text)
    if not pathlib.Path(text).resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {pathlib.Path(text).parent}")
    return text


def _picture(text: str) -> str:
    if pathlib.Path(text).suffix not in (".png", ".pdf", ".svg"):
        raise argparse.ArgumentTypeError(f"{text} must end in .png, .pdf or .svg")
    return output(text)
