"""scripts/demo as a user sees it: a small one on real ranks, on one host and, where they can be
made, on two."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

from jobs import PATIENT

pytestmark = pytest.mark.extended
ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture
def images(tmp_path):
    """A folder as MNIST comes: noise of ten kinds, 1280 images to train on and 200 to test."""
    folder = tmp_path / "noise"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, number in (("train", 1280), ("t10k", 200)):
        labels = rng.integers(0, 10, number)
        pixels = rng.integers(0, 25 * (1 + labels[:, None, None]), (number, 28, 28))
        for name, array in (("images-idx3", pixels), ("labels-idx1", labels)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (folder / f"{part}-{name}-ubyte").write_bytes(head + array.astype(np.uint8).tobytes())
    return folder


def demo(*arguments):
    command = [sys.executable, ROOT / "scripts" / "demo.py", *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **PATIENT}, capture_output=True, text=True)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_small_demo(tmp_path, images, hosts, two_hosts):
    if hosts == 2:
        # Skips where one machine cannot play them.
        with two_hosts():
            pass
    picture = tmp_path / "demo.png"
    specs = ["none", "dgc:ratio=0.01,warmup_steps=4"]
    done = demo(
        "--hosts", hosts, "--epochs", 2, "--data", images, "--specs", *specs, "--output", picture
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for spec in specs:
        assert [
            line.split(":")[-1].split(",")[0] for line in lines if line.startswith(f"{spec}: epoch")
        ] == [" epoch 1", " epoch 2"]
    assert (
        f"{specs[1]}: " in lines[-2]
        and "against none" in lines[-2]
        and lines[-1] == f"picture: {picture}"
    )
    assert ("computed" in done.stdout) == (hosts == 1) and (
        "two hosts, a link of 100 Mbit/s" in done.stdout
    ) == (hosts == 2)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_a_failed_training_said_is_shown(tmp_path):
    done = demo("--hosts", 1, "--data", tmp_path, "--output", tmp_path / "demo.png")
    assert (
        done.returncode == 1
        and "it must hold MNIST" in " ".join(done.stdout.split())
        and not (tmp_path / "demo.png").exists()
    )
