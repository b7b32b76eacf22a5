"""What users do beside the plain training loop, on real ranks. One job runs all cases; each case is a test of its own here."""
import functools

import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

import horovod.torch as hvd  # noqa: E402
from jobs import LAUNCHERS, assert_passed, launch  # noqa: E402
from users_cases import CASES  # noqa: E402

LAUNCHER = LAUNCHERS["mpirun" if hvd.mpi_built() else "horovodrun-gloo"]
TOGETHER = tuple(name for name, (sizes, _) in CASES.items() if 2 in sizes)


@pytest.fixture(scope="session")
def job(tmp_path_factory):
    """Runs the job when its first case is asked for, and keeps what it found."""
    return functools.lru_cache(maxsize=None)(
        lambda: launch(tmp_path_factory.mktemp("users"), LAUNCHER, 2, TOGETHER, cases="users_cases")
    )


@pytest.mark.parametrize("case", TOGETHER)
def test_cases(job, case):
    assert_passed(job(), case, 2)
