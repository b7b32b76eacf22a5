"""What users do beside the plain training loop, on real ranks. One job a framework runs its cases;
each case is a test of its own here."""

import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

import horovod.torch as hvd
import users_cases
from jobs import LAUNCHERS

pytestmark = pytest.mark.extended

LAUNCHER = LAUNCHERS["mpirun" if hvd.mpi_built() else "horovodrun-gloo"]


@pytest.mark.parametrize("case", users_cases.CASES)
def test_torch(job, case):
    job(LAUNCHER, 2, cases="users_cases").assert_passed(case)


TENSORFLOW = (
    # By name: TensorFlow is not imported beside PyTorch.
    "discarded_gradients_do_not_come_back",
    "mistakes_get_clear_errors",
    "a_change_of_momentum_that_is_not_followed_is_told",
    "mistakes_in_elastic_jobs_are_named",
    "graph_mode_of_tensorflow_1",
)


@pytest.mark.parametrize("case", TENSORFLOW)
def test_tensorflow(job, case):
    pytest.importorskip("horovod.tensorflow", reason="needs Horovod with TensorFlow")
    job(LAUNCHER, 2, cases="users_tensorflow_cases").assert_passed(case)
