"""What commands read from files may be anything: they end with one line, and not 0."""

import json

import numpy as np
import pytest
from test_cli import refusal, run

from horovod_compress.engine import recording
from horovod_compress.engine.tensor import SENT, SPENT
from horovod_compress.tools.cli import main
from horovod_compress.tools.cost import COLLECTIVES

NETWORK = {
    "ranks": 2,
    "latency": 1e-3,
    "operation": 1e-4,
    "seconds_per_byte": dict.fromkeys(COLLECTIVES, 1e-8),
}
COUNTS = dict.fromkeys((*SENT, *SPENT), 1)
NORMS = {"gradient_norm": 1.5, "residual_norm": None}
TENSOR = {"numel": 6, "compressor": "topk", **COUNTS, "ratio": 1.0, **NORMS}
RECORD = {
    "format": "horovod_compress.record/1",
    "step": 0,
    "time": 0.0,
    "rank": 0,
    "size": 2,
    "spec": {"id": "topk"},
    "steps": 1,
    "steps_undone": 0,
    "seconds": 0.1,
    **COUNTS,
    **NORMS,
    "ratio": 1.0,
    "tensors": {"w": TENSOR},
}
DEEP = 100_000
NO_JSON = [
    b"{",
    b"nonsense\n",
    b"[" * DEEP + b"\n",
    b'{"network": ' * DEEP + b"\n",
    b"\xff\xfe\x00{}\n",
    b"\x00\n",
    b"1" * 5000 + b"\n",
    b"null\n",
    b"[]\n",
    b'"text"\n',
    b'{"good": true}\n',
    b"5\n",
    b"\x1b[2J\n",
]


def without(record, *path):
    """Copies of a record, one for each value that cannot be: at the path."""
    for value in (None, "1", [], {}, True, 10**400, float("nan"), float("inf"), ...):
        changed = json.loads(json.dumps(record))
        *into, last = path
        place = changed
        for key in into:
            place = place[key]
        if isinstance(value, str) and last in ("id", "compressor"):
            continue
        if value is ...:
            del place[last]
        else:
            place[last] = value
        yield changed


BAD_RECORDS = [
    bad
    for path in (
        ("format",),
        ("step",),
        ("rank",),
        ("size",),
        ("steps",),
        ("bytes_sent",),
        ("encode_seconds",),
        ("spec", "id"),
        ("tensors", "w", "numel"),
        ("tensors", "w", "dense_bytes"),
        ("tensors", "w", "compressor"),
    )
    for bad in without(RECORD, *path)
] + [
    {**RECORD, **change}
    for change in (
        {"spec": 5},
        {"spec": None},
        {"tensors": [1]},
        {"tensors": {"w": 5}},
        {"tensors": None},
        {"gradient_norm": "x"},
        {"residual_norm": 10**400},
    )
]


def assert_one_line(said, command):
    usage, *_, last = said.rstrip("\n").split("\n")
    assert usage.startswith(f"usage: hvdcompress {command}")
    assert last.startswith(f"hvdcompress {command}: error: ") and last.isprintable(), last
    assert len(last) < 1000 and "Traceback" not in said


@pytest.mark.parametrize("content", NO_JSON, ids=range(len(NO_JSON)))
def test_files_that_are_no_json(capsys, tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    for command in (["report", path], ["plan", "--network", path]):
        assert_one_line(refusal(capsys, *map(str, command)), command[0])


def test_a_record_that_was_cut_off_is_left_out_where_another_process_goes_on(tmp_path):
    path, line = tmp_path / "records", json.dumps(RECORD) + "\n"
    for written in (line, line[:40], line):
        recording._append(str(path), written)
    assert recording.read(path) == 2 * [json.loads(line)]


@pytest.mark.parametrize("record", BAD_RECORDS, ids=range(len(BAD_RECORDS)))
def test_records_that_cannot_be(capsys, tmp_path, record):
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(RECORD) + "\n" + json.dumps(record) + "\n")
    said = refusal(capsys, "report", str(path))
    assert_one_line(said, "report")
    assert "run.jsonl, line 2: not a record" in said


@pytest.mark.parametrize(
    "wrong, network",
    [
        *((key, bad) for key in NETWORK for bad in without(NETWORK, key)),
        *(
            ("seconds_per_byte", bad)
            for bad in without(NETWORK, "seconds_per_byte", "allgather uint8")
        ),
        ("ranks", {**NETWORK, "ranks": 10**9}),
        ("ranks", {**NETWORK, "ranks": 1}),
        ("ranks", {**NETWORK, "ranks": 2.5}),
        ("latency", {**NETWORK, "latency": -1.0}),
        ("latency", {**NETWORK, "latency": 0}),
    ],
)
def test_networks_that_cannot_be(capsys, tmp_path, wrong, network):
    path = tmp_path / "network.json"
    path.write_text(json.dumps({"network": network}))
    said = refusal(capsys, "plan", "--network", str(path), "--parameters", "1M")
    assert_one_line(said, "plan")
    assert f"{path}: network: {wrong} is missing or not valid" in said


@pytest.mark.parametrize("path", ["/dev/full", "."])
def test_results_that_cannot_be_written(path):
    with pytest.raises(SystemExit, match="hvdcompress: .*(space|directory)"):
        main(["info", "topk", "--json", path])


def test_too_many_ranks_are_refused_before_anything_is_made(capsys):
    assert "at most 1000000" in refusal(capsys, "plan", "--ranks", str(10**12))


NAME = "w\x1b[31m\r\n\u202e$x^\ud800"


def test_names_are_printed_so_that_they_do_nothing(capsys, tmp_path):
    path, picture = tmp_path / "run.jsonl", tmp_path / "run.png"
    record = {**RECORD, "spec": {"id": NAME}, "tensors": {NAME: {**TENSOR, "compressor": NAME}}}
    path.write_text(json.dumps(record) + "\n")
    said = run(capsys, "report", str(path), "--plot", str(picture))
    assert all(line.isprintable() for line in said.split("\n"))
    assert r"\x1b[31m\r\n\u202e" in said.replace(" ", "") and picture.stat().st_size > 1000
    found = json.loads(run(capsys, "report", str(path), "--json", "-"))
    assert found[0]["name"] == NAME

    assert_one_line(refusal(capsys, "report", str(tmp_path / "no\x1b[2J\nfile")), "report")
    assert_one_line(refusal(capsys, "bench", "no\x1b[2J\nspec"), "bench")


def test_archives_that_are_damaged(capsys, tmp_path):
    path = tmp_path / "gradients.npz"
    np.savez(path, **{"0/w\x1b[2J": np.full(3, np.nan, np.float32)})
    whole = path.read_bytes()
    assert_one_line(refusal(capsys, "bench", "topk", "--gradients", str(path)), "bench")
    for content in (b"", b"PK\x05\x06" + b"\xff" * 18, whole[:40], whole[20:], b"PK" + whole):
        path.write_bytes(content)
        assert_one_line(refusal(capsys, "bench", "topk", "--gradients", str(path)), "bench")
