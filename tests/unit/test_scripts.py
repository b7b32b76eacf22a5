"""Scripts that check something do not read as passed where nothing was checked."""

import importlib.util
import pathlib
import shutil
import subprocess
import sys

import horovods_tests
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that looks like Horovod's; returns what sets the outcomes of jobs, by spec."""
    for file in horovods_tests.FILES.values():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setattr(sys, "argv", ["horovods_tests.py", str(tmp_path), "topk"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    return lambda found: monkeypatch.setattr(
        horovods_tests, "outcomes", lambda framework, path, spec: found[spec]
    )


def status():
    with pytest.raises(SystemExit) as end:
        horovods_tests.main()
    return end.value.code


def test_what_tests_need_is_asked_for(checkout, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "pytest" or None)
    said = status()
    assert said.startswith("nothing was run: mock, parameterized cannot be imported")
    assert said.endswith(f"{sys.executable} -m pip install mock parameterized")


@pytest.mark.parametrize("as_it_is", [{}, {"test_a": "failed"}, {"test_a": "skipped"}])
def test_nothing_that_ran_is_no_success(checkout, capsys, as_it_is):
    checkout({"": as_it_is, "topk": {}})
    assert status()
    out = capsys.readouterr().out
    assert "torch: nothing was compared" in out and "tensorflow: nothing was compared" in out
    assert "fail" not in out.replace("failed", "")


def test_it_says_of_how_many_and_how_many_ran(checkout, capsys):
    found = {"": {"test_a": "passed", "test_b": "passed", "test_c": "failed"}}
    checkout({**found, "topk": {"test_a": "passed", "test_b": "passed"}})
    assert not status() and "torch, topk: 0 of 2 fail, 2 ran" in capsys.readouterr().out
    checkout({**found, "topk": {}})
    assert status() and "torch, topk: 2 of 2 fail, 0 ran test_a test_b" in capsys.readouterr().out


def test_tests_of_hooks_that_are_not_there_are_no_success(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/pytorch_hook_tests.py", tmp_path],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    # Which of these comes first depends on what is installed.
    assert "expecttest" in done.stderr or "give the path of a checkout" in done.stderr


def test_compilers_that_cannot_be_had_test_nothing(tmp_path):
    for tool in ("bash", "dirname", "realpath", "mkdir", "id"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    done = subprocess.run(
        [ROOT / "scripts/test_compilers", "clang-14"],
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path), "PYTHON": sys.executable},
    )
    assert done.returncode == 1 and "clang-14: left out" in done.stdout
    assert "nothing was tested" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("options", ["--steps 120 --every 20", "--steps 0", "--every 0"])
def test_a_soak_without_each_fault_is_refused(options, monkeypatch, capsys):
    pytest.importorskip("horovod.torch")
    import soak

    monkeypatch.setattr(sys, "argv", ["soak.py", *options.split(), "topk"])
    with pytest.raises(SystemExit, match="2"):
        soak.main()
    assert "there would not be each fault" in capsys.readouterr().err
