"""Ranks under DistributedDataParallel whose model is on a GPU, which they share, or whose kernels
are a device's in Triton's interpreter: they make of the same gradients what ranks on CPUs make."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs torch.distributed with Gloo", allow_module_level=True)

from checks import assert_equal  # noqa: E402
from jobs import launch  # noqa: E402
from test_ddp import TORCHRUN  # noqa: E402

from horovod_compress import kernels  # noqa: E402

GPUS = torch.cuda.device_count()
DEVICE = {"DDP_DEVICE": "cuda"} if GPUS else {"HOROVOD_COMPRESS_KERNELS": "device"}
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        kernels.backend != "native", reason="compares with the native kernels, which were not built"
    ),
]


def made(folder, size, environment):
    """Of each rank of a job."""
    folder.mkdir()
    environment = {**environment, "MADE": str(folder / "made")}
    case = "what_told_gradients_make_is_written"
    launch(
        folder,
        f"{TORCHRUN} --nproc_per_node {{size}}",
        size,
        [case],
        cases="ddp_cases",
        environment=environment,
    ).assert_passed(case)
    return [torch.load(folder / f"made.{rank}") for rank in range(size)]


def assert_same_on_device(folder, size, environment=()):
    there = {**DEVICE, "EXPECTED_KERNELS": "device", **dict(environment)}
    mine, its = (made(folder / name, size, of) for name, of in (("there", there), ("here", {})))
    for found, expected in zip(mine, its):
        assert found.keys() == expected.keys()
        for spec in expected:
            try:
                if spec == "powersgd":
                    # Products, to rounding.
                    torch.testing.assert_close(found[spec], expected[spec], rtol=1e-3, atol=1e-3)
                else:
                    assert_equal(found[spec], expected[spec])
            except AssertionError as error:
                raise AssertionError(spec) from error


@pytest.mark.parametrize("gathers", [{}, {"GATHERS_ON_DEVICE": "1"}])
def test_ranks_that_share_a_device_train_as_on_cpus(tmp_path, gathers):
    assert_same_on_device(tmp_path, 2, gathers)


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_over_nccl(tmp_path):
    """On two ranks where each has a GPU of its own, else on one."""
    assert_same_on_device(tmp_path, min(GPUS, 2), {"DDP_BACKEND": "cpu:gloo,cuda:nccl"})
