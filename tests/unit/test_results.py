"""The tables of the documentation are those that their points make, and figures in prose are
theirs."""

import json
import pathlib
import re
import shutil
import types

import points
import pytest
import results
import step_time
import time_to_accuracy

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ROOT / "docs" / "results"

POINT = {
    "at": {"run": "none"},
    "figures": {"accuracy": {"mean": 90.0, "sd": 0.1}},
    "units": {"accuracy": "%"},
    "seeds": [0, 1, 2],
    "command": "by hand",
    "machine": None,
    "date": "2026-11-27",
}
PAGE = """Before.

<!-- results {"table": "t", "rows": ["run"], "columns": {"is": ["{bits}", "{accuracy}"],
"by": ["{accuracy.difference}", "none"], "%": ["{accuracy.percent}", "none"]}} -->
<!-- end of results -->
After.
"""


def other(accuracy, run="dgc:ratio=0.01", **more):
    return {**POINT, "at": {"run": run}, "figures": {"accuracy": accuracy}, **more}


@pytest.fixture
def pages(tmp_path):
    """Returns what writes points and a page of them, and gives its table's rows."""

    data, page = tmp_path / "docs/results/data/t.jsonl", tmp_path / "README.md"
    data.parent.mkdir(parents=True)

    def made(*points):
        data.write_text("".join(json.dumps(point) + "\n" for point in points))
        page.write_text(PAGE)
        assert results.main([], tmp_path) == 0
        lines = page.read_text().splitlines()
        return [line for line in lines if line.startswith("|")][2:]

    made.data, made.page, made.root = data, page, tmp_path
    return made


def test_the_pages_are_current():
    assert results.main(["--check"]) == 0


def test_every_figure_has_a_unit():
    for path in (PAGES / "data").glob("*.jsonl"):
        for point in results.read_points(path):
            numbers = {key for key, its in point["figures"].items() if not isinstance(its, str)}
            assert numbers == point["units"].keys(), (path.name, point["at"])


def test_what_is_not_current_is_said_and_left(tmp_path, capsys):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    page = tmp_path / "docs" / "results" / "performance.md"
    changed = re.sub(r"\| \d+ \|", "| 0 |", page.read_text(), count=1)
    assert changed != page.read_text()
    page.write_text(changed)
    assert results.main(["--check"], tmp_path) == 1
    assert "performance.md is not current: run scripts/results" in capsys.readouterr().err
    assert page.read_text() == changed
    assert results.main([], tmp_path) == 0
    assert page.read_text() == (PAGES / "performance.md").read_text()


@pytest.fixture(scope="module")
def tables():
    return {path.stem: results.read_points(path) for path in (PAGES / "data").glob("*.jsonl")}


@pytest.mark.parametrize(
    "page, least", [("README.md", 8), ("docs/choose.md", 25), ("docs/results/findings.md", 80)]
)
def test_a_figure_with_one_digit_changed_is_said(page, least, tables):
    changed = 0
    for prose, figures in results.listed((ROOT / page).read_text(), tables):
        assert not results.unlike(prose, figures)
        for found in results.MEASURED.finditer(prose):
            for digit in re.finditer(r"\d", found[0]):
                at, other = found.start() + digit.start(), str((int(digit[0]) + 1) % 10)
                told = results.unlike(prose[:at] + other + prose[at + 1 :], figures)
                assert told, prose[at - 40 : at + 20]
            changed += 1
    assert changed > least


def test_figures_in_prose_are_those_of_points(pages):
    pages(POINT, other({"mean": 89.0, "sd": 0.3}, against={"run": "none"}))
    tables = {"t": results.read_points(pages.data)}

    def said(prose, *entries):
        page = f"{prose}\n\n<!-- figures {json.dumps(entries)} -->\n"
        return [its for found in results.listed(page, tables) for its in results.unlike(*found)]

    entry = {"table": "t", "at": {"run": "dgc:ratio=0.01"}}
    below = {**entry, "as": ["{accuracy.difference:below}", "{accuracy.percent:+.0}"]}
    prose = "With `ratio=0.01` it ends 1.0 ±\n0.7 points below, −1 ± 1 %, of 2 ranks."
    assert not said(prose, below)
    wrong = said(prose.replace("1.0", "2.0"), below)
    assert wrong[0].startswith("no 1.0 ± 0.7 after") and "2.0 ± 0.7 is in no list" in wrong[1]
    assert len(said(prose.replace("−1", "+1"), below)) == 2
    assert said(f"{prose} Or 3 %.", below) and not said(f"{prose} Or 3 %.", below, "3 %")
    with pytest.raises(ValueError, match="−1.0 ± 0.7.* is not above the baseline"):
        said(prose, {**entry, "as": "{accuracy.difference:above}"})
    with pytest.raises(ValueError, match="0 points of t are at run fp16"):
        said(prose, {**entry, "at": {"run": "fp16"}, "as": "{accuracy}"})


def test_a_point_that_no_page_shows_is_an_error(pages, capsys):
    pages(POINT)
    pages.page.write_text("No table.")
    assert results.main(["--check"], pages.root) == 1
    assert "t.jsonl: no page shows the point at run none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "point, said",
    [
        (POINT, "t.jsonl:2: a second point at run none"),
        ({**POINT, "sed": 0}, "t.jsonl:2: missing or unknown: ['sed']"),
        (
            other(90.0, "topk", against={"run": "fp16"}),
            "t.jsonl: 0 points at run fp16, the baseline of run topk",
        ),
    ],
)
def test_what_is_no_point_is_refused(pages, point, said):
    with pytest.raises(ValueError) as error:
        pages(POINT, point)
    assert said in str(error.value)


def test_student_s_t():
    """Its 97.5 % quantiles, as other software has them."""
    for freedom, its in [(1, 12.7062), (2, 4.30265), (2.5, 3.57465), (4, 2.77645), (30, 2.04227)]:
        assert results.t_quantile(freedom) == pytest.approx(its, rel=1e-4)


def test_unpaired_seeds_have_welchs_interval(pages):
    """Means 90.0 and 89.0, standard deviations 0.1 and 0.3, three seeds each: 0.183 · t(2.44)."""
    rows = pages(POINT, other({"mean": 89.0, "sd": 0.3}, against={"run": "none"}))
    assert rows == [
        "| none | 90.0 ± 0.2 | none | none |",
        "| `dgc:ratio=0.01` | 89.0 ± 0.7 | **−1.0 ± 0.7** | **−1.1 ± 0.7 %** |",
    ]


def test_seeds_that_are_known_are_paired(pages):
    """Values that differ by far more from seed to seed than from run to run."""
    baseline = other({"0": 90.0, "1": 95.0, "2": 85.0}, "none")
    rows = pages(baseline, other({"0": 89.0, "1": 94.1, "2": 83.9}, against={"run": "none"}))
    assert rows[0].startswith("| none | 90 ± 12 |")
    assert rows[1].startswith("| `dgc:ratio=0.01` | 89 ± 13 | **−1.0 ± 0.2** |")
    known = {"mean": 89.0, "sd": 9.0, "differences": [-1.0, 0.5, -2.5]}
    rows = pages(POINT, other(known, against={"run": "none"}))
    assert "| −1.0 ± 3.7 | −1.1 ± 4.1 % |" in rows[1]


def test_one_seed_is_compared_with_the_same_one_and_has_no_interval(pages):
    baseline = other({"mean": 90.0, "sd": 0.1, "0": 90.1}, "none")
    rows = pages(baseline, other({"0": 89.0}, seeds=[0], against={"run": "none"}))
    assert rows[1] == "| `dgc:ratio=0.01` | 89.0 | −1.1 | −1.2 % |"


def test_a_list_is_shown_as_its_median_and_its_ends(pages):
    shown = "| `dgc:ratio=0.01` | {} | none | none |"
    assert pages(other([1.25, 4.5, 2.5])) == [shown.format("2.50 (1.25–4.5)")]
    assert pages(other([3, 1, 2])) == [shown.format("2 (1–3)")]


def test_columns_of_numbers_are_in_order():
    rows = [{"run": "none", "rate": rate, "bits": rate / 2} for rate in (2, 4, 1)]
    points = [{"at": {key: its[key] for key in ("run", "rate")}, "shown": its} for its in rows]
    layout = {"table": "t", "rows": ["run"], "across": "rate", "cell": "{bits}"}
    assert results.rendered(layout, {"t": points}).split("\n")[::2] == [
        "| run | 1 | 2 | 4 |",
        "| none | 0.5 | 1.0 | 2.0 |",
    ]


def test_benchmarks_write_points(tmp_path):
    its = {"seconds": 0.5, "bytes": 4e6, "peak": 1e9}
    found = {"floor": its, "none": its, "fp16": its, "topk": {**its, "encode": 0.01}}
    options = types.SimpleNamespace(model="lstm", launcher="mpi", rate="1gbit", ranks=2)
    options.seeds, options.target = [0, 1], 88
    path = tmp_path / "points.jsonl"
    for module, made in [
        (step_time, step_time.measured({("1 Gbit/s", 2): found}, options)),
        (time_to_accuracy, time_to_accuracy.measured({"topk": [{"seconds": 9.5, "steps": 2}] * 2},
                                                     options)),
    ]:  # fmt: skip
        points.write(path, module.UNITS, made, seeds=options.seeds)
        assert {point["at"].get("link") for point in results.read_points(path)} == {"1 Gbit/s"}
    assert results.read_points(path)[0]["figures"]["steps"] == {"0": 2, "1": 2}


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ('"rows"', '"at": {"run": "fp16"}, "rows"', "no point of t is at run fp16"),
        ('"{accuracy}"', '"{accurate}"', "no point has a figure of column 'is'"),
    ],
)
def test_a_layout_that_shows_nothing_is_refused(pages, right, wrong, said):
    pages(POINT)
    pages.page.write_text(PAGE.replace(right, wrong))
    with pytest.raises(ValueError, match=said):
        results.main([], pages.root)
