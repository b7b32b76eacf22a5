"""Ranks whose gradients are on a device, by its kernels in Triton's interpreter, beside ranks on
the host."""

import shutil

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

import horovod.torch as hvd  # noqa: E402
from checks import assert_equal  # noqa: E402
from jobs import LAUNCHERS, launch  # noqa: E402

from horovod_compress import kernels  # noqa: E402

pytestmark = pytest.mark.extended
MPI = shutil.which("mpirun") is not None and hvd.mpi_built()
LAUNCHER = LAUNCHERS["mpirun" if MPI else "horovodrun-gloo"]
needs_native = pytest.mark.skipif(
    kernels.backend != "native", reason="compares with the native kernels, which were not built"
)
PLACES = {"on the host": {}, "on devices": {"HOROVOD_COMPRESS_KERNELS": "device"}}
CASES = ("sparse_embeddings_as_dense", "control_c_while_results_come")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{where: for each rank what six steps of training make}."""
    found, case = {}, "what_training_makes_is_written"
    for place, environment in PLACES.items():
        folder = tmp_path_factory.mktemp(place.replace(" ", "-"))
        environment = {**environment, "MADE": str(folder / "made")}
        launch(
            folder,
            LAUNCHER,
            2,
            [case],
            environment=environment,
        ).assert_passed(case)
        found[place] = [torch.load(folder / f"made.{rank}") for rank in range(2)]
    return found


@needs_native
def test_training_is_the_same_to_the_last_bit(made):
    for mine, its in zip(made["on devices"], made["on the host"]):
        assert mine.keys() == its.keys()
        for spec, (parameters, *states) in its.items():
            assert torch.equal(mine[spec][0], parameters), spec
            assert_equal(mine[spec][1:], states)


@pytest.mark.parametrize("case", CASES)
def test_beside_a_rank_on_a_device(job, case):
    job(LAUNCHER, 2, environment={"KERNELS_ON_RANK": "1:device"}).assert_passed(case)
