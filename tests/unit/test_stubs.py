"""What editors and type checkers know of `Compression`."""

import pathlib
import subprocess
import sys

import pytest
import stubs

ROOT = pathlib.Path(__file__).parents[2]

# A line that has to be refused says so: mypy complains of one that is not.
USER = """# mypy: warn-unused-ignores
from typing import Any
import torch
import horovod_compress.tensorflow as hvdct
import horovod_compress.torch as hvdc

def compressions(optimizer: torch.optim.Optimizer, named: Any) -> None:
    hvdc.Compression.dgc(optimizer, ratio=0.001).stats()["bytes_sent"] + 1
    hvdc.Compression.dgc(exclude="embedding*", schedule=[(0, 0.1)], momentum=None)
    hvdc.Compression.dgc(optimizer, named_parameters=[("weight", torch.zeros(3))])
    hvdc.Compression.from_spec({"id": "topk", "ratio": 0.1}, optimizer, discardable=True)
    hvdc.Compression.auto(candidates=["none", "fp16"]).plan
    hvdc.Compression.of_another_package(strength=3)
    hvdct.Compression.topk(ratio=0.01, values="fp16")
    hvdc.Compression.dgc(optimizer, ratioo=0.001)  # type: ignore[call-arg]
    hvdc.Compression.dgc(optimizer, ratio="0.001")  # type: ignore[arg-type]
    hvdc.Compression.dgc(optimizer, values="fp8")  # type: ignore[arg-type]
    hvdc.Compression.dgc(optimizer, named)  # type: ignore[call-arg]
    hvdct.Compression.topk(named_parameters=named)  # type: ignore[call-arg]
    hvdct.Compression.topk(momentum=0.9)  # type: ignore[call-arg]
"""


def test_mypy_accepts_options_and_refuses_what_is_none(tmp_path):
    pytest.importorskip("mypy")
    stubs.write(ROOT)
    (tmp_path / "user.py").write_text(USER)
    command = [sys.executable, "-m", "mypy", tmp_path / "user.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
