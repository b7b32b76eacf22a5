"""The TensorFlow adapter on real ranks. One job runs all cases meant for its size; each case is a
test of its own here."""

import importlib.metadata
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("horovod.tensorflow", reason="needs Horovod with TensorFlow")

import horovod.tensorflow as hvd
import keras3_cases
from jobs import ENVIRONMENT, LAUNCHERS, LIMIT, on_sizes
from tensorflow_cases import CASES

from horovod_compress import kernels

needs_mpi = pytest.mark.skipif(
    not hvd.mpi_built(), reason="needs Open MPI, and Horovod built with it"
)
LAUNCHER = LAUNCHERS["mpirun" if hvd.mpi_built() else "horovodrun-gloo"]
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "keras_images.py"
needs_native = pytest.mark.skipif(
    kernels.backend != "native", reason="needs native kernels, which were not built"
)
# TensorFlow has brought Keras 3 since 2.16.
needs_keras_3 = pytest.mark.skipif(
    importlib.metadata.version("keras").startswith("2."), reason="needs TensorFlow 2.16 or later"
)
WITH_ONE_THREAD = ("one_thread_is_enough", "fit_learns_and_resumes_bit_for_bit")


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
        {case: sizes for case, (sizes, _) in CASES.items() if case not in WITH_ONE_THREAD},
        PROMISES,
        again={3: ("hosts_give_what_they_give_in_one_process",)},
        largest=4,
    ),
)
def test_cases(job, size, case):
    job(LAUNCHER, size, cases="tensorflow_cases").assert_passed(case)


ONE_THREAD = {"TF_NUM_INTEROP_THREADS": "1"}
OTHER_KERNELS = {"KERNELS_ON_RANK": "1:reference"}


@pytest.mark.parametrize(
    "case",
    [
        "a_tape_gives_what_simulate_gives",
        "not_finite_gradients_lose_nothing",
        *(pytest.param(case, marks=pytest.mark.extended) for case in WITH_ONE_THREAD),
    ],
)
def test_under_horovodrun_with_gloo(job, case):
    """With one thread between operations, which is enough."""
    launcher = LAUNCHERS["horovodrun-gloo"]
    job(launcher, 2, cases="tensorflow_cases", environment=ONE_THREAD).assert_passed(case)


@needs_mpi
@pytest.mark.parametrize(
    "case",
    [
        "an_alltoall_in_a_step",
        pytest.param("ranks_on_different_kernels", marks=[needs_native, pytest.mark.extended]),
    ],
)
def test_under_horovodrun_with_mpi(job, case):
    """Ranks find each other as under mpirun, where all cases run. One has the reference kernels."""
    launcher = LAUNCHERS["horovodrun-mpi"]
    job(launcher, 2, cases="tensorflow_cases", environment=OTHER_KERNELS).assert_passed(case)


@needs_keras_3
@pytest.mark.parametrize(
    "size, case",
    on_sizes(
        {case: sizes for case, (sizes, _) in keras3_cases.CASES.items()},
        ("dense_updates_are_those_of_one_process", "tapes_over_values_take_every_algorithm"),
        again={3: ("every_algorithm_exchanges_updates_in_fit",)},
    ),
)
def test_keras_3(job, size, case):
    """As without tf_keras."""
    environment = {"TF_USE_LEGACY_KERAS": "0"}
    job(LAUNCHER, size, cases="keras3_cases", environment=environment).assert_passed(case)


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
