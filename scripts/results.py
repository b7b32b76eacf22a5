"""Writes the tables of README.md and docs/ from the measured points in docs/results/data/*.jsonl,
and compares the figures of their prose with the points.

A table stands between a comment with its layout and a comment that ends it, and a comment after
some prose lists the figures in it:

    <!-- results {"table": "growth", "rows": ["ranks"], "columns": {"ms a step": "{step}"}} -->
    <!-- end of results -->

    With 8 ranks a step of dgc takes 557.4 ms.
    <!-- figures [{"table": "growth", "at": {"ranks": 8}, "as": "{dgc} ms"}] -->

docs/results/data/README.md describes points, layouts and figures.
"""

import argparse
import decimal
import functools
import itertools
import json
import math
import pathlib
import re
import statistics
import sys
from typing import Any, Iterator, NamedTuple, Optional

ROOT = pathlib.Path(__file__).resolve().parents[1]
TABLE = re.compile(r"(<!-- results (\{.*?\})\s-->\n).*?(<!-- end of results -->)", re.DOTALL)
FIGURES = re.compile(r"<!-- figures (\[.*?\])\s-->", re.DOTALL)
# What of a page is no prose: code, comments, targets of links, papers.
NO_PROSE = re.compile(
    r"^```.*?^```$|<!--.*?-->|`[^`]+`|\]\([^)]*\)|arXiv [\d.]+", re.DOTALL | re.MULTILINE
)
HEADING = re.compile(r"^##+ .*$", re.MULTILINE)
# What in prose looks measured: decimals, intervals, and numbers with a unit.
_NUMBER = r"\d+(?:\.\d+)?"
MEASURED = re.compile(
    rf"{_NUMBER} ± {_NUMBER}|{_NUMBER} (?:%|points|times|ms|s|kB|MB|bits)(?!\w)|\d+\.\d+"
)
REQUIRED = {"at", "figures", "units", "command", "machine", "date"}
OPTIONAL = {"seeds", "commit", "against"}
STEPS = 20_000


# -- statistics


@functools.lru_cache(maxsize=None)
def t_quantile(freedom: float) -> float:
    """Student's t that 97.5 % of the distribution with `freedom` degrees of freedom are below."""
    # With t = √freedom · tan(angle), the density is proportional to cos(angle) ** (freedom − 1).
    width = math.pi / 2 / STEPS
    parts = [math.cos((i + 0.5) * width) ** (freedom - 1) for i in range(STEPS)]
    wanted = 0.95 * sum(parts)
    for i, upto in enumerate(itertools.accumulate(parts)):
        if upto >= wanted:
            angle = (i + 1 - (upto - wanted) / parts[i]) * width
            return math.sqrt(freedom) * math.tan(angle)
    raise ValueError(f"{freedom} degrees of freedom")


def welch(sd: float, n: int, other_sd: float, other_n: int) -> float:
    """Half of the 95 % interval of a difference of two means of unpaired values."""
    parts = sd**2 / n, other_sd**2 / other_n
    if not sum(parts):
        return 0.0
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (n - 1) + parts[1] ** 2 / (other_n - 1))
    return t_quantile(round(freedom, 3)) * math.sqrt(sum(parts))


class Estimate(NamedTuple):
    """A mean, and half of its 95 % interval where several values are known."""

    mean: float
    half: Optional[float]

    @classmethod
    def of(cls, values: list) -> "Estimate":
        values = [float(value) for value in values]
        mean, n = statistics.fmean(values), len(values)
        half = t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else None
        return cls(mean, half)

    def shown(self, digits: int, sign: str = "", unit: str = "") -> str:
        """The mean and the interval in two digits, but no more than `digits` behind the point."""
        if self.half:
            digits = max(0, min(digits, 1 - math.floor(math.log10(self.half))))
        mean = f"{self.mean:{sign}.{digits}f}".replace("-", "−")
        return f"{mean}{'' if self.half is None else f' ± {self.half:.{digits}f}'}{unit}"


class Change:
    """A difference from a baseline, as templates show it.

    In tables it has its sign, and is bold where the interval does not contain 0. Prose gives what
    is shown, and in how many digits: `:+` with the sign, `:above` and `:below` without, where the
    words say it; `:+.1` with one digit at most.
    """

    def __init__(self, found: Estimate, digits: int, unit: str = "") -> None:
        self.found, self.digits, self.unit = found, digits, unit

    def __format__(self, spec: str) -> str:
        side, _, digits = spec.partition(".")
        upwards, mean = {"above": 1, "below": -1}.get(side), self.found.mean
        if upwards and upwards * mean < 0:
            raise ValueError(f"{self} is not {side} the baseline")
        shown = self.found._replace(mean=abs(mean)) if upwards else self.found
        sign = "" if upwards else "+"
        text = shown.shown(int(digits) if digits else self.digits, sign, self.unit)
        significant = self.found.half is not None and abs(mean) > self.found.half
        return f"**{text}**" if not spec and significant else text

    def __str__(self) -> str:
        return format(self)


class Figure:
    """A figure of a point, as templates show it.

    Args:
        value: A number, a text, a list of repeated measurements (shown as median, least and most),
            or {"mean", "sd", "differences", seed: value}, of which what is known is given.
        seeds: Those of the point.
    """

    def __init__(self, value: Any, seeds: list) -> None:
        self.value, self.n, self.baseline = value, len(seeds), None
        if isinstance(value, (int, decimal.Decimal)):
            self.by_seed, self.mean, self.sd, self.digits = {}, float(value), None, digits_of(value)
        if isinstance(value, dict):
            self.by_seed = {key: float(its) for key, its in value.items() if key.isdigit()}
            known = value.get("mean")
            self.mean = float(statistics.fmean(self.by_seed.values()) if known is None else known)
            sd = value.get("sd")
            if sd is None and len(self.by_seed) > 1:
                sd = statistics.stdev(self.by_seed.values())
            self.sd = None if sd is None else float(sd)
            self.digits = digits_of(next(iter(value.values())) if known is None else known)

    def __str__(self) -> str:
        if isinstance(self.value, list):
            return f"{self.median} ({min(self.value)}–{max(self.value)})"
        if isinstance(self.value, str):
            return self.value
        if not isinstance(self.value, dict):
            return str(self.value).replace("-", "−")
        if self.sd is None:
            return Estimate(self.mean, None).shown(self.digits)
        half = t_quantile(self.n - 1) * self.sd / math.sqrt(self.n)
        return Estimate(self.mean, half).shown(self.digits)

    @property
    def median(self) -> str:
        """Of a list, with as many digits as it has."""
        return f"{statistics.median(self.value):.{digits_of(self.value[0])}f}"

    def _difference(self) -> tuple:
        """The difference from the baseline, and the mean that it is relative to."""
        base = self.baseline
        if base is None:
            raise KeyError("no baseline")
        if isinstance(self.value, dict) and "differences" in self.value:
            half = Estimate.of(self.value["differences"]).half
            return Estimate(self.mean - base.mean, half), base.mean
        if 0 < len(self.by_seed) == self.n and self.by_seed.keys() <= base.by_seed.keys():
            pairs = [(its, base.by_seed[seed]) for seed, its in self.by_seed.items()]
            reference = statistics.fmean(other for _, other in pairs)
            return Estimate.of([its - other for its, other in pairs]), reference
        known = self.sd is not None and base.sd is not None
        half = welch(self.sd, self.n, base.sd, base.n) if known else None
        return Estimate(self.mean - base.mean, half), base.mean

    @property
    def difference(self) -> Change:
        """Against the baseline."""
        return Change(self._difference()[0], self.digits)

    @property
    def percent(self) -> Change:
        """The same, relative to the baseline."""
        found, reference = self._difference()
        return Change(Estimate(*(its and 100 * its / reference for its in found)), 1, " %")

    @property
    def ratio(self) -> str:
        """To the baseline, of single numbers and medians."""
        if self.baseline is None:
            raise KeyError("no baseline")
        mine, base = (
            float(its.median if isinstance(its.value, list) else its.value)
            for its in (self, self.baseline)
        )
        return f"{mine / base:.3g}"

    @property
    def share(self) -> str:
        """A number as a share of one, in percent."""
        return f"{(100 * self.value).normalize():f} %"


def digits_of(number: Any) -> int:
    """How many there are behind the point."""
    return max(0, -decimal.Decimal(str(number)).as_tuple().exponent)


# -- points and tables


def read_points(path: pathlib.Path) -> list:
    """The points of a file.

    Raises:
        ValueError: a line is no point, has another's settings, or its baseline is not there.
    """
    points = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        # Decimals keep the digits that were measured.
        point = json.loads(line, parse_float=decimal.Decimal)
        wrong = (REQUIRED - point.keys()) | (point.keys() - REQUIRED - OPTIONAL)
        if wrong:
            raise ValueError(f"{path.name}:{number}: missing or unknown: {sorted(wrong)}")
        if any(other["at"] == point["at"] for other in points):
            raise ValueError(f"{path.name}:{number}: a second point at {named(point['at'])}")
        seeds = point.get("seeds", [])
        point["shown"] = {name: Figure(value, seeds) for name, value in point["figures"].items()}
        points.append(point)
    for point in points:
        if "against" in point:
            set_baseline(path.name, point, points)
    return points


def set_baseline(where: str, point: dict, points: list) -> None:
    """Tells the figures of a point those that they are compared with."""
    wanted = {**point["at"], **point["against"]}
    wanted = {key: its for key, its in wanted.items() if its is not None}
    found = [other for other in points if other["at"] == wanted]
    if len(found) != 1:
        raise ValueError(
            f"{where}: {len(found)} points at {named(wanted)}, the baseline of {named(point['at'])}"
        )
    for name, figure in point["shown"].items():
        figure.baseline = found[0]["shown"].get(name)


def named(at: dict) -> str:
    """The settings of a point."""
    return ", ".join(f"{key} {its}" for key, its in at.items())


def matches(point: dict, at: dict) -> bool:
    """Returns whether a point has these settings, each a value or a list of values."""
    return all(
        point["at"].get(key) in (its if isinstance(its, list) else [its]) for key, its in at.items()
    )


def chosen(layout: dict, tables: dict) -> list:
    """The points of a layout, with all that its templates may name."""
    rows = []
    for part in layout.get("from", [layout]):
        at = part.get("at", {})
        found = [point for point in tables.get(part["table"], []) if matches(point, at)]
        if not found:
            raise ValueError(f"no point of {part['table']} is at {named(at)}")
        for point in found:
            point["used"] = True
            rows.append({**point["at"], **part.get("with", {}), **point["shown"]})
    return rows


def cell(templates: Any, fields: dict) -> str:
    """The first template whose fields there are, filled in; empty where there is none."""
    for template in [templates] if isinstance(templates, str) else templates:
        try:
            return template.format(**fields)
        except (KeyError, AttributeError):
            continue
    return ""


def code(value: Any) -> str:
    """A setting, specs and options in the font of code."""
    return f"`{value}`" if re.match(r"--|\S*[:=/]\S*$", str(value)) else str(value)


def rendered(layout: dict, tables: dict) -> str:
    """A layout's table in Markdown."""
    rows, across = {}, {}
    for fields in chosen(layout, tables):
        rows.setdefault(tuple(fields.get(key, "") for key in layout["rows"]), []).append(fields)
        if layout.get("across") in fields:
            across[fields[layout["across"]]] = None
    if all(isinstance(value, (int, decimal.Decimal)) for value in across):
        across = sorted(across)
    columns = layout.get("columns", {})
    titles = [*layout.get("titles", layout["rows"]), *columns]
    titles += [code(value) for value in across] if "across" in layout else []
    body = []
    for key, found in rows.items():
        line = [code(value) for value in key]
        for templates in columns.values():
            line.append(next(filter(None, (cell(templates, fields) for fields in found)), ""))
        if "across" in layout:
            cells = {
                fields.get(layout["across"]): cell(fields.get("cell", layout["cell"]), fields)
                for fields in found
            }
            line += [cells.get(value, "") for value in across]
        body.append(line)
    for title, *cells in zip(titles, *body):
        if not any(cells):
            raise ValueError(f"no point has a figure of column {title!r} in {layout}")
    right = [
        all(re.match(r"[*−+\d]", line[i]) for line in body if line[i]) for i in range(len(titles))
    ]
    rule = "|" + "".join("---:|" if its else "---|" for its in right)
    return "\n".join(
        ["| " + " | ".join(titles) + " |", rule] + ["| " + " | ".join(line) + " |" for line in body]
    )


def written(page: str, tables: dict) -> str:
    """A page with its tables written anew."""

    def table(found: re.Match) -> str:
        layout = json.loads(found[2], parse_float=decimal.Decimal)
        return f"{found[1]}\n{rendered(layout, tables)}\n\n{found[3]}"

    return TABLE.sub(table, page)


# -- figures in prose


def stated(entry: dict, tables: dict) -> list:
    """The texts that an entry of a list of figures stands for."""
    points = tables.get(entry["table"], [])
    found = [point for point in points if matches(point, entry["at"])]
    if len(found) != 1:
        raise ValueError(f"{len(found)} points of {entry['table']} are at {named(entry['at'])}")
    point, templates = found[0], entry["as"]
    point["used"] = True
    if "against" in entry:
        shown = {
            name: Figure(its.value, point.get("seeds", [])) for name, its in point["shown"].items()
        }
        point = {**point, "against": entry["against"], "shown": shown}
        set_baseline(entry["table"], point, points)
    return [
        template.format(**point["shown"])
        for template in ([templates] if isinstance(templates, str) else templates)
    ]


def listed(page: str, tables: dict) -> Iterator[tuple]:
    """(prose, [(figure, its entry)]) of each list of figures in a page: what is above it, from the
    list or heading before."""
    begin = 0
    for layout in FIGURES.finditer(page):
        prose = NO_PROSE.sub(" ", TABLE.sub(" ", page[begin : layout.start()]))
        prose = HEADING.split(prose)[-1]
        # A text is a setting: nothing that was measured.
        yield (
            " ".join(prose.split()),
            [
                (text, entry)
                for entry in json.loads(layout[1], parse_float=decimal.Decimal)
                for text in ([entry] if isinstance(entry, str) else stated(entry, tables))
            ],
        )
        begin = layout.end()


def unlike(prose: str, figures: list) -> list:
    """The figures of some prose that are not as its list has them."""
    wrong, at = [], 0
    for text, entry in figures:
        found = re.compile(rf"(?<![\d.+−]){re.escape(text)}(?!\.?\d)").search(prose, at)
        if found is None:
            wrong.append(f"no {text} after “…{prose[:at][-40:]}”: {entry}")
        else:
            wrong += unlisted(prose[at : found.start()])
            at = found.end()
    return wrong + unlisted(prose[at:])


def unlisted(prose: str) -> list:
    """The figures that look measured where no list has them."""
    return [
        f"{its[0]} is in no list: “…{prose[: its.end()][-40:]}”" for its in MEASURED.finditer(prose)
    ]


def main(arguments: Optional[list] = None, root: pathlib.Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if not current")
    options = parser.parse_args(arguments)
    data = sorted(root.glob("docs/results/data/*.jsonl"))
    tables = {path.stem: read_points(path) for path in data}
    wrong = []
    for path in sorted([*root.glob("README.md"), *root.glob("docs/**/*.md")]):
        before = path.read_text(encoding="utf-8")
        after = written(before, tables)
        for prose, figures in listed(after, tables):
            wrong += [f"{path.name}: {its}" for its in unlike(prose, figures)]
        if after != before and options.check:
            wrong.append(f"{path.name} is not current: run scripts/results")
        elif after != before:
            path.write_text(after, encoding="utf-8")
    for name, points in tables.items():
        wrong += [
            f"{name}.jsonl: no page shows the point at {named(point['at'])}"
            for point in points
            if "used" not in point
        ]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
