"""benchmarks/soak.py with each of its faults, and other hosts three times."""

import subprocess
import sys

import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

from jobs import ENVIRONMENT, HERE, LIMIT


@pytest.mark.release
def test_a_short_soak():
    specs = ("dgc:ratio=0.01", "powersgd:rank=2")
    command = [
        sys.executable,
        HERE.parents[1] / "benchmarks" / "soak.py",
        "--steps",
        "120",
        "--every",
        "10",
        *specs,
    ]
    job = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
    assert job.returncode == 0, job.stdout + job.stderr
    for spec in specs:
        assert f"{spec}: 120 steps, 11 faults: off by" in job.stdout, job.stdout
