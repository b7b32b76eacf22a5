"""scripts/demo: its options, what it shows of a job while that runs, and what it makes of the
figures.

The job itself: tests/parallel/test_demo_run.py.
"""

import argparse
import io
import pathlib
import subprocess
import sys

import demo
import pytest

pytest.importorskip("rich", reason="the demo shows its progress with rich")

from rich.console import Console

SCRIPTS = pathlib.Path(__file__).parent.parent.parent / "scripts"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--ranks", "1"], "--ranks must be at least 2"),
        (["--ranks", "4", "--images", "255"], "--images must be at least 256, one batch a rank"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--link", "0"], "--link must be at least 1"),
        (["--hosts", "3"], "--hosts"),
        (["--data", "/nowhere"], "--data: there is no folder /nowhere"),
        (["--output", "/nowhere/demo.png"], "--output: there is no folder /nowhere"),
    ],
)
def test_options_are_refused_before_anything_is_installed(arguments, said):
    done = subprocess.run(
        [SCRIPTS / "demo", *arguments],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and said in done.stderr and not done.stdout


def test_specs_are_refused_before_anything_is_trained(capsys):
    with pytest.raises(SystemExit) as end:
        demo.parse(["--specs", "none", "dgc:ratio=2"])
    assert end.value.code == 2 and "ratio" in capsys.readouterr().err


def test_the_help_installs_nothing():
    done = subprocess.run(
        [SCRIPTS / "demo", "--help"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "--specs" in done.stdout and "ready in" not in done.stdout


def test_the_command_puts_ranks_on_both_hosts():
    options = demo.parse(["--ranks", "3", "--specs", "none", "fp16", "--epochs", "2"])
    assert "-np 3 -H a:2,b:1 --network-interfaces eth0" in " ".join(
        demo.command(options, "events", True)
    )
    here = demo.command(options, "events", False)
    assert (
        "-H" not in here
        and here[-3:] == ["--compression", "none", "fp16"]
        and here[here.index("--epochs") + 1] == "2"
    )


def test_without_two_hosts_it_says_why_and_goes_on():
    said = io.StringIO()
    impossible = argparse.Namespace(hosts=None, link=0)  # no root, or no such link
    assert demo.two_hosts(impossible, Console(file=said, width=120)) == []
    assert (
        "two hosts" in said.getvalue()
        and "the link's share of the times is computed" in said.getvalue()
    )
    impossible.hosts = 2
    with pytest.raises(SystemExit, match="two hosts"):
        demo.two_hosts(impossible, Console(file=said))


JOB = r"""
import json, sys, time
file = open(sys.argv[1], "w", buffering=1)
def report(**event):
    line = json.dumps(event) + "\n"
    file.write(line[:9]), file.flush(), time.sleep(0.15), file.write(line[9:]), file.flush()
report(event="data", name="fashion-mnist", images=640, ranks=2, epochs=1)
report(event="start", spec="none", steps=10, parameters=100)
report(event="step", step=5)
report(event="point", epoch=1, ends_epoch=False, step=8, seconds=0.5, accuracy=0.5, bytes=3200)
report(event="point", epoch=1, ends_epoch=True, step=10, seconds=1.5, accuracy=.8125, bytes=4000000)
report(event="end")
report(event="start", spec="fp16", steps=10, parameters=100)
report(event="step", step=5)
sys.exit(3)
"""


def test_a_job_is_followed_line_by_line(tmp_path):
    """Lines that are half written are waited for; without a terminal there is a line for each
    epoch; a run that did not end is left out."""
    (tmp_path / "events").touch()
    said = io.StringIO()
    with subprocess.Popen([sys.executable, "-c", JOB, tmp_path / "events"]) as job:
        runs = demo.follow(job, tmp_path / "events", Console(file=said, width=120))
    assert [run["spec"] for run in runs] == ["none"] and [
        point["step"] for point in runs[0]["points"]
    ] == [8, 10]
    assert said.getvalue().splitlines() == [
        "2 ranks, 640 images of fashion-mnist, 1 epochs",
        "none: epoch 1, test accuracy 81.25 %, 4.0 MB sent, 1.5 s",
    ]


def run(spec, *points):
    """A run with points of (seconds, accuracy, bytes)."""
    points = [dict(zip(("seconds", "accuracy", "bytes"), point)) for point in points]
    return {"spec": spec, "steps": 10, "parameters": 1000, "points": points}


def test_times_are_compared_a_little_below_nones_last_accuracy():
    none = run("none", (10, 0.894, 20000), (20, 0.896, 30000), (30, 0.9, 40000))
    soon = run("soon", (4, 0.8955, 100), (5, 0.899, 200))
    late = run("late", (40, 0.894, 400))
    assert demo.target_of([soon, none]) == pytest.approx(0.895) and demo.target_of([soon]) is None
    assert list(demo.conclusions([none, soon, late])) == [
        "soon: 5.0 times sooner at 89.50 %, and -0.10 points at the end, against none, "
        "with one seed",
        "late: never at 89.50 %, and -0.60 points at the end, against none, with one seed",
    ]
    said = io.StringIO()
    Console(file=said, width=120).print(
        demo.table([none, soon, late], argparse.Namespace(link=100), measured=True)
    )
    rows = {words[0]: words[1:] for words in map(str.split, said.getvalue().splitlines()) if words}
    assert rows["none"] == ["90.00", "%", "0.0", "1", "3000.0", "30.0", "20.0"]
    assert (
        rows["soon"] == ["89.90", "%", "0.0", "200", "500.0", "5.0", "4.0"]
        and rows["late"][-1] == "never"
    )
    assert "computed" not in said.getvalue()


def test_a_links_time_is_the_bytes_that_went_over_it():
    one = demo.over_link(run("none", (1.0, 0.5, 25e6), (2.0, 0.6, 50e6)), mbits=100)
    assert [point["seconds"] for point in one["points"]] == [pytest.approx(3.0), pytest.approx(6.0)]
    said = io.StringIO()
    Console(file=said, width=120).print(
        demo.table([one], argparse.Namespace(link=100), measured=False)
    )
    assert "* computed" in said.getvalue() and "one host" in said.getvalue()


def test_the_picture_is_drawn_without_a_terminal_or_a_display(tmp_path):
    pytest.importorskip("matplotlib", reason="the demo draws with it")
    demo.draw(
        [run("none", (1, 0.5, 10), (2, 0.9, 20)), run("dgc", (1, 0.9, 1))],
        demo.parse(["--output", str(tmp_path / "demo.png")]),
        True,
    )
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
