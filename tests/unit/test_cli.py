"""hvdcompress: what it prints, writes and refuses. No times are checked."""

import io
import json
import math
import re
import runpy
import sys

import numpy as np
import pytest

import horovod_compress as hc
from horovod_compress.tools import bench, models
from horovod_compress.tools.cli import main
from horovod_compress.tools.gradients import load_gradients, random_gradients
from horovod_compress.tools.printing import figure


def run(capsys, *arguments):
    main(list(map(str, arguments)))
    return capsys.readouterr().out


def refusal(capsys, *arguments):
    """What it says when it ends with status 2, before anything was printed."""
    with pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out and "Traceback" not in err
    return err


@pytest.fixture
def gradients(tmp_path):
    """A file of three steps of a matrix and a bias, 1640 floats a step, not in order."""
    rng = np.random.default_rng(0)
    steps = {
        f"{step}/{n}": rng.standard_normal(s)
        for step in (2, 10, 1)
        for n, s in {"b": 40, "w": (40, 40)}.items()
    }
    np.savez(tmp_path / "gradients.npz", **steps)
    return tmp_path / "gradients.npz"


@pytest.mark.parametrize(
    "name, tensors, floats",
    [
        ("resnet50", 161, 25557032),
        ("vgg16", 32, 138357544),
        ("lstm", 11, 66034000),
        ("bert", 199, 109482240),
        ("mobilenetv2", 158, 3504872),
    ],
)
def test_the_models_are_the_known_ones(name, tensors, floats):
    shapes = models.MODELS[name]()
    assert (len(shapes), sum(map(math.prod, shapes.values()))) == (tensors, floats)


def test_info_lists_every_compressor(capsys):
    rows = [line.split() for line in run(capsys, "info").splitlines()]
    for id, about in hc.available().items():
        assert any(row[:2] == [id, about["collective"]] for row in rows)


def test_info_shows_every_option(capsys):
    for id, about in hc.available().items():
        text = run(capsys, "info", id)
        assert text.startswith(f"{id} · {about['collective']} · ")
        assert all(name in text for name in about["options"])
    text = run(capsys, "info", "dgc", "none")
    assert (
        "Sends the ratio·d entries of largest accumulated" in text
        and "Per tensor of d floats" not in text
    )
    assert "a number above 0 and at most 1" in text and "no options" in text


def test_characters_that_a_terminal_does_not_have_end_nothing(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    main(["info", "dgc"])
    sys.stdout.flush()
    assert b"dgc ? allgather ? Lin et al." in written.getvalue()


def test_info_as_json(capsys):
    everything = json.loads(json.dumps(hc.available()))
    assert json.loads(run(capsys, "info", "--json", "-")) == everything
    assert json.loads(run(capsys, "info", "dgc", "--json", "-")) == {"dgc": everything["dgc"]}


def test_bench_measures_every_compressor_on_a_users_gradients(capsys, gradients, tmp_path):
    out = tmp_path / "results.json"
    assert "kB/step" in run(capsys, "bench", "--gradients", gradients, "--steps", 2, "--json", out)
    found = json.loads(out.read_text())
    assert (found["tensors"], found["floats"], found["ranks"], found["steps"]) == (2, 1640, 2, 2)
    results = {result["spec"]: result for result in found["results"]}
    assert {spec: result["collective"] for spec, result in results.items()} == {
        i: a["collective"] for i, a in hc.available().items()
    }
    for result in results.values():
        assert (
            min(
                result["ratio"],
                result["encode_seconds"],
                result["decode_seconds"],
                result["times_streaming"],
            )
            > 0
        )
        assert math.isfinite(result["error"])
        assert (
            sum(result["exchanged"].values()) == pytest.approx(result["bytes_per_step"])
            and sum(result["operations"].values()) >= 2
        )
    assert results["none"]["ratio"] == 1.0 and results["none"]["bytes_per_step"] == 4 * 1640
    assert results["none"]["error"] == 0 and not results["none"]["residual"]
    assert results["none"]["exchanged"] == {"allreduce float32": 4 * 1640} and results["none"][
        "operations"
    ] == {"allreduce float32": 2}
    assert results["fp16"]["ratio"] == 2.0 and 0 < results["fp16"]["error"] < 1e-3


def test_bench_as_json_alone(capsys, gradients):
    (result,) = json.loads(
        run(capsys, "bench", "fp16", "--gradients", gradients, "--steps", 1, "--json", "-")
    )["results"]
    assert result["spec"] == "fp16" and result["exchanged"] == {"allreduce float16": 2 * 1640}


def test_the_error_is_the_share_that_was_not_sent():
    gradient = np.zeros((40, 40), np.float32)
    gradient[3, :5] = [8, 4, 4, 2, 1]
    result = bench.measure(
        hc.get_compressor("dgc:ratio=0.000625,min_k=1"), [{"w": gradient}], ranks=3, steps=4
    )
    assert result["error"] == pytest.approx(math.sqrt(37 / 101)) and result["residual"]


def test_one_payload_is_a_share_of_the_work_only_where_payloads_are_gathered():
    """And not where tensors go dense, as on 200 ranks."""
    gradients = random_gradients({"w": (256, 256)}, seed=0)
    for ranks, decoded in ((3, 3), (200, 1)):
        found = bench.measure(hc.get_compressor("topk:ratio=0.02"), gradients, ranks, steps=1)
        assert ("allgather uint8" in found["exchanged"]) == (decoded > 1)
        work = found["encode_seconds"] + found["decode_seconds"] / decoded
        assert found["times_streaming"] == pytest.approx(work / found["streaming_seconds"])


def test_the_bytes_are_those_of_simulate(capsys, gradients, tmp_path):
    out = tmp_path / "results.json"
    spec = "dgc:ratio=0.01,clip_norm=1"
    run(capsys, "bench", spec, "--gradients", gradients, "--ranks", 3, "--steps", 1, "--json", out)
    (result,) = json.loads(out.read_text())["results"]
    steps = load_gradients(gradients)
    simulated = hc.simulate(spec, [[steps[step % 3]] * 3 for step in range(bench.WARMUP + 1)])
    assert result["bytes_per_step"] == simulated.bytes_sent[-1][0]
    assert result["ratio"] == pytest.approx(4 * 1640 / simulated.bytes_sent[-1][0])


def test_bench_on_a_model(capsys):
    options = "--model", "mobilenetv2", "--steps", 1
    lines = run(capsys, "bench", "none", "dgc:ratio=0.01", *options).splitlines()
    assert lines[0].startswith("mobilenetv2: 158 tensors, 3.5 million floats; 2 ranks, 1 steps")
    rows = [line.split() for line in lines]
    assert [row[1:4] for row in rows if row[:1] == ["none"]] == [["allreduce", "1", "14019"]]
    assert [row[1] for row in rows if row[:1] == ["dgc:ratio=0.01"]] == ["allgather"]


def test_figures_have_the_numbers_of_tables(tmp_path):
    pytest.importorskip("matplotlib")
    with figure(str(tmp_path / "figure.svg")) as made:
        axes = made.add_subplot(xscale="log", yscale="log")
        axes.plot([70, 100], [0.14, 2100])
        labels = [
            label.get_text()
            for axis in (axes.xaxis, axes.yaxis)
            for label in (*axis.get_majorticklabels(), *axis.get_minorticklabels())
        ]
    shown = {re.sub(r"\$\\mathdefault\{(.*)\}\$", r"\1", label) for label in labels}
    assert {"70", "0.1", "1000"} <= shown and not "".join(shown).count("^")


def test_random_gradients_follow_from_the_seed():
    shapes = {"w": (300, 40), "b": (300,)}
    first, again, other = (random_gradients(shapes, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a[n], b[n]) for a, b in zip(first, again) for n in shapes)
    assert not np.array_equal(first[0]["w"], other[0]["w"]) and not np.array_equal(
        first[0]["w"], first[1]["w"]
    )
    w = first[0]["w"]
    assert w.dtype == np.float32 and np.mean(w**4) > 6 * np.mean(w**2) ** 2  # 3 for normal numbers


def test_gradients_are_read_by_step(gradients, tmp_path):
    steps = load_gradients(gradients)
    with np.load(gradients) as file:
        for step, number in zip(steps, (1, 2, 10)):
            assert list(step) == ["b", "w"] and step["w"].dtype == np.float32
            np.testing.assert_array_equal(step["w"], file[f"{number}/w"].astype(np.float32))
    np.savez(
        tmp_path / "one.npz",
        **{"dense/kernel:0": np.ones((2, 3), np.float16).T, "scale": np.float64(2)},
    )
    (step,) = load_gradients(tmp_path / "one.npz")
    assert {name: array.shape for name, array in step.items()} == {
        "dense/kernel:0": (3, 2),
        "scale": (),
    }


@pytest.mark.parametrize(
    "entries, says",
    [
        ({"w": np.ones(3, int)}, "w must hold floats, not int64"),
        ({"w": np.ones(3, complex)}, "w must hold floats, not complex128"),
        ({"w": np.ones((0, 3))}, "w must hold floats"),
        ({"w": np.array([None])}, "w cannot be read"),
        ({"w": np.array([1, np.nan])}, "w holds numbers that are not finite"),
        ({"w": np.array([1e300])}, "w holds numbers that are not finite"),
        ({"0/w": np.ones(3), "b": np.ones(3)}, "b: either all entries"),
        ({"0/w": np.ones(3), "1/w": np.ones(4)}, "1/w: every step needs"),
        ({"0/w": np.ones(3), "1/w": np.ones(3), "1/b": np.ones(3)}, "1/b: every step needs"),
        ({"0/w": np.ones(3), "0/b": np.ones(3), "1/w": np.ones(3)}, "1/b: every step needs"),
        ({"1/w": np.ones(3), "01/w": np.zeros(3)}, "01/w: step 1 has w twice"),
        ({}, "holds no gradients"),
    ],
)
def test_files_that_are_no_gradients(capsys, tmp_path, entries, says):
    np.savez(tmp_path / "bad.npz", **entries)
    assert says in refusal(capsys, "bench", "none", "--gradients", tmp_path / "bad.npz")


def test_files_that_are_damaged(capsys, gradients, tmp_path):
    content = bytearray(gradients.read_bytes())
    content[content.find(b"NUMPY") + 200] ^= 1
    gradients.write_bytes(content)
    assert "2/b cannot be read" in refusal(capsys, "bench", "none", "--gradients", gradients)
    (tmp_path / "text.npz").write_text("gradients")
    assert "not an .npz file" in refusal(
        capsys, "bench", "none", "--gradients", tmp_path / "text.npz"
    )
    assert "is not there" in refusal(
        capsys, "bench", "none", "--gradients", tmp_path / "missing.npz"
    )


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["info", "nope"], "unknown compressor 'nope'; there are: none, "),
        (["bench", "none", "nope"], "unknown compressor 'nope'; there are: none, "),
        (["bench", "dgc:ratio=2"], "ratio must be a number above 0"),
        (["bench", "dgc:nope=2"], "dgc has no option 'nope'"),
        (["bench", "variance:moments=per_sample"], "moments=per_sample needs a model's samples"),
        (["plan", "variance:moments=microbatch"], "moments=microbatch needs a model's samples"),
        (["bench", "--model", "alexnet"], "invalid choice"),
        (["bench", "--ranks", "0"], "--ranks: must be a whole number, at least 1"),
        (["bench", "--steps", "many"], "--steps: must be a whole number, at least 1"),
        (["plan", "--plot", "/nowhere/at/all.png"], "there is no folder /nowhere/at"),
        (["plan", "--parameters", "25.6"], "must be a number above 0, as 350k or 25.6M"),
        (["plan", "--plot", "plot.txt"], "plot.txt must end in .png, .pdf or .svg"),
        ([], "COMMAND"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(capsys, arguments, says):
    assert says in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    "module, arguments", [("rich", ["info"]), ("matplotlib", ["plan", "--plot", "plot.png"])]
)
def test_without_its_extra_it_says_what_to_install(monkeypatch, module, arguments):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == (f"hvdcompress needs {module}: pip install 'horovod-compress[cli]'")


def test_it_says_its_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert not end.value.code
    assert capsys.readouterr().out == f"hvdcompress {hc.__version__}\n"


def test_it_is_a_module_too(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["horovod_compress", "info", "none"])
    runpy.run_module("horovod_compress", run_name="__main__")
    assert capsys.readouterr().out.startswith("none · allreduce")
