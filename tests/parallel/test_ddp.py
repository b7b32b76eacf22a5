"""Ranks under DistributedDataParallel, started by torchrun, which cannot import Horovod. One job of
each size runs all cases meant for it; each case is a test of its own here."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with Gloo", allow_module_level=True)

from ddp_cases import CASES  # noqa: E402
from jobs import ENVIRONMENT, LIMIT, on_sizes  # noqa: E402

HERE = pathlib.Path(__file__).parent
TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --no-python"
# Four ranks are on two machines, which this one plays.
ON_TWO_MACHINES = f"{sys.executable} {HERE / 'two_torchruns.py'} {{half}}"
# What everybody's run shows.
PROMISES = (
    "dense_limits_are_plain_ddp",
    "every_algorithm_gives_what_simulate_gives",
    "gradients_that_are_not_finite_lose_nothing",
    "mismatched_ranks_are_named",
    "resume_is_bit_for_bit",
    "what_is_refused_is_named",
)


@pytest.mark.parametrize(
    "size, case",
    on_sizes(
        {case: sizes for case, (sizes, _) in CASES.items()},
        PROMISES,
        again={3: ("frames_of_any_length_arrive_in_rank_order", "every_algorithm_trains")},
    ),
)
def test_under_torchrun(job, size, case):
    launcher = ON_TWO_MACHINES if size == 4 else f"{TORCHRUN} --nproc_per_node {{size}}"
    job(launcher, size, cases="ddp_cases").assert_passed(case)


def torchrun(*arguments):
    """What two ranks print."""
    command = [*TORCHRUN.split(), "--nproc_per_node", "2", sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_check_under_torchrun(tmp_path):
    file = tmp_path / "network.json"
    torchrun("-m", "horovod_compress", "check", "--parameters", "0.05M", "--json", file)
    found = json.loads(file.read_text())
    assert found["good"] and len(found["installed"]["ranks"]) == 2
    assert not any(found["algorithms"]["torch.distributed"].values())
    assert {each["spec"] for each in found["predictions"]} > {"none", "fp16"}


def digits_in(folder):
    """Writes scikit-learn's 8 × 8 images as the files that examples read."""
    found = pytest.importorskip("sklearn.datasets").load_digits()
    folder.mkdir()
    for part, chosen in {"train": slice(1400), "t10k": slice(1400, None)}.items():
        for kind, array in {"images": found.images * 15, "labels": found.target}.items():
            array = array[chosen].astype(np.uint8)
            header = np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes()
            file = folder / f"{part}-{kind}-idx{array.ndim}-ubyte"
            file.write_bytes(header + array.tobytes())
    return folder


@pytest.mark.extended
def test_the_example_trains_and_goes_on_from_its_state(tmp_path):
    options = ["--compression", "plain", "dgc:ratio=0.01", "--epochs", 6]
    options += ["--data", digits_in(tmp_path / "digits")]
    state = ["--state", tmp_path / "state"]
    example = HERE.parents[1] / "examples" / "ddp_images.py"
    plain, compressed = (
        float(line.split(", ")[1].removesuffix(" %"))
        for line in torchrun(example, *options, *state).splitlines()
        if "epoch 6" in line
    )
    assert min(plain, compressed) > 60
    assert len(list(tmp_path.glob("state*"))) == 4
    # All epochs are over.
    assert torchrun(example, *options, *state) == ""
