"""The Triton programs, compiled for GPUs that need not be there."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

# Of a thread, at most: with as many 1024 threads fit on a multiprocessor of any of these GPUs.
REGISTERS = 64
# On sm_80 7 blocks of 128 threads of this one.
MORE = {"project": 72}
# Bytes of a block, at most: of a multiprocessor with 128 KiB, 16 blocks of 128 threads have as
# much.
SHARED = 8192


@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(80, marks=pytest.mark.release),
        pytest.param(90, marks=pytest.mark.extended),
        pytest.param(100, marks=pytest.mark.release),
    ],
)
def test_programs_compile_and_round_as_processors_do(capability, tmp_path):
    """A fused multiply-add would round once where the host's kernels round twice, and `ftz` would
    make denormal numbers 0."""
    script = pathlib.Path(__file__).with_name("compile_programs.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    found = json.loads(
        subprocess.run(
            [sys.executable, script, str(capability)],
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
        ).stdout
    )
    expected = {
        "advance 0 False",
        "advance 1 False",
        "advance 2 True",
        "add_entries",
        "average_momentum True",
        "narrow 16384 32 3",
        "quantize 26 5 6 int32 1",
    }
    assert expected <= found.keys()
    for name, (ptx, assembler, shared) in found.items():
        registers, spilled = (
            int(re.search(rf"(\d+) {what}", assembler)[1])
            for what in ("registers", "bytes spill stores")
        )
        print(f"sm_{capability} {name}: {registers} registers, {shared} bytes of shared memory")
        assert re.search(r"\.target sm_" + str(capability), ptx)
        assert not re.search(r"\bfma\b|\bmad\.(rn|rz)|\.ftz|\bdiv\.(full|approx)", ptx), name
        assert registers <= MORE.get(name.split()[0], REGISTERS), name
        assert shared <= SHARED and spilled == 0, name
    assert re.search(r"mul(\.rn)?\.f32", found["advance 1 False"][0]) and re.search(
        r"add(\.rn)?\.f32", found["advance 1 False"][0]
    )
