"""Records say what steps did, to whom they are asked to be told; and a residual that grows without
end is warned of, once."""

import contextlib
import errno
import json
import resource
import typing
import warnings

import numpy as np
import pytest
from battery_facts import copies, steps_of
from ranks import SHAPES, gradients, ranks_of, rescale

import horovod_compress as hc
from horovod_compress.engine import recording
from horovod_compress.engine.lockstep import run_step
from horovod_compress.engine.record_types import Record, Stats, TensorRecord, TensorStats
from horovod_compress.engine.recording import Recorder
from horovod_compress.tools import cli, report

COUNTED = ("steps", "steps_undone", "bytes_sent", "bytes_received", "dense_bytes", "elements_sent")


def recorded(spec, steps, *options, size=2, grads=None):
    """The exchanges after so many steps, each of which has its own recorder."""
    exchanges = ranks_of(spec, size)
    for exchange in exchanges:
        exchange.features["recording"] = Recorder(exchange, *options)
    for step in range(steps):
        run_step(exchanges, gradients(step, size) if grads is None else copies(grads[step]))
    for exchange in exchanges:
        exchange.end_step()
    return exchanges


@pytest.mark.parametrize("every, steps", [(1, 5), (3, 10), (4, 9)])
def test_records_add_up_to_the_totals(every, steps):
    records = []
    exchange = recorded(
        "dgc:ratio=0.05,min_numel=100,momentum=0.5", steps, records.append, every, True, size=1
    )[0]
    assert [record["step"] for record in records] == list(range(0, steps, every))
    stats, by_tensor = (
        exchange.stats(),
        {tensor.name: tensor.counters for tensor in exchange.tensors},
    )
    behind = (steps - 1) % every
    if not behind:
        for key in COUNTED:
            assert sum(record[key] for record in records) == stats[key]
        for name, counters in by_tensor.items():
            for key in ("bytes_sent", "dense_bytes", "elements_sent"):
                assert sum(record["tensors"][name][key] for record in records) == counters[key]
        assert records[-1]["residual_norm"] == pytest.approx(stats["residual_norm"])
    for record in records:
        assert record["ratio"] == pytest.approx(record["dense_bytes"] / record["bytes_sent"])
        expected = gradients(record["step"], 1)[0]
        assert record["gradient_norm"] == pytest.approx(
            np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in expected.values()))
        )
        for name, said in record["tensors"].items():
            assert said["gradient_norm"] == pytest.approx(np.linalg.norm(expected[name]), rel=1e-5)
        assert (
            record["tensors"]["bias"]["residual_norm"] is None
            and record["tensors"]["w"]["residual_norm"] > 0
        )
        assert hc.get_compressor(record["spec"]).config == exchange.tensors.compressor.config
        assert json.loads(json.dumps(record, allow_nan=False))["format"] == recording.FORMAT


def test_stats_and_records_have_the_keys_of_their_types():
    records = []
    (exchange,) = recorded("dgc:ratio=0.05,min_numel=100", 1, records.append, 1, True, size=1)
    (record,), by_tensor = records, exchange.tensors.stats_by_name()
    for found, kind in (
        (exchange.stats(), Stats),
        (by_tensor["w"], TensorStats),
        (record, Record),
        (record["tensors"]["w"], TensorRecord),
    ):
        assert found.keys() == typing.get_type_hints(kind).keys()


def test_norms_are_without_loss_scale_and_unknown_where_not_finite():
    records = []
    exchange = ranks_of("topk:ratio=0.05,min_numel=0", 1)[0]
    exchange.features["recording"] = Recorder(exchange, records.append, 1)
    rescale([exchange], 1024.0)
    for step in range(3):
        grads = [{name: g * np.float32(1024) for name, g in gradients(step, 1)[0].items()}]
        if step == 2:
            grads[0]["w"][0] = np.inf
        run_step([exchange], grads)
    exchange.end_step()
    plain = []
    recorded("topk:ratio=0.05,min_numel=0", 2, plain.append, 1, size=1)
    for key in ("gradient_norm", "residual_norm"):
        assert [r[key] for r in records[:2]] == pytest.approx([r[key] for r in plain])
    assert records[2]["gradient_norm"] is None and records[2]["steps_undone"] == 1


def test_gradients_of_float64_have_norms_too():
    records = []
    (exchange,) = ranks_of("none", 1, {"w": (40,)})
    exchange.features["recording"] = Recorder(exchange, records.append, 1)
    for value in (1e-30, np.nan):
        run_step([exchange], [{"w": np.full(40, value)}])
    exchange.end_step()
    assert [r["gradient_norm"] for r in records] == [pytest.approx(40**0.5 * 1e-30), None]


def test_files_are_appended_to_and_ranks_have_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    one, own = tmp_path / "run.jsonl", "~/run.{rank}.jsonl"
    recorded("topk:min_numel=0", 4, one, 2)
    recorded("topk:min_numel=0", 4, own, 2)
    assert [(r["rank"], r["step"]) for r in recording.read(one)] == [(0, 0), (0, 2)]
    assert [(r["rank"], r["step"]) for r in recording.read("~/run.1.jsonl")] == [
        (1, 0),
        (1, 2),
    ]
    exchange = ranks_of("topk:min_numel=0", 1)[0]  # a restart, from a state
    exchange.load_state_dict({**exchange.state_dict(), "step": 4})
    exchange.features["recording"] = Recorder(exchange, str(one), 2)
    for step in range(3):
        run_step([exchange], gradients(step, 1))
    exchange.end_step()
    assert [r["step"] for r in recording.read(one)] == [0, 2, 4, 6]
    with open(one, "a") as file:
        file.write('{"format": "horovod_comp')  # and the machine stopped
    assert [r["step"] for r in recording.read(one)] == [0, 2, 4, 6]
    with open(one, "a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="line 5: not a record"):
        recording.read(one)


@contextlib.contextmanager
def full_disk_at(size):
    """Within it no file of this process grows beyond so many bytes: the rest is not written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_for_a_while_loses_no_counts(tmp_path):
    path = tmp_path / "run.jsonl"
    exchange = ranks_of("topk:min_numel=0", 1)[0]
    exchange.features["recording"] = Recorder(exchange, path, 1)

    def steps(first, last):
        for step in range(first, last):
            run_step([exchange], gradients(step, 1))
        exchange.end_step()

    steps(0, 2)
    with full_disk_at(path.stat().st_size + 10), pytest.warns(RuntimeWarning) as warned:
        steps(2, 5)
    (said,) = [str(each.message) for each in warned]
    assert f"step 2 cannot be written to {path}: File too large" in said
    steps(5, 7)
    records = recording.read(path)
    assert [(record["step"], record["steps"]) for record in records] == [
        (0, 1),
        (1, 1),
        (5, 4),
        (6, 1),
    ]
    assert sum(record["bytes_sent"] for record in records) == exchange.stats()["bytes_sent"]


class Unwritable:
    """A TensorBoard writer whose disk is full."""

    def add_scalar(self, tag, value, step):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "to, named",
    [
        ("/dev/full", "/dev/full: No space left"),
        ("/none/run.{rank}.jsonl", "/none/run.0.jsonl: No such file"),
        (Unwritable(), "Unwritable object.*No space left"),
    ],
)
def test_what_cannot_be_written_ends_no_training(to, named):
    with pytest.warns(RuntimeWarning, match=named) as warned:
        exchange = recorded("topk:min_numel=0", 4, to, 1, size=1)[0]
    assert len(warned) == 1 and exchange.stats()["steps"] == 4


class Board:
    """Keeps what a TensorBoard writer is given."""

    def __init__(self):
        self.scalars = {}

    def add_scalar(self, tag, value, step):
        self.scalars.setdefault(tag, []).append((step, value))


def test_a_writer_gets_scalars():
    board, records = Board(), []
    for to in (board, records.append):
        recorded("topk:ratio=0.05,min_numel=100", 5, to, 2, True, size=1)
    for key in ("bytes_sent", "ratio", "gradient_norm", "residual_norm"):
        steps, values = zip(*board.scalars[f"compression/{key}"])
        assert steps == (0, 2, 4) and values == pytest.approx([r[key] for r in records])
    assert board.scalars["compression/tensors/w/residual_norm"][-1] == (
        4,
        pytest.approx(records[-1]["tensors"]["w"]["residual_norm"]),
    )
    assert not any("spec" in tag or tag.endswith("/step") for tag in board.scalars)


@pytest.mark.parametrize(
    "options, words",
    [(("f", 0), "every must be"), (("f", 1.5), "every must be"), ((7,), "records go to")],
)
def test_what_cannot_record_is_refused(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Recorder(ranks_of("topk")[0], *options)


def warned(spec, steps, every=1, scale=lambda step: 1.0):
    """Warnings of so many steps of random gradients on one rank, times scale(step)."""
    exchange = ranks_of(spec, 1, {"w": (20, 40)})[0]
    exchange.features["recording"] = Recorder(exchange, lambda record: None, every)
    rng = np.random.default_rng(0)
    steady = rng.standard_normal(800)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(steps):
            grad = (steady / 5 + rng.standard_normal(800)) * scale(step)
            run_step([exchange], [{"w": grad.astype(np.float32)}])
        exchange.end_step()
    return [str(each.message) for each in found if "growing" in str(each.message)]


@pytest.mark.parametrize(
    "spec, steps, every",
    [
        ("dgc:ratio=0.01,min_numel=0,momentum=0.9", 2000, 5),
        ("strom:tau=2,min_numel=0", 2000, 1),
        *(
            pytest.param(*each, marks=pytest.mark.extended)
            for each in (
                ("topk:ratio=0.01,min_numel=0", 2000, 1),
                ("dgc:ratio=0.004,min_numel=0", 3000, 10),
                ("adacomp:min_numel=0", 4000, 1),
                ("randomk:ratio=0.01,min_numel=0", 2000, 3),
                ("efsignsgd:min_numel=0", 2000, 5),
                ("powersgd:min_numel=0,rank=1,min_rate=0", 2000, 4),
                ("variance:min_numel=0", 4000, 2),
            )
        ),
    ],
)
def test_residuals_that_come_to_a_plateau_are_not_warned_of(spec, steps, every):
    assert not warned(spec, steps, every)
    # As gradients become smaller.
    assert not warned(spec, steps, every, lambda step: 1 / (1 + step / 100))
    # Whose tau stays as it is: it sends too little then.
    if "strom" not in spec:
        assert not warned(spec, steps, every, lambda step: 1 + step / 100)  # or larger


@pytest.mark.parametrize(
    "spec, every", [("strom:tau=1000000,min_numel=0", 1), ("strom:tau=0.01,min_numel=0", 4)]
)
def test_residuals_that_grow_for_ever_are_warned_of_once(spec, every):
    (message,) = warned(spec, 1500, every)
    assert "strom keeps of gradients goes on growing" in message and "larger ratio" in message


def file_of_records(tmp_path, by_tensor=True):
    path = tmp_path / "run.jsonl"
    recorded(
        "topk:ratio=0.05,min_numel=100",
        11,
        path,
        5,
        by_tensor,
        grads=steps_of(0, 11, 2, SHAPES, spread=False),
    )
    return path


@pytest.mark.parametrize("by_tensor", [True, False])
def test_a_report_lists_tensors_and_draws(tmp_path, capsys, by_tensor, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path, picture = file_of_records(tmp_path, by_tensor), tmp_path / "run.png"
    # The shell leaves what is behind a = as it is.
    cli.main(["report", str(path), "--plot=~/run.png"])
    shown = capsys.readouterr().out
    assert "topk, rank 0 of 2, steps 0 to 10, 3 records" in shown and report.WHOLE in shown
    assert all(
        any(line.split()[:1] == [name] for line in shown.splitlines()) == by_tensor
        for name in SHAPES
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    cli.main(["report", str(path), "--json", "-"])
    lines = json.loads(capsys.readouterr().out)
    assert [line["name"] for line in lines] == (
        [*sorted(SHAPES, key="xwbias".index)] if by_tensor else []
    ) + [report.WHOLE]
    records = recording.read(path)
    assert lines[-1]["bytes_sent"] == pytest.approx(sum(r["bytes_sent"] for r in records) / 11)
    assert lines[-1]["ratio"] == pytest.approx(
        sum(r["dense_bytes"] for r in records) / sum(r["bytes_sent"] for r in records)
    )
    if by_tensor:
        assert sum(line["bytes_sent"] for line in lines[:-1]) == pytest.approx(
            lines[-1]["bytes_sent"]
        )


@pytest.mark.parametrize(
    "text, words",
    [("", "no record yet"), ("hello\n", "line 1: not a record"), (None, "No such file")],
)
def test_a_file_without_records_is_an_error(tmp_path, capsys, text, words):
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        cli.main(["report", str(path)])
    assert words in capsys.readouterr().err
