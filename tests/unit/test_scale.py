"""hvdcompress scale: a step's bytes and time by the number of ranks. No times are checked, only
what follows from figures."""

import dataclasses
import json
import math
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cli import refusal, run
from tiers import examples

import horovod_compress as hc
from horovod_compress import bench, prediction, scaling
from horovod_compress.cost import COLLECTIVES, Load, Network
from horovod_compress.hosts import Host

SMALL = prediction.Model(
    "small",
    2 * 2**16 + 2 * 4096 + 100,
    {"a": (256, 256), "b": (256, 256), "c": (64, 64), "d": (64, 64), "e": (100,)},
)
NETWORK = Network(2, 1.2e-3, 1e-4, dict.fromkeys(COLLECTIVES, 1e-8))


@pytest.mark.parametrize("ranks", [2, 5, 64])
@pytest.mark.parametrize(
    "spec",
    [
        "none",
        "dgc",
        "topk:ratio=0.02,min_k=1",
        "natural",
        "bf16",
        "maxnorm:bits=4",
        "multiscale",
        "powersgd",
        "signsgd",
    ],
)
def test_bytes_are_those_that_a_step_of_so_many_ranks_exchanges(spec, ranks):
    """topk:ratio=0.02 goes dense on 64 ranks, and dgc only for the small tensors on 200; natural
    and bf16 from few on."""
    ranks = 200 if (spec, ranks) == ("dgc", 64) else ranks
    compressor, gradients = hc.get_compressor(spec), SMALL.gradients()
    (load,) = scaling.loads_by_ranks(compressor, SMALL, gradients, [ranks])
    found = bench.measure(compressor, gradients, ranks, 2)
    for kind in {*load.exchanged, *found["exchanged"]}:
        assert load.exchanged.get(kind, 0) == pytest.approx(
            found["exchanged"].get(kind, 0), rel=0.01, abs=8 * ranks
        )
    assert load.operations == sum(found["operations"].values())
    assert load.gathers == sum(
        count for kind, count in found["operations"].items() if "gather" in kind
    )


@pytest.mark.parametrize(
    "spec, most",
    [
        ("none", 2),
        ("powersgd:rank=1", 2),
        ("topk", 2),
        ("maxnorm:bits=4", 14),
        ("signsgd", 14),
    ],
)
def test_what_is_the_same_with_more_ranks_is_not_measured_again(spec, most, monkeypatch):
    compressor, gradients, asked = hc.get_compressor(spec), SMALL.gradients(), []
    counts, measured = scaling.counts_up_to(10_000), scaling.measured

    def noted(compressor, model, gradients, ranks, *rest):
        asked.append(ranks)
        return measured(compressor, model, gradients, ranks, *rest)

    monkeypatch.setattr(scaling, "measured", noted)
    steps = []
    loads = scaling.loads_by_ranks(compressor, SMALL, gradients, counts, lambda: steps.append(1))
    assert len(asked) <= most and len(steps) == len(asked) * (bench.WARMUP + prediction.STEPS)
    if compressor.collective != "allgather":
        for ranks, load in zip(counts, loads):
            found = measured(compressor, SMALL, gradients, ranks)
            assert load.exchanged == found.exchanged and load.operations == found.operations


def test_one_rank_of_many_takes_no_memory_of_the_others():
    """Ten thousand ranks' places, 10 000 times, were most of what a prediction took."""
    tracemalloc.start()
    host = Host.alone(10_000, 4)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    assert (host.local, host.size, len(host.places)) == (0, 4, 10_000)
    groups = Host.group(6, 3)
    assert groups[0].places == [0, 1, 2] * 2
    assert all(host.places is groups[0].places for host in groups)
    with pytest.raises(ValueError, match="10 ranks are not hosts of 4"):
        Host.alone(10, 4)


def test_what_goes_dense_where_that_is_less_never_crosses_a_link_more_often_than_dense():
    """A ring's allreduce takes its bytes over a link nearly twice."""
    counts = scaling.counts_up_to(3000)
    specs = ("none", "fp16", "adacomp", "topk:ratio=0.02", "natural")
    loads = {
        spec: scaling.loads_by_ranks(hc.get_compressor(spec), SMALL, SMALL.gradients(), counts)
        for spec in specs
    }
    found = scaling.predict(SMALL, loads, counts, lambda n: NETWORK.among(n, True), 0.0)["by_spec"]
    dense = [2 * (n - 1) / n * 4 * SMALL.parameters for n in counts]
    assert found["none"]["link_bytes"] == pytest.approx(dense)
    assert found["fp16"]["link_bytes"] == pytest.approx([size / 2 for size in dense])
    for spec in specs[2:]:
        # Beside them there are the carriers' bytes.
        assert all(a < b * 1.01 for a, b in zip(found[spec]["link_bytes"], dense)), spec


@pytest.mark.parametrize(
    "hosts, spec",
    [
        (1, "dgc:hosts=true"),
        (3, "dgc:hosts=true"),
        (60, "dgc:hosts=true"),
        (16, "topk:ratio=0.02,min_k=1,hosts=true"),
        (5, "qsgd:hosts=true"),
        (2, "adacomp:hosts=true"),
    ],
)
def test_bytes_on_hosts_are_those_of_a_part(hosts, spec):
    """topk:ratio=0.02 stays sparse on 16 hosts, and dgc goes dense for the small tensors on 60;
    qsgd's all do on 5."""
    compressor, gradients, local_size = hc.get_compressor(spec), SMALL.gradients(), 4
    (load,) = scaling.loads_by_ranks(
        compressor, SMALL, gradients, [local_size * hosts], local_size=local_size
    )
    found = bench.measure(compressor, gradients, local_size * hosts, 2, local_size=local_size)
    for kind in {*load.exchanged, *found["exchanged"]}:
        assert load.exchanged.get(kind, 0) == pytest.approx(
            found["exchanged"].get(kind, 0), rel=0.01, abs=8 * local_size * hosts
        )
    assert (
        load.operations == sum(found["operations"].values()) and load.rounds == 1 and not load.hides
    )


def test_hosts_bring_a_rank_what_their_number_of_ranks_would():
    compressor, gradients = hc.get_compressor("topk:ratio=0.01,hosts=true"), SMALL.gradients()
    hosts, ranks = (
        scaling.loads_by_ranks(compressor, SMALL, gradients, [64], local_size=size)[0].exchanged
        for size in (8, 1)
    )
    # Headers, and k of a part rounded up.
    assert hosts[prediction.GATHERED] == pytest.approx(ranks[prediction.GATHERED] / 8, rel=0.15)
    # That all ranks of a host have written each matrix.
    assert hosts["allreduce float32"] == ranks["allreduce float32"] + 4 * 4


def test_splitting_brings_a_rank_no_more_where_there_are_more():
    compressor, counts = hc.get_compressor("topk:ratio=0.01,exchange=split"), [2, 64, 10_000]
    loads = scaling.loads_by_ranks(compressor, SMALL, SMALL.gradients(), counts)
    payload = loads[0].exchanged["alltoall uint8"]
    carriers = loads[0].exchanged["allreduce float32"]
    for load, ranks in zip(loads, counts):
        accept = min(4, ranks / 2)
        assert load.received(ranks) - carriers == pytest.approx(
            payload * (1 + accept * (ranks - 1) / ranks)
        )
        assert load.rounds == 1 and load.gathers == 1 and not load.hides


@examples(100)
@given(st.integers(2, 10_000), st.integers(2, 10_000), st.booleans())
def test_more_ranks_take_more_messages(first, second, rings):
    few, many = sorted((first, second))
    here, there = (NETWORK.among(ranks, rings) for ranks in (few, many))
    assert here.latency <= there.latency and there.ranks == many
    waits = [network.latency - 1e-3 for network in (here, there)]
    if rings:
        assert waits == pytest.approx([0.2e-3 * (few - 1), 0.2e-3 * (many - 1)])
    else:
        assert waits == pytest.approx(
            [0.2e-3 * math.ceil(math.log2(ranks)) for ranks in (few, many)]
        )


def test_dense_is_as_fast_from_where_it_stays_so():
    def load(seconds):
        return Load({}, 0, 0, False, 0, seconds, 0)

    dense, ahead, crosses, behind = [2, 2, 2, 2], [1, 1, 1, 1], [3, 1, 2, 3], [2, 2, 2, 2]
    loads = {
        spec: list(map(load, each))
        for spec, each in {
            "none": dense,
            "ahead": ahead,
            "crosses": crosses,
            "behind": behind,
        }.items()
    }
    found = scaling.predict(SMALL, loads, [2, 4, 8, 9], lambda ranks: NETWORK, 0.0)
    assert {spec: its["dense_from"] for spec, its in found["by_spec"].items()} == {
        "none": 2,
        "ahead": None,
        "crosses": 8,
        "behind": 2,
    }
    assert found["by_spec"]["crosses"]["step_seconds"] == [3, 1, 2, 3]


def test_the_tables_have_what_the_json_has(capsys, tmp_path):
    out, picture = tmp_path / "scale.json", tmp_path / "scale.png"
    options = (
        "scale",
        "topk:ratio=0.01",
        "--million",
        1,
        "--ranks",
        100,
        "--link",
        "100mbit",
        "--json",
        out,
        "--plot",
        picture,
    )
    text = run(capsys, *options)
    found = json.loads(out.read_text())
    assert found["ranks"] == [2, 4, 8, 16, 32, 64, 100] and found["by_spec"].keys() == {
        "none",
        "fp16",
        "topk:ratio=0.01",
    }
    assert (found["library"], found["link_bits_per_second"], found["parameters"]) == (
        "gloo",
        1e8,
        1_000_000,
    )
    assert (
        text.startswith("a model of 1 million parameters; links of 100 Mbit/s; gloo\n")
        and picture.stat().st_size > 10_000
    )
    lines = [line.split() for line in text.splitlines()]
    first = lines.index(
        ["2", *(f"{1e3 * its['step_seconds'][0]:.3g}" for its in found["by_spec"].values())]
    )
    assert [line[0] for line in lines[first : first + 7]] == list(map(str, found["ranks"]))
    topk = found["by_spec"]["topk:ratio=0.01"]
    said = (
        f"none is as fast from {topk['dense_from']} ranks on"
        if topk["dense_from"]
        else "faster than none with up to 100 ranks"
    )
    assert f"topk:ratio=0.01: {said}" in text


def test_ranks_grow_by_whole_hosts(capsys):
    found = json.loads(
        run(
            capsys,
            "scale",
            "topk:hosts=true",
            "--million",
            1,
            "--ranks",
            24,
            "--local-size",
            8,
            "--json",
            "-",
        )
    )
    assert found["ranks"] == [16, 24]
    planned = json.loads(
        run(
            capsys,
            "plan",
            "topk:hosts=true",
            "topk",
            "--million",
            1,
            "--local-size",
            8,
            "--json",
            "-",
        )
    )
    received = {each["spec"]: each["bytes_received"] for each in planned["predictions"]}
    assert planned["ranks"] == 16 and received["topk:hosts=true"] < received["topk"] / 4
    for command in ("scale", "plan"):
        assert "--local-size: 9 ranks are not hosts of 2" in refusal(
            capsys, command, "--ranks", "9", "--local-size", "2"
        )


def test_a_measured_network_is_carried_on(capsys, tmp_path):
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"network": dataclasses.asdict(NETWORK)}))
    options = "scale", "none", "--million", 1, "--ranks", 5, "--network", path, "--json", "-"
    rings, trees = (
        json.loads(run(capsys, *options, "--library", library)) for library in ("gloo", "mpi")
    )
    assert "link_bits_per_second" not in rings and rings["ranks"] == [2, 4, 5]
    for found, messages in ((rings, [1, 3, 4]), (trees, [1, 2, 3])):
        expected = [
            1e-3 + 2e-4 * count + 16 * 1e-4 * 1e6 / (16 * 61 * 1024) + 4e6 * 2 * (n - 1) / n * 1e-8
            for count, n in zip(messages, [2, 4, 5])
        ]
        assert found["by_spec"]["none"]["step_seconds"] == pytest.approx(expected)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--ranks", "1"], "--ranks: must be a whole number, at least 2"),
        (["--library", "nccl"], "--library: invalid choice: 'nccl'"),
        (["--network", "x", "--link", "1gbit"], "--link: not allowed with argument --network"),
        (["nope"], "unknown compressor 'nope'; there are: none, "),
    ],
)
def test_what_cannot_be_done_is_said_at_once(capsys, arguments, says):
    assert says in refusal(capsys, "scale", *arguments)
