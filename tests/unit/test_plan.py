"""hvdcompress plan, and what it shares with check: predictions, as a table and as JSON. No times
are checked, only what follows from figures."""

import dataclasses
import json
import subprocess
import sys

import pytest
from test_cli import refusal, run

from horovod_compress import bench, prediction
from horovod_compress.cost import COLLECTIVES, Load, Network

SMALL = prediction.Model("small", 4 * 1024**2, {f"t{i}": (1024, 1024) for i in range(4)})


def by_spec(found):
    return {one["spec"]: one for one in found["predictions"]}


def measured(specs, ranks):
    gradients = SMALL.gradients()
    return {
        spec: prediction.measured(compressor, SMALL, gradients, ranks)
        for spec, compressor in prediction.compressors_of(specs).items()
    }


def test_the_table_has_what_the_json_has(capsys, tmp_path):
    out = tmp_path / "plan.json"
    text = run(
        capsys,
        "plan",
        "topk:ratio=0.01",
        "maxnorm",
        "--million",
        2,
        "--ranks",
        4,
        "--link",
        "100mbit",
        "--json",
        out,
    )
    assert text.startswith(
        "a model of 2 million parameters; 4 ranks, links of 100 Mbit/s; behind a backward that "
        "hides nothing\n"
    )
    found = json.loads(out.read_text())
    assert (found["parameters"], found["ranks"], found["link_bits_per_second"]) == (2000000, 4, 1e8)
    assert [one["spec"] for one in found["predictions"]] == sorted(
        by_spec(found), key=lambda spec: by_spec(found)[spec]["step_seconds"]
    )
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "───" in line) + 1
    for line, one in zip(lines[start:], found["predictions"]):
        shown = [
            one["spec"],
            *(f"{one[key] / 1e6:.2f}" for key in ("bytes_sent", "bytes_received")),
        ]
        assert line.split() == [
            *shown,
            *(f"{1e3 * one[key]:.1f}" for key in ("work_seconds", "step_seconds")),
            f"{one['of_none']:.3f}",
        ]
    assert f"{found['best']} waits least" in text or "no compression pays here" in text
    assert by_spec(found).keys() == {"none", "fp16", "topk:ratio=0.01", "maxnorm"}
    assert (
        by_spec(found)["none"]["bytes_sent"] == pytest.approx(8e6)
        and by_spec(found)["none"]["work_seconds"] == 0
    )


def test_bytes_are_those_that_bench_measures():
    loads = measured(["topk:ratio=0.01", "powersgd", "signsgd", "multiscale"], 3)
    for spec, compressor in prediction.compressors_of(list(loads)).items():
        assert (
            loads[spec].sent
            == bench.measure(compressor, SMALL.gradients(), 3, prediction.STEPS)["bytes_per_step"]
        )
    assert {spec: load.rounds for spec, load in loads.items()} == {
        "none": 0,
        "fp16": 0,
        "topk:ratio=0.01": 0,
        "powersgd": 1,
        "signsgd": 0,
        "multiscale": 2,
    }
    assert loads["topk:ratio=0.01"].last == 0.25


def test_a_step_is_one_after_the_warmup():
    loads = measured(
        ["dgc:ratio=0.01", "dgc:ratio=0.01,warmup_steps=1000", "dgc:schedule=0/0.5+2000/0.01"], 2
    )
    assert len({load.sent for spec, load in loads.items() if spec.startswith("dgc")}) == 1


def test_splitting_brings_a_rank_less_where_there_are_many():
    for ranks, accept in ((8, 4), (64, 4), (64, 1)):
        loads = measured(
            ["topk:ratio=0.01", f"topk:ratio=0.01,exchange=split,accept={accept}"], ranks
        )
        gathering, splitting = (load for spec, load in loads.items() if spec.startswith("topk"))
        payload = gathering.exchanged["allgather uint8"]
        assert splitting.received(ranks) - 16 == pytest.approx(
            payload * (1 + accept * (ranks - 1) / ranks)
        )
        assert gathering.received(ranks) - 16 == pytest.approx(payload * (ranks - 1))
        assert splitting.rounds == 1 and not splitting.hides and splitting.operations == 6


@pytest.mark.parametrize(
    "spec, hides",
    [
        ("none", True),
        ("dgc", True),
        ("dgc:clip_norm=1", False),
        ("dgc:transport=mpi", False),
        ("maxnorm", False),
    ],
)
def test_what_hides_behind_backward(spec, hides):
    load = measured([spec], 2)[spec]
    assert load.hides == hides


def test_a_model_of_a_size_is_scaled_from_a_piece():
    large, small = prediction.Model.of_size(1000), prediction.Model.of_size(0.5)
    (compressor,) = {
        spec: one for spec, one in prediction.compressors_of([]).items() if spec == "none"
    }.values()
    for model, millions in (large, 1000), (small, 0.5):
        load = prediction.measured(compressor, model, model.gradients(), 2)
        assert load.sent == pytest.approx(4e6 * millions)
    assert sum(array.size for array in large.gradients()[0].values()) == 2**24


def test_what_waits_least_depends_on_the_link():
    loads = {
        "none": Load({"allreduce float32": 1e8}, 1, 0, True, 0, 0, 0),
        "light": Load({"allgather uint8": 1e5}, 1, 0, True, 0, 0.15, 0.01),
    }

    def network(factor):
        return Network.of_link(2, 1e9 * factor, 1e-4)

    found = prediction.predict(SMALL, loads, network, 0.0)
    assert found["best"] == "light" == found["predictions"][0]["spec"] and found["break_even"] > 1
    faster = prediction.predict(
        SMALL, loads, lambda factor: network(1.01 * factor * found["break_even"]), 0.0
    )
    assert (
        faster["best"] == "light"
        and faster["predictions"][0]["spec"] == "none"
        and faster["break_even"] < 1
    )


def test_a_measured_network_serves_instead_of_a_link(capsys, tmp_path):
    network = Network(3, 1e-3, 1e-5, dict.fromkeys(COLLECTIVES, 1e-8))
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"network": dataclasses.asdict(network)}))
    options = "plan", "none", "--million", 1, "--network", path
    found = json.loads(run(capsys, *options, "--json", "-"))
    assert found["ranks"] == 3 and found["network"] == dataclasses.asdict(network)
    assert by_spec(found)["none"]["step_seconds"] == pytest.approx(
        1e-3 + 16 * 1e-5 * 1e6 / (16 * 61 * 1024) + 4e6 * 4 / 3 * 1e-8
    )
    more = json.loads(run(capsys, *options, "--ranks", 8, "--json", "-"))
    assert more["ranks"] == more["network"]["ranks"] == 8
    assert "the network as it was measured" in run(capsys, *options)


def test_exchanges_hide_behind_a_backward(capsys):
    options = "plan", "none", "--million", 1, "--json", "-"
    alone, hidden = (json.loads(run(capsys, *options, "--backward", ms)) for ms in (0, 500))
    added = [
        by_spec(found)["none"]["step_seconds"] - found["backward_seconds"]
        for found in (alone, hidden)
    ]
    assert hidden["backward_seconds"] == 0.5 and 0 < added[1] < added[0]


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["plan", "nope"], "unknown compressor 'nope'; there are: none, "),
        (["check", "nope"], "unknown compressor 'nope'; there are: none, "),
        (["plan", "--model", "alexnet"], "invalid choice: 'alexnet'"),
        (["check", "--model", "alexnet"], "invalid choice: 'alexnet'"),
        (["check", "--million", "0"], "--million: must be a number above 0, not '0'"),
        (["plan", "--million", "inf"], "--million: must be a number above 0, not 'inf'"),
        (
            ["plan", "--million", "1", "--model", "vgg16"],
            "--model: not allowed with argument --million",
        ),
        (
            ["plan", "--link", "fast"],
            "--link: must be a rate above 0, as 100mbit or 2.5gbit, not 'fast'",
        ),
        (["plan", "--link", "0gbit"], "--link: must be a rate above 0"),
        (["plan", "--link", "1.2.3gbit"], "--link: must be a rate above 0"),
        (["plan", "--link=-1gbit"], "--link: must be a rate above 0"),
        (["plan", "--latency=-1"], "--latency: must be a number of at least 0, not '-1'"),
        (["plan", "--backward", "nan"], "--backward: must be a number of at least 0, not 'nan'"),
        (["plan", "--ranks", "1"], "--ranks: must be a whole number, at least 2"),
        (["plan", "--network", "/nowhere.json"], "/nowhere.json cannot be read as JSON"),
        (
            ["plan", "--network", "x", "--link", "1gbit"],
            "--link: not allowed with argument --network",
        ),
        (
            ["plan", "--network", "x", "--latency", "1"],
            "--latency: not allowed with argument --network",
        ),
        (["plan", "--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(capsys, arguments, says):
    assert says in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    "arguments", [["plan", "none", "--million", "1"], ["bench", "none", "--steps", "1"], ["info"]]
)
def test_only_check_needs_a_framework(arguments):
    code = f"""if 1:
        import sys
        sys.modules.update(dict.fromkeys(["torch", "tensorflow", "horovod"]))
        from horovod_compress.cli import main
        main({arguments})
    """
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_check_without_horovod_says_what_it_needs():
    code = (
        "import sys; sys.modules['horovod'] = None; from horovod_compress.cli import main; "
        "main(['check'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1 and not ended.stdout
    assert ended.stderr.startswith("hvdcompress check needs Horovod with PyTorch: ")
