"""The benchmark of convergence, on its smallest task."""

import json
import pathlib
import subprocess
import sys

import pytest
import results

torch = pytest.importorskip("torch")

import convergence  # noqa: E402
from tasks import TASKS  # noqa: E402

BENCHMARK = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "convergence.py"

pytestmark = pytest.mark.extended

RUNS = [
    "none",
    "dgc:ratio=0.05",
    "adam/updates/topk:ratio=0.05",
    "adam/updates:every=4,outer=1+0.5/topk:ratio=0.2",
    "corrected/updates/topk:ratio=0.05",
]


def run(out, *arguments):
    given = [sys.executable, str(BENCHMARK), "digits", *arguments, "--out", str(out)]
    return subprocess.run(given, capture_output=True, text=True, timeout=3600)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(file, what was printed)"""
    out = tmp_path_factory.mktemp("convergence") / "runs.jsonl"
    ran = run(
        out,
        *RUNS,
        "--ranks",
        "2",
        "--steps",
        "100",
        "--layers",
        "--plot",
        str(out.with_suffix(".png")),
        "--points",
        str(out.with_name("points.jsonl")),
    )
    assert ran.returncode == 0, ran.stderr
    return out, ran.stdout


def test_compressed_training_learns_with_fewer_bytes(trained):
    rows = [json.loads(line) for line in trained[0].read_text().splitlines()]
    assert [row["run"] for row in rows] == RUNS
    for row in rows:
        steps, measures, sent = zip(*row["measured"])
        assert steps[-1] == 100 and list(sent) == sorted(sent) and measures[-1] > 85
    assert rows[0]["ratio"] == 1 and min(row["ratio"] for row in rows[1:]) > 10
    assert trained[0].with_suffix(".png").stat().st_size > 10_000


def test_the_table_has_every_run(trained):
    lines = [line for line in trained[1].splitlines() if line.startswith("|")]
    runs, layers = lines[: 2 + len(RUNS)], lines[2 + len(RUNS) :]
    assert runs[3].startswith("| dgc:ratio=0.05, 100 steps | 2 | 1 |")
    assert (
        layers[0]
        == "| layer | " + " | ".join(f"{run}, 100 steps, 2 ranks" for run in RUNS[1:]) + " |"
    )
    shown = {
        layer: [float(its) for its in ratios]
        for layer, *ratios in (line.strip("| ").split(" | ") for line in layers[2:])
    }
    # A small tensor of four steps' updates is sent once.
    assert shown["0.bias"] == [1, 1, 4, 1] and min(shown["7.weight"]) > 10, shown


def test_where_runs_end_are_points(trained):
    """Of one seed each, against the optimizer's own none."""
    points = results.read_points(trained[0].with_name("points.jsonl"))
    assert [point["at"]["run"] for point in points] == RUNS
    assert all(point["seeds"] == [0] and point["at"]["steps"] == 100 for point in points)
    dgc, adam = points[1], points[2]
    end = json.loads(trained[0].read_text().splitlines()[1])["measured"][-1][1]
    assert float(dgc["figures"]["accuracy"]["0"]) == pytest.approx(end, abs=1e-4)
    assert dgc["shown"]["accuracy"].baseline is points[0]["shown"]["accuracy"]
    # Adam without compression was not run.
    assert "against" not in adam


def test_what_is_there_is_not_run_again(trained):
    before = trained[0].read_text()
    assert run(trained[0], "none", "--ranks", "2", "--steps", "100").returncode == 0
    assert trained[0].read_text() == before


def test_a_rank_alone_has_its_part_of_each_batch_and_sends_nothing(trained):
    out, arguments = trained[0].with_name("alone.jsonl"), ["--ranks", "1", "2", "--steps", "10"]
    printed = run(out, "none", "alone/none", *arguments).stdout.splitlines()
    whole, _, alone, half = [json.loads(line) for line in out.read_text().splitlines()]
    assert alone["measured"] == [[*its, 0] for *its, _ in whole["measured"]] != half["measured"]
    assert alone["ratio"] is half["ratio"] is None and printed[-1].endswith(" |  |")


@pytest.mark.parametrize(
    "run, words",
    [
        (
            "rmsprop/none",
            r"a run is \[sgd/, adam/, muon/, signs/ or corrected/\]"
            r"\[updates/, drop/ or alone/\]SPEC",
        ),
        ("corrected/none", "corrected/ is for updates/"),
        ("updates/dgc:momentum=0.9", "dgc: momentum has no meaning where updates are compressed"),
    ],
)
def test_mistakes_are_named(run, words):
    with pytest.raises((SystemExit, ValueError), match=words):
        convergence.train("digits", run, seed=0, ranks=2, real=False, steps=1, local_size=1)


def test_too_few_samples_for_a_batch_are_refused():
    """They would be waited for without end."""
    few = [torch.zeros(63, 1), torch.zeros(63)]
    with pytest.raises(ValueError, match="a batch has 64 samples, and the data only 63"):
        next(TASKS["digits"].batches({"train": few}, seed=0))
