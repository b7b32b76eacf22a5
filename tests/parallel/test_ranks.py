"""Real ranks under mpirun and horovodrun. One job runs all cases meant for its size; each case is a
test of its own here."""

import json
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

import horovod.torch as hvd
from cases import CASES
from jobs import ENVIRONMENT, LAUNCHERS, LIMIT, on_sizes

from horovod_compress import kernels

MPI = shutil.which("mpirun") is not None and hvd.mpi_built()
needs_mpi = pytest.mark.skipif(not MPI, reason="needs Open MPI, and Horovod built with it")

needs_native = pytest.mark.skipif(
    kernels.backend != "native", reason="needs native kernels, which were not built"
)

ACROSS_LAUNCHERS = (
    "replicas_identical_after_100_steps",
    "dense_limit",
    "not_finite_gradients_lose_nothing",
    "resume_is_bit_for_bit",
    "an_alltoall_in_a_step",
    "ranks_without_data_answer_with_zeros",
    "what_is_mixed_is_right_whatever_happens",
)
SPLIT = (
    "split_gives_what_it_gives_in_one_process",
    "with_all_accepted_split_gives_what_the_allgather_gives",
    "split_trains_with_identical_replicas",
)


# What everybody's run shows on two ranks. Other cases, and other numbers of ranks, are for --all.
PROMISES = (
    *ACROSS_LAUNCHERS,
    "mismatched_ranks_are_named",
    "mistakes_get_clear_errors",
    "momentum_is_taken_over_and_nothing_is_patched",
    "every_algorithm_trains",
    # A second or less each.
    "mpi_ranks_that_exchange_different_things_get_an_error",
    "half_precision_results_that_overflow_are_given_back",
    "several_local_steps_and_an_outer_optimizer",
    "an_elastic_state_goes_back_to_one_commit_twice",
    "exact_exchanges_are_d_psgd",
    "decentralized_ranks_that_differ_are_named",
)


@needs_mpi
@pytest.mark.parametrize(
    "size, case",
    on_sizes(
        {case: sizes for case, (sizes, _) in CASES.items()},
        PROMISES,
        again={
            3: (
                "every_algorithm_gives_what_simulate_gives",
                "hosts_give_what_they_give_in_one_process",
                "mpi_gives_what_horovod_gives",
                "no_history_loses_an_update",
                "ranks_without_data_answer_with_zeros",
                "split_gives_what_it_gives_in_one_process",
                "what_is_mixed_is_right_whatever_happens",
            ),
            4: (
                "auto_tries_ways_to_exchange",
                "exact_exchanges_are_d_psgd",
                "hosts_give_what_they_give_in_one_process",
                "split_gives_what_it_gives_in_one_process",
            ),
        },
    ),
)
def test_under_mpirun(job, size, case):
    job(LAUNCHERS["mpirun"], size).assert_passed(case)


@pytest.mark.parametrize(
    "case",
    [
        *ACROSS_LAUNCHERS,
        *(pytest.param(case, marks=pytest.mark.extended) for case in SPLIT),
        "mpi_needs_mpi",
        pytest.param("join_is_refused", marks=pytest.mark.extended),
        pytest.param("join_is_refused_with_split", marks=pytest.mark.extended),
    ],
)
def test_under_horovodrun_with_gloo(job, case):
    job(LAUNCHERS["horovodrun-gloo"], 2).assert_passed(case)


@needs_mpi
@pytest.mark.parametrize(
    "case",
    [
        "dense_limit",
        "an_alltoall_in_a_step",
        pytest.param("ranks_on_different_kernels", marks=[needs_native, pytest.mark.extended]),
    ],
)
def test_under_horovodrun_with_mpi(job, case):
    """Ranks find each other as under mpirun, where all cases run. One has the reference kernels."""
    environment = {"KERNELS_ON_RANK": "1:reference"}
    job(LAUNCHERS["horovodrun-mpi"], 2, environment=environment).assert_passed(case)


@pytest.mark.release
@pytest.mark.parametrize("case", ACROSS_LAUNCHERS)
def test_beside_four_busy_processes(job, busy, case):
    """`scripts/test --busy 4` runs all tests so."""
    with busy(4):
        job(LAUNCHERS["mpirun" if MPI else "horovodrun-gloo"], 2).assert_passed(case)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("horovodrun-gloo", marks=pytest.mark.release),
        pytest.param("mpirun", marks=[needs_mpi, pytest.mark.extended]),
    ],
)
def test_check_finds_out_what_pays_and_plan_goes_on_from_there(launcher, tmp_path):
    out = tmp_path / "network.json"
    check = [
        sys.executable,
        "-m",
        "horovod_compress",
        "check",
        "topk",
        "--parameters",
        "1M",
        "--json",
        out,
    ]
    job = subprocess.run(
        [*LAUNCHERS[launcher].format(size=2).split(), *check],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    transports = ("horovod", "mpi")[: 2 if launcher == "mpirun" else 1]
    for said in (
        *(f"transport {transport}: 20 of 20 algorithms work" for transport in transports),
        "all is well",
    ):
        assert job.stdout.count(said) == 1
    assert "waits least" in job.stdout or "no compression pays" in job.stdout
    found = json.loads(out.read_text())
    assert found["good"] and found["ranks"] == 2 and len(found["installed"]["ranks"]) == 2
    assert all(len(found["algorithms"][transport]) == 20 for transport in transports)
    assert {prediction["spec"] for prediction in found["predictions"]} == {"none", "fp16", "topk"}
    network = found["network"]
    assert 0 < network["latency"] < LIMIT and all(
        0 < seconds < 1e-3 for seconds in network["seconds_per_byte"].values()
    )
    plan = [
        sys.executable,
        "-m",
        "horovod_compress",
        "plan",
        "topk",
        "--parameters",
        "1M",
        "--network",
        out,
        "--json",
        "-",
    ]
    planned = json.loads(
        subprocess.run(plan, env=ENVIRONMENT, capture_output=True, text=True, check=True).stdout
    )
    assert planned["network"] == network
    none, again = (
        next(one for one in these["predictions"] if one["spec"] == "none")
        for these in (found, planned)
    )
    assert again == none


@pytest.mark.extended
def test_check_sees_what_differs():
    code = """if 1:
        import os, sys
        import horovod_compress
        horovod_compress.__version__ += f".dev{os.environ['HOROVOD_RANK']}"
        from horovod_compress.tools.cli import main
        main(["check", "--parameters", "1M"])
    """
    command = [*LAUNCHERS["horovodrun-gloo"].format(size=2).split(), sys.executable, "-c", code]
    job = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT)
    assert job.returncode != 0
    assert "DIFFERENT" in job.stdout and "something is wrong" in job.stdout


def test_check_alone():
    command = [sys.executable, "-m", "horovod_compress", "check", "--json", "-"]
    job = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LIMIT, check=True
    )
    found = json.loads(job.stdout)
    assert found["good"] and len(found["installed"]["ranks"]) == 1 and "network" not in found
    assert "all is well, as far as one rank shows" in job.stderr
    assert "one rank: nothing was exchanged" in job.stderr and "20 of 20" in job.stderr
    # What is tried is none of the user's, so it warns of nothing.
    assert "Warning" not in job.stderr
