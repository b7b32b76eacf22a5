"""hvdcompress plan, and what it shares with check: predictions, as a table and as JSON. No times
are checked, only what follows from figures."""

import dataclasses
import json
import subprocess
import sys

import pytest
from test_cli import refusal, run

from horovod_compress.compressors import advice
from horovod_compress.tools import loads, prediction
from horovod_compress.tools.cli import main
from horovod_compress.tools.cost import COLLECTIVES, Load, Network

SMALL = loads.Model("small", 40, {"w": (5, 8)})
NETWORK = Network(2, 1.2e-3, 1e-4, dict.fromkeys(COLLECTIVES, 1e-8))
# Of a model of a million parameters.
TENSORS = 16


def as_json(capsys, *arguments):
    return json.loads(run(capsys, *arguments, "--parameters", "1M", "--json", "-"))


def by_spec(found):
    return {one["spec"]: one for one in found["predictions"]}


@pytest.fixture
def network(tmp_path):
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"network": dataclasses.asdict(NETWORK)}))
    return path


def rows_of(text):
    """The table's lines, as words, without those between numbers of ranks."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "───" in line) + 1
    end = next(i for i, line in enumerate(lines) if line.startswith("MB sent"))
    return [line.split() for line in lines[start:end] if line.strip()]


def row(ranks, spec, found):
    return [
        str(ranks),
        spec,
        *(f"{found[key] / 1e6:.2f}" for key in ("bytes_sent", "bytes_received", "link_bytes")),
        *(f"{1e3 * found[key]:.1f}" for key in ("work_seconds", "step_seconds")),
        f"{found['of_none']:.3f}",
    ]


def test_the_table_has_what_the_json_has(capsys, tmp_path):
    out = tmp_path / "plan.json"
    options = "topk:ratio=0.01", "maxnorm", "--parameters", "2M", "--link", "100mbit", "--json", out
    text = run(capsys, "plan", "--ranks", 4, *options)
    assert text.startswith(
        "a model of 2 million parameters; links of 100 Mbit/s; no backward to hide behind\n"
    )
    found = json.loads(out.read_text())
    assert (found["parameters"], found["ranks"], found["link_bits_per_second"]) == (2000000, 4, 1e8)
    steps = [one["step_seconds"] for one in found["predictions"]]
    assert steps == sorted(steps)
    assert rows_of(text) == [row(4, one["spec"], one) for one in found["predictions"]]
    assert f"{found['best']} waits least" in text or "no compression pays here" in text
    assert by_spec(found).keys() == {"none", "fp16", "topk:ratio=0.01", "maxnorm"}
    none = by_spec(found)["none"]
    assert none["bytes_sent"] == pytest.approx(8e6) and none["work_seconds"] == 0
    assert none["link_bytes"] == pytest.approx(1.5 * 8e6)


def test_several_numbers_of_ranks_have_one_table_and_a_plot(capsys, tmp_path):
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    options = "--parameters", "1M", "--json", out, "--plot", picture
    text = run(capsys, "plan", *options, "--ranks", 100, 2, 2, "topk:ratio=0.01")
    found = json.loads(out.read_text())
    assert found["ranks"] == [2, 100] and found["library"] == "gloo"
    assert found["by_spec"].keys() == {"none", "fp16", "topk:ratio=0.01"}
    expected = [
        row(ranks, spec, {key: its[i] for key, its in of_spec.items() if key != "dense_from"})
        for i, ranks in enumerate(found["ranks"])
        for spec, of_spec in found["by_spec"].items()
    ]
    assert sorted(rows_of(text)) == sorted(expected)
    dense_from = found["by_spec"]["topk:ratio=0.01"]["dense_from"]
    said = (
        f"none is as fast from {dense_from} ranks on"
        if dense_from
        else "faster than none with up to 100 ranks"
    )
    assert f"topk:ratio=0.01: {said}" in text
    assert picture.stat().st_size > 10_000


def test_what_waits_least_depends_on_the_link():
    gathered, summed = {"allgather uint8": 1.0}, {"allreduce float32": 1.0}
    light = Load({"allgather uint8": 1e5}, gathered, 0, True, 0, 0.15, 0.01)
    both = {"none": Load({"allreduce float32": 1e8}, summed, 0, True, 0, 0, 0), "light": light}

    def network(factor):
        return Network.of_link(1e9 * factor, 1e-4)

    found = prediction.predict(SMALL, both, network, 0.0)
    assert found["best"] == "light" == found["predictions"][0]["spec"] and found["break_even"] > 1
    beyond = 1.01 * found["break_even"]
    faster = prediction.predict(SMALL, both, lambda factor: network(beyond * factor), 0.0)
    assert faster["best"] == "light" and faster["predictions"][0]["spec"] == "none"
    assert faster["break_even"] < 1


def test_dense_is_as_fast_from_where_it_stays_so():
    counts = [2, 4, 8, 9]
    seconds = {
        "none": [2, 2, 2, 2],
        "ahead": [1, 1, 1, 1],
        "crosses": [3, 1, 2, 3],
        "behind": [2, 2, 2, 2],
    }

    def run_of(i):
        of_one = {spec: Load({}, {}, 0, False, 0, each[i], 0) for spec, each in seconds.items()}
        return prediction.predict(SMALL, of_one, NETWORK.among(counts[i], True).faster, 0.0)

    found = prediction.by_ranks([run_of(i) for i in range(4)])
    assert found["ranks"] == counts
    assert {spec: its["dense_from"] for spec, its in found["by_spec"].items()} == {
        "none": 2,
        "ahead": None,
        "crosses": 8,
        "behind": 2,
    }
    assert found["by_spec"]["crosses"]["step_seconds"] == seconds["crosses"]


def test_a_measured_network_serves_instead_of_a_link(capsys, network):
    found = as_json(capsys, "plan", "none", "--network", network)
    assert found["ranks"] == 2 and found["network"] == dataclasses.asdict(NETWORK)
    assert "link_bits_per_second" not in found
    for library, messages in (("gloo", [1, 3, 4]), ("mpi", [1, 2, 3])):
        options = "--network", network, "--library", library
        found = as_json(capsys, "plan", "none", *options, "--ranks", 2, 4, 5)
        expected = [
            1e-3 + 2e-4 * count + 1e-4 * TENSORS + 4e6 * 2 * (n - 1) / n * 1e-8
            for count, n in zip(messages, [2, 4, 5])
        ]
        assert found["by_spec"]["none"]["step_seconds"] == pytest.approx(expected)
    text = run(capsys, "plan", "none", "--network", network, "--parameters", "1M")
    assert "the network as it was measured" in text


def test_the_table_says_what_is_recommended(capsys):
    text = run(capsys, "plan", "dgc:ratio=0.001", "strom", "--parameters", "10k")
    said = text.partition("Recommended (docs/choose.md):")[2]
    adam = f'UpdateOptimizer(…, compression="{advice.ADAM.spec}", every='
    expected = [
        f"{advice.SGD.situation}: dgc:ratio=0.001, with warmup_steps= a tenth of the steps",
        f"{advice.ADAM.situation}: {adam}4), and try 1.5 to 4 times the learning rate",
        f"Adam, AdamW and their kin, more ranks: {adam}2), and try 1.5 to 4 times the learning "
        "rate",
        "Half of the bytes are enough: fp16",
    ]
    assert said.split() == " ".join(expected).split()


def test_a_number_of_parameters_has_a_unit(capsys):
    for text, parameters in (("350k", 350_000), ("0.5M", 500_000), ("1000", 1000)):
        found = json.loads(run(capsys, "plan", "none", "--parameters", text, "--json", "-"))
        assert found["parameters"] == parameters


def test_two_hosts_are_planned_by_default(capsys):
    planned = as_json(capsys, "plan", "topk:hosts=true", "topk", "--local-size", 8)
    received = {spec: one["bytes_received"] for spec, one in by_spec(planned).items()}
    assert planned["ranks"] == 16 and received["topk:hosts=true"] < received["topk"] / 4


def test_exchanges_hide_behind_a_backward(capsys):
    alone, hidden = (as_json(capsys, "plan", "none", "--backward", ms) for ms in (0, 500))
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
        (["check", "--parameters", "0"], "--parameters: must be a number above 0, as 350k"),
        (["plan", "--parameters", "inf"], "--parameters: must be a number above 0, as 350k"),
        (
            ["plan", "--parameters", "1M", "--model", "vgg16"],
            "--model: not allowed with argument --parameters",
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
        (["plan", "--ranks", "4", "2.5"], "--ranks: must be a whole number, at least 2"),
        (["plan", "--ranks", "2", "nope"], "unknown compressor 'nope'; there are: none, "),
        (["plan", "--library", "nccl"], "--library: invalid choice: 'nccl'"),
        (["plan", "--ranks", "8", "9", "--local-size", "2"], "9 ranks are not hosts of 2"),
        (["plan", "--network", "/nowhere.json"], "/nowhere.json cannot be read as JSON"),
        (
            ["plan", "--network", "x", "--link", "1gbit"],
            "--link: not allowed with argument --network",
        ),
        (
            ["plan", "--network", "x", "--latency", "1"],
            "--latency: not allowed with argument --network",
        ),
        (["plan", "--tensors", "9"], "--tensors: give --parameters, and at least as many"),
        (["plan", "--tensors", "9", "--parameters", "8"], "--tensors: give --parameters, and at"),
        (["plan", "--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(capsys, arguments, says):
    assert says in refusal(capsys, *arguments)


def test_only_check_needs_a_framework(tmp_path):
    code = """if 1:
        import sys
        import numpy as np
        sys.modules.update(dict.fromkeys(["torch", "tensorflow", "horovod"]))
        from horovod_compress.tools.cli import main
        np.savez("gradients.npz", w=np.ones((3, 4)))
        main(["plan", "none", "--parameters", "10k"])
        main(["bench", "none", "--steps", "1", "--gradients", "gradients.npz"])
        main(["info"])
    """
    options = {"check": True, "stdout": subprocess.DEVNULL, "cwd": tmp_path}
    subprocess.run([sys.executable, "-c", code], **options)


def test_check_without_horovod_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(SystemExit, match="pip install .horovod-compress.horovod"):
        main(["check"])
