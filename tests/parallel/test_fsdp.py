"""Replicas of models that fully_shard has cut, started by torchrun, which cannot import Horovod.
One job of each size runs all cases meant for it; each case is a test of its own here."""

import pathlib
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.fsdp", reason="needs FSDP2")
if not hasattr(torch.distributed.fsdp, "fully_shard"):
    pytest.skip("needs FSDP2", allow_module_level=True)

from fsdp_cases import CASES  # noqa: E402
from jobs import ENVIRONMENT, on_sizes  # noqa: E402

TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --no-python"
# What everybody's run shows.
PROMISES = (
    "the_dense_limit_is_fsdps_own_reduction",
    "nothing_is_lost_whatever_is_reached",
    "models_that_cannot_be_served_are_named",
)


@pytest.mark.extended
def test_the_example_trains_and_saves(tmp_path):
    example = pathlib.Path(__file__).parents[2] / "examples" / "fsdp_text.py"
    command = [*TORCHRUN.split(), "--nproc_per_node", "2", sys.executable, example, "--steps", "4"]
    command += ["--compression", "hsdp", "none", "updates", "--state", "kept"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = dict(re.findall(r"(\w+): seed 0, loss ([\d.]+)", done.stdout))
    assert found["none"] == found["hsdp"] and 2 < float(found["updates"]) < 5
    assert (tmp_path / "kept-none" / ".metadata").exists()


@pytest.mark.parametrize(
    "size, case",
    on_sizes(
        {case: sizes for case, (sizes, _) in CASES.items()},
        PROMISES,
        # Shards of two ranks.
        again={4: PROMISES},
    ),
)
def test_under_torchrun(job, size, case):
    launcher = f"{TORCHRUN} --nproc_per_node {{size}}"
    job(launcher, size, cases="fsdp_cases").assert_passed(case)
