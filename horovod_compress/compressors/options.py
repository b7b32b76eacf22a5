"""Kinds of values of compressors' options. Each kind parses a spec's text and checks values."""

import dataclasses
import math
import numbers
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Optional, Tuple


class Kind(ABC):
    """A kind of value, or None too where it is optional. `said` describes its values, and
    `type_said` does for type checkers; `parse` and `check` raise ValueError for any other."""

    said: str
    type_said: str
    optional = False

    def parse(self, text: str) -> Any:
        """The value that a spec's text stands for."""
        return text

    @abstractmethod
    def check(self, value: Any) -> Any:
        """The value in its normal form."""

    def __str__(self) -> str:
        return self.said + (", or none" if self.optional else "")

    @property
    def hint(self) -> str:
        """The type of the values that `check` accepts, as Python writes it."""
        return f"Optional[{self.type_said}]" if self.optional else self.type_said


def option(kind: Kind, default: Any, doc: str) -> Any:
    """A dataclass field for an option of a compressor. doc is a line that explains it."""
    return dataclasses.field(default=default, metadata={"kind": kind, "doc": doc})


class _Range(Kind):
    """Numbers of one `type`, made of anything like it, from low, or above it where it is open, to
    high."""

    type: ClassVar[Any]
    like: ClassVar[Any]
    # How the type and its numbers are said.
    noun: ClassVar[str]
    digits = ""

    def __init__(
        self, low: float = 0, high: float = math.inf, low_open: bool = False, optional: bool = False
    ) -> None:
        self.low, self.high, self.low_open, self.optional = low, high, low_open, optional
        self.said = f"{self.noun} {'above' if low_open else 'at least'} {low:{self.digits}}" + (
            "" if high == math.inf else f" and at most {high:{self.digits}}"
        )

    def parse(self, text: str) -> Any:
        return None if self.optional and text.lower() == "none" else self.type(text)

    def check(self, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if not isinstance(value, self.like) or isinstance(value, bool) or value == math.inf:
            raise ValueError
        if not self.low <= value <= self.high or (self.low_open and value == self.low):
            raise ValueError
        return self.type(value)


class Number(_Range):
    """A float within [low, high], or (low, high] where low is open; None too where optional."""

    type, like, noun, digits = float, numbers.Real, "a number", "g"
    type_said = "float"


class Count(_Range):
    """A whole number from `low` to `high`; None too where optional."""

    type, like, noun = int, numbers.Integral, "a whole number,"
    type_said = "int"

    def __init__(self, low: int = 0, high: float = math.inf, optional: bool = False) -> None:
        super().__init__(low, high, optional=optional)


class ZeroOrCount(Count):
    """0, or a whole number from `low` on."""

    def __str__(self) -> str:
        return f"0, or {super().__str__()}"

    def check(self, value: Any) -> Optional[int]:
        return 0 if value == 0 and not isinstance(value, bool) else super().check(value)


class Ascending(Kind):
    """Two to eight whole numbers, each larger than the one before, joined by '+' in a spec."""

    type_said = "Sequence[int]"

    def __init__(self, low: int, high: int) -> None:
        self.each = Count(low, high)
        self.said = f"2 to 8 ascending whole numbers from {low} to {high}, joined by '+'"

    def parse(self, text: str) -> Tuple[int, ...]:
        return tuple(map(int, text.split("+")))

    def check(self, value: Any) -> Tuple[int, ...]:
        value = tuple(map(self.each.check, value))
        if not 2 <= len(value) <= 8 or list(value) != sorted(set(value)):
            raise ValueError
        return value


class Auto(Kind):
    """Another kind's value, or the word auto."""

    def __init__(self, kind: _Range) -> None:
        self.kind, self.said = kind, f"{kind}, or auto"
        self.type_said = f'Union[{kind.hint}, Literal["auto"]]'

    def parse(self, text: str) -> Any:
        return text if text == "auto" else self.kind.parse(text)

    def check(self, value: Any) -> Any:
        return value if isinstance(value, str) and value == "auto" else self.kind.check(value)


class Flag(Kind):
    """true or false; None too where optional."""

    said = "true or false"
    type_said = "bool"

    def __init__(self, optional: bool = False) -> None:
        self.optional = optional

    def parse(self, text: str) -> Optional[bool]:
        word = text.lower()
        if word not in ("true", "false", "none") or (word == "none" and not self.optional):
            raise ValueError
        return None if word == "none" else word == "true"

    def check(self, value: Any) -> Optional[bool]:
        if isinstance(value, bool) or (value is None and self.optional):
            return value
        raise ValueError


class OneOf(Kind):
    """One of some words."""

    def __init__(self, *words: str) -> None:
        self.words, self.said = words, "one of " + ", ".join(words)
        self.type_said = f"Literal[{', '.join(map(repr, words))}]".replace("'", '"')

    def check(self, value: Any) -> str:
        if value not in self.words:
            raise ValueError
        return value


class Patterns(Kind):
    """Names or shell-style patterns of names, joined by '+' where they are one text."""

    said = "patterns of tensor names, joined by '+'"
    type_said = "Union[str, Sequence[str]]"

    def parse(self, text: str) -> Tuple[str, ...]:
        return tuple(part for part in text.split("+") if part)

    def check(self, value: Any) -> Tuple[str, ...]:
        value = self.parse(value) if isinstance(value, str) else value
        if not isinstance(value, (tuple, list)) or not all(isinstance(part, str) for part in value):
            raise ValueError
        return tuple(value)


class Schedule(Kind):
    """Densities by step: pairs (first step, ratio), ascending from step 0; in a spec
    0/0.25+500/0.001."""

    said = "pairs step/ratio from step 0 on, joined by '+': 0/0.25+500/0.001"
    type_said = "Sequence[Tuple[int, float]]"

    def parse(self, text: str) -> Tuple[Tuple[int, float], ...]:
        return tuple(
            (int(step), float(ratio))
            for step, _, ratio in (part.partition("/") for part in text.split("+"))
        )

    def check(self, value: Any) -> Tuple[Tuple[int, float], ...]:
        pairs = tuple(
            (Count().check(step), Number(0, 1, low_open=True).check(ratio)) for step, ratio in value
        )
        steps = [step for step, _ in pairs]
        if pairs and (steps[0] != 0 or sorted(set(steps)) != steps):
            raise ValueError
        return pairs
