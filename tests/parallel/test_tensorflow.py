"""The TensorFlow adapter on real ranks. One job runs all cases meant for its size; each case is a
test of its own here."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow", reason="needs Horovod with TensorFlow")

import alike
import horovod.tensorflow as hvd
from jobs import ENVIRONMENT, LAUNCHERS, LIMIT, launch, on_sizes
from tensorflow_cases import CASES

from horovod_compress import kernels

needs_mpi = pytest.mark.skipif(
    not hvd.mpi_built(), reason="needs Open MPI, and Horovod built with it"
)
LAUNCHER = LAUNCHERS["mpirun" if hvd.mpi_built() else "horovodrun-gloo"]
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "keras_images.py"
# Asked for by name, with other threads or launchers.
ALONE = ("one_thread_is_enough", "fit_learns_and_resumes_bit_for_bit")


# What everybody's run shows on two ranks. Other cases, and other numbers of ranks, are for --all.
PROMISES = (
    "dense_limit",
    "a_tape_gives_what_simulate_gives",
    "not_finite_gradients_lose_nothing",
    "states_are_loaded_before_the_first_gradient",
    "mismatched_ranks_are_named",
)


@pytest.mark.parametrize(
    "size, case",
    on_sizes(
        {case: sizes for case, (sizes, _) in CASES.items() if case not in ALONE},
        PROMISES,
        again={3: ("hosts_give_what_they_give_in_one_process",)},
        largest=4,
    ),
)
def test_cases(job, size, case):
    job(LAUNCHER, size, cases="tensorflow_cases").assert_passed(case)


def alone(folder, case, launcher=LAUNCHER, **options):
    """A case in a job of its own."""
    launch(folder, launcher, 2, [case], **{"cases": "tensorflow_cases", **options}).assert_passed(
        case
    )


@pytest.mark.extended
def test_one_thread_between_operations_is_enough(tmp_path):
    alone(tmp_path, "one_thread_is_enough", environment={"TF_NUM_INTEROP_THREADS": "1"})


@pytest.mark.extended
@pytest.mark.skipif(
    kernels.backend != "native", reason="needs native kernels, which were not built"
)
def test_ranks_on_different_kernels(tmp_path):
    alone(tmp_path, "ranks_on_different_kernels", environment={"KERNELS_ON_RANK": "1:reference"})


@pytest.mark.parametrize(
    "case",
    [
        "a_tape_gives_what_simulate_gives",
        "not_finite_gradients_lose_nothing",
        pytest.param("fit_learns_and_resumes_bit_for_bit", marks=pytest.mark.extended),
    ],
)
def test_under_horovodrun_with_gloo(job, case):
    job(LAUNCHERS["horovodrun-gloo"], 2, cases="tensorflow_cases").assert_passed(case)


@needs_mpi
@pytest.mark.parametrize("case", ["not_finite_gradients_lose_nothing"])
def test_under_horovodrun_with_mpi(job, case):
    """Ranks find each other as under mpirun, where all cases run."""
    job(LAUNCHERS["horovodrun-mpi"], 2, cases="tensorflow_cases").assert_passed(case)


@pytest.mark.extended
def test_the_same_gradients_give_the_same_as_in_torch(tmp_path):
    """Bit for bit, and byte for byte on the wire, on two real ranks each."""
    pytest.importorskip("horovod.torch", reason="needs Horovod with PyTorch")
    found = {}
    for cases in ("cases", "tensorflow_cases"):
        (tmp_path / cases).mkdir()
        alone(tmp_path / cases, "told_gradients_to_a_file", cases=cases)
        found[cases] = [np.load(tmp_path / cases / f"results.{rank}.npz") for rank in range(2)]
    for torchs, tensorflows in zip(found["cases"], found["tensorflow_cases"]):
        assert len(torchs.files) == len(alike.SPECS) * (1 + alike.STEPS * len(alike.SHAPES))
        assert sorted(torchs.files) == sorted(tensorflows.files)
        different = [
            key for key in torchs.files if not np.array_equal(torchs[key], tensorflows[key])
        ]
        assert not different, different[:10]


@pytest.mark.extended
def test_the_example_saves_and_resumes(tmp_path):
    command = [
        *LAUNCHER.format(size=2).split(),
        sys.executable,
        EXAMPLE,
        "--images",
        "640",
        "--compression",
        "dgc:ratio=0.01",
    ]
    for arguments in (["--epochs", "1"], ["--epochs", "2", "--resume", "1"]):
        job = subprocess.run(
            [*command, *arguments, "--checkpoints", tmp_path],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert job.returncode == 0, (job.stdout + job.stderr)[-3000:]
        assert "test accuracy" in job.stdout and "times less" in job.stdout
    assert (tmp_path / "02.rank1.npz").exists()
