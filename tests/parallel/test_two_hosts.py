"""Real ranks on two hosts that this machine plays, under every launcher."""

import time

import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

from jobs import HOROVODRUN, LIMIT, Job, launch
from test_ranks import needs_mpi

ON_TWO_HOSTS = {
    "horovodrun-gloo": f"{HOROVODRUN} --gloo -np {{size}} -H a:{{half}},b:{{half}} "
    "--network-interfaces eth0",
    "horovodrun-mpi": "horovodrun --mpi -np {size} -H a:{half},b:{half} --network-interfaces eth0",
    "mpirun": "mpirun -np {size} -H a:{half},b:{half}",
}


def by_tier(launcher, *more, runs_with):
    """The parameters of a job on two hosts; runs_with: the marker of its tier."""
    needed = [] if launcher == "horovodrun-gloo" else [needs_mpi]
    return pytest.param(launcher, *more, marks=[*needed, getattr(pytest.mark, runs_with)])


@pytest.mark.parametrize(
    "launcher, size",
    [
        by_tier("horovodrun-gloo", 4, runs_with="extended"),
        by_tier("mpirun", 2, runs_with="extended"),
        *(
            by_tier(*both, runs_with="release")
            for both in (
                ("horovodrun-gloo", 2),
                ("mpirun", 4),
                ("horovodrun-mpi", 2),
                ("horovodrun-mpi", 4),
            )
        ),
    ],
)
def test_on_two_hosts(tmp_path, two_hosts, launcher, size):
    cases = [
        "replicas_identical_after_100_steps",
        "on_two_hosts",
        *(["hosts_give_what_they_give_in_one_process"] if size == 4 else []),
    ]
    with two_hosts("1gbit") as hosts:
        job = launch(tmp_path, ON_TWO_HOSTS[launcher], size, cases, hosts=hosts)
    for case in cases:
        job.assert_passed(case)


@pytest.mark.parametrize(
    "launcher",
    [
        by_tier("horovodrun-gloo", runs_with="extended"),
        by_tier("mpirun", runs_with="release"),
        by_tier("horovodrun-mpi", runs_with="release"),
    ],
)
def test_a_host_that_is_cut_off_ends_the_job(tmp_path, two_hosts, launcher):
    """Under Gloo with Horovod's own error, within Horovod's own timeout, on the rank whose timeout
    comes first: horovodrun then ends the other. Under MPI it is mpirun that notices."""
    options = {
        "names": ["trains_until_cut_off"],
        "environment": {"HOROVOD_GLOO_TIMEOUT_SECONDS": "15"},
    }
    with (
        two_hosts() as hosts,
        Job(tmp_path, ON_TWO_HOSTS[launcher], 2, hosts=hosts, **options) as job,
    ):
        until = time.monotonic() + LIMIT
        while not (tmp_path / "results.0.trains").exists():
            assert time.monotonic() < until and job.process.poll() is None, job.printed()
            time.sleep(0.1)
        hosts.cut("b")
        outcome = job.outcome()
    outcome.assert_ended()
    assert outcome.status, outcome.printed
    if launcher == "horovodrun-gloo":
        errors = [rank["trains_until_cut_off"].get("error") for rank in outcome.ranks]
        assert any("HorovodInternalError" in (error or "") for error in errors), outcome.printed
    else:
        assert "lost communication" in outcome.printed
