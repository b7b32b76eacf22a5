"""Kinds of values of compressors' options. Each kind parses a spec's text and checks values."""
import dataclasses
import math
import numbers
from typing import Any, Dict, List, Optional, Protocol, Tuple


class Kind(Protocol):
    """A kind of value. `str` of it describes its values; `parse` and `check` raise ValueError for any other."""

    def parse(self, text: str) -> Any:
        """The value that a spec's text stands for."""

    def check(self, value: Any) -> Any:
        """The value in its normal form."""


def option(kind: Kind, default: Any, doc: str) -> Any:
    """A dataclass field for an option of a compressor. doc is a line that explains it."""
    return dataclasses.field(default=default, metadata={"kind": kind, "doc": doc})


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


class Number:
    """A float within [low, high], or (low, high] where low is open; None too where optional."""

    def __init__(self, low: float, high: float = math.inf, low_open: bool = False, optional: bool = False) -> None:
        self.low, self.high, self.low_open, self.optional = low, high, low_open, optional

    def __str__(self) -> str:
        left = "above" if self.low_open else "at least"
        right = "" if self.high == math.inf else f" and at most {self.high:g}"
        return f"a number {left} {self.low:g}{right}" + (", or none" if self.optional else "")

    def parse(self, text: str) -> Optional[float]:
        return None if self.optional and text.lower() == "none" else float(text)

    def check(self, value: Any) -> Optional[float]:
        if value is None and self.optional:
            return None
        if not _is_number(value, numbers.Real) or not math.isfinite(value):
            raise ValueError
        if value < self.low or value > self.high or (self.low_open and value == self.low):
            raise ValueError
        return float(value)


class Count:
    """A whole number from `low` to `high`; None too where optional."""

    def __init__(self, low: int = 0, high: float = math.inf, optional: bool = False) -> None:
        self.low, self.high, self.optional = low, high, optional

    def __str__(self) -> str:
        right = "" if self.high == math.inf else f" and at most {self.high}"
        return f"a whole number, at least {self.low}{right}" + (", or none" if self.optional else "")

    def parse(self, text: str) -> Optional[int]:
        return None if self.optional and text.lower() == "none" else int(text)

    def check(self, value: Any) -> Optional[int]:
        if value is None and self.optional:
            return None
        if not _is_number(value, numbers.Integral) or not self.low <= value <= self.high:
            raise ValueError
        return int(value)


class ZeroOrCount(Count):
    """0, or a whole number from `low` on."""

    def __str__(self) -> str:
        return f"0, or {super().__str__()}"

    def check(self, value: Any) -> Optional[int]:
        return 0 if value == 0 and not isinstance(value, bool) else super().check(value)


class Ascending:
    """Two to eight whole numbers, each larger than the one before, joined by '+' in a spec."""

    def __init__(self, low: int, high: int) -> None:
        self.each = Count(low, high)

    def __str__(self) -> str:
        return f"2 to 8 ascending whole numbers from {self.each.low} to {self.each.high}, joined by '+'"

    def parse(self, text: str) -> Tuple[int, ...]:
        return tuple(int(part) for part in text.split("+"))

    def check(self, value: Any) -> Tuple[int, ...]:
        value = tuple(self.each.check(part) for part in value)
        if not 2 <= len(value) <= 8 or list(value) != sorted(set(value)):
            raise ValueError
        return value


class Auto:
    """Another kind's value, or the word auto."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def __str__(self) -> str:
        return f"{self.kind}, or auto"

    def parse(self, text: str) -> Any:
        return text if text == "auto" else self.kind.parse(text)

    def check(self, value: Any) -> Any:
        return value if isinstance(value, str) and value == "auto" else self.kind.check(value)


class Flag:
    """true or false; None too where optional."""

    def __init__(self, optional: bool = False) -> None:
        self.optional = optional

    def __str__(self) -> str:
        return "true or false" + (", or none" if self.optional else "")

    def parse(self, text: str) -> Optional[bool]:
        known: Dict[str, Optional[bool]] = {"true": True, "false": False}
        if self.optional:
            known["none"] = None
        try:
            return known[text.lower()]
        except KeyError:
            raise ValueError from None

    def check(self, value: Any) -> Optional[bool]:
        if isinstance(value, bool) or (value is None and self.optional):
            return value
        raise ValueError


class Choice:
    """One of some words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __str__(self) -> str:
        return "one of " + ", ".join(self.words)

    def parse(self, text: str) -> str:
        return text

    def check(self, value: Any) -> str:
        if value not in self.words:
            raise ValueError
        return value


class Patterns:
    """Names or shell-style patterns of names, joined by '+' in a spec."""

    def __str__(self) -> str:
        return "patterns of tensor names, joined by '+'"

    def parse(self, text: str) -> Tuple[str, ...]:
        return tuple(part for part in text.split("+") if part)

    def check(self, value: Any) -> Tuple[str, ...]:
        if isinstance(value, str):
            value = (value,)
        if not isinstance(value, (tuple, list)) or not all(isinstance(part, str) for part in value):
            raise ValueError
        return tuple(value)


class Schedule:
    """Densities by step: pairs (first step, ratio), ascending from step 0; in a spec 0/0.25+500/0.001."""

    def __str__(self) -> str:
        return "pairs step/ratio from step 0 on, joined by '+': 0/0.25+500/0.001"

    def parse(self, text: str) -> Tuple[Tuple[int, float], ...]:
        pairs = []
        for part in text.split("+"):
            step, _, ratio = part.partition("/")
            pairs.append((int(step), float(ratio)))
        return tuple(pairs)

    def check(self, value: Any) -> Tuple[Tuple[int, float], ...]:
        pairs: List[Any] = []
        for step, ratio in value:
            pairs.append((Count().check(step), Number(0, 1, low_open=True).check(ratio)))
        steps = [step for step, _ in pairs]
        if pairs and (steps[0] != 0 or sorted(set(steps)) != steps):
            raise ValueError
        return tuple(pairs)
