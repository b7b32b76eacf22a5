"""What benchmarks/loss_over_bytes.py trains next, and what bytes_figure.py makes of it."""

import json
import math
import pathlib
import subprocess
import sys

import pytest
import results

torch = pytest.importorskip("torch")

import networks  # noqa: E402
from loss_over_bytes import Plan  # noqa: E402
from tasks import TASKS  # noqa: E402

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def finished(plan, loss):
    """Trains all that a plan wants: [(run, rate, seed)]."""
    done = []
    while job := plan.next():
        done.append((plan.runs[job.index], job.rate, job.seed))
        plan.ended(job, loss(job))
    return done


def test_grids_come_before_seeds_and_go_on_where_the_best_is_at_their_end():
    best = {0: 0.004, 1: 0.016, 2: 0.0001}
    done = finished(
        Plan(["adam/none", "adam/fp16", "signs/demo"], seeds=3),
        lambda job: abs(math.log(job.rate / best[job.index])),
    )
    of = {run: [its[1:] for its in done if its[0] == run] for run, *_ in done}
    assert of["adam/none"] == [(0.002, 0), (0.004, 0), (0.008, 0), (0.004, 1), (0.004, 2)]
    assert of["adam/fp16"][3:] == [(0.016, 0), (0.032, 0), (0.016, 1), (0.016, 2)]
    # Five rates, and no more.
    assert of["signs/demo"][3:] == [(0.00025, 0), (0.000125, 0), (0.000125, 1), (0.000125, 2)]
    assert [seed for *_, seed in done] == [0] * 13 + [1] * 3 + [2] * 3


def test_a_rate_that_diverges_is_the_worst():
    loss = {0.002: 2.0}
    done = finished(Plan(["adam/none"], 2), lambda job: loss.get(job.rate, math.nan))
    assert done[3:] == [("adam/none", 0.001, 0), ("adam/none", 0.002, 1)]


def test_muon_has_the_matrices_of_hidden_layers_and_adamw_the_rest():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")
    model = networks.Transformer(8, width=8, layers=2, bias=False)
    optimizer = TASKS["decoder"].optimizer("muon", model.named_parameters(), 2)
    hidden, rest = ([p for p in g["params"]] for g in optimizer.param_groups)
    assert len(hidden) == 2 * 4 and len(hidden) + len(rest) == len(list(model.parameters()))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters()))


def test_points_have_the_best_rate_and_what_it_is_compared_with(tmp_path):
    rows = [
        {
            "run": run.format(rate),
            "rate": rate,
            "ranks": ranks,
            "steps": 300,
            "seed": seed,
            "measured": [[300, loss + seed / 100, sent]],
            "received": sent / 300,
            "ratio": 3000 / sent,
        }
        for ranks in (4, 2)
        for run, sent in (("adam:lr={}/none", 3000), ("adam:lr={}/fp16", 1500))[: ranks // 2]
        for rate, loss, seeds in ((0.002, 2.2, [0]), (0.004, 2.1, [0, 1]))
        for seed in seeds
    ]
    file, points = tmp_path / "rows.jsonl", tmp_path / "points.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = [BENCHMARKS / "bytes_figure.py", file, "--points", points]
    subprocess.run([sys.executable, *made, "--plot", tmp_path / "figure.png"], check=True)
    read = results.read_points(points)
    found = [(point["at"]["ranks"], point["at"]["run"]) for point in read]
    assert found == [(2, "none")] * 3 + [(4, "none")] * 3 + [(4, "fp16")] * 3
    fp16 = read[6]
    assert fp16["seeds"] == [0, 1] and float(fp16["at"]["rate"]) == 0.004
    assert fp16["shown"]["bits"].baseline is read[3]["shown"]["bits"]
    assert float(fp16["figures"]["fast"]) == pytest.approx(5 * 8 / 1e9 * 1e3, abs=1e-3)
    assert (tmp_path / "figure.png").stat().st_size > 5_000
