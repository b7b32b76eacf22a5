"""hosts=true: conservation, replicas and rollback, what it is equal to, portable states, bytes, and
what is refused."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import discardable, jobs, on_all_ranks
from tiers import examples

import horovod_compress as hc
from horovod_compress.engine import checkpoint
from horovod_compress.engine.debt import debt_of
from horovod_compress.engine.hosts import SharedMemory
from horovod_compress.engine.lockstep import make_ranks, run_step
from horovod_compress.protocol.machine import Machine
from horovod_compress.transport.loopback import Loopback

GATHERING = sorted(id for id in hc.available() if "hosts" in hc.available()[id]["options"])
KEEPING = [
    # Specs, and the momentum that they give what they are given.
    ("topk:ratio=0.05", 0),
    ("topk:ratio=0.6", 0),
    ("adacomp:seed=0", 0),
    ("efsignsgd:seed=0", 0),
    ("onebit:seed=0", 0),
    ("randomk:ratio=0.1", 0),
    ("strom:tau=0.5", 0),
    ("dgc:ratio=0.05,masking=false,momentum=0.5", 0.5),
    ("dgc:ratio=0.9,masking=false,momentum=0.5", 0.5),
]


@st.composite
def jobs_on_hosts(draw):
    """(ranks of a host, shapes by name, gradients[step][rank]) of 2 to 9 ranks on hosts of 1 to
    4."""
    ranks, local_size = draw(
        st.sampled_from([(n, size) for n in range(2, 10) for size in range(1, 5) if n % size == 0])
    )
    return local_size, *draw(jobs(st.just(ranks)))


def ranks_on_hosts(spec, named, ranks, local_size):
    return make_ranks(hc.get_compressor(spec), named, Loopback.group(ranks), local_size=local_size)


def flat(ranks):
    return [{name: np.array(grad).reshape(-1) for name, grad in named.items()} for named in ranks]


def owed(exchanges, name):
    """The sum over ranks of what they keep of a tensor, each in its place, float64."""
    for exchange in exchanges:
        exchange.arrays()
    return sum(
        debt_of(tensor.compressor, tensor.state).astype(np.float64)
        for ex in exchanges
        for tensor in ex.tensors
        if tensor.name == name
    )


def on_hosts(step, name, local_size):
    """The sums over hosts of a tensor's gradients, float64; of a tensor with fewer rows than a host
    has ranks, the gradients."""
    together = local_size if len(step[0][name]) >= local_size else 1
    return [
        np.sum([ranks[name] for ranks in step[first : first + together]], 0, np.float64)
        for first in range(0, len(step), together)
    ]


@examples(100)
@given(jobs_on_hosts(), st.sampled_from(KEEPING))
def test_nothing_is_lost_and_replicas_agree(job, keeping):
    """What is not finite stays out, element by element of a host's sum; the rest of such a step
    comes later."""
    spec, momentum = keeping
    local_size, named, steps = job
    exchanges = ranks_on_hosts(f"{spec},min_numel=0,hosts=true", named, len(steps[0]), local_size)
    sent = {name: np.zeros(np.prod(shape)) for name, shape in named.items()}
    for step in steps:
        results = run_step(exchanges, flat(step))
        for name in named:
            assert all(
                np.array_equal(result[name], results[0][name], equal_nan=True) for result in results
            )
        if all(np.isfinite(result).all() for result in results[0].values()):
            sent = {
                name: sent[name] + len(step) * results[0][name].astype(np.float64) for name in named
            }
    for name in named:
        sums = np.array([on_hosts(step, name, local_size) for step in steps])
        given = np.where(np.isfinite(sums), sums, 0).sum((0, 1)).reshape(-1) / (1 - momentum)
        np.testing.assert_allclose(
            sent[name] + owed(exchanges, name), given, atol=2e-5 * (1 + np.abs(given).max())
        )


@examples(60)
@given(
    jobs_on_hosts(),
    st.sampled_from(
        [
            "topk:ratio=0.05",
            "dgc:ratio=0.05",
            "adacomp:seed=0",
            "variance:alpha=1",
            "efsignsgd:seed=0",
        ]
    ),
    st.integers(0, 8),
)
def test_a_step_that_is_not_finite_is_undone_on_all_ranks_alike(job, spec, at):
    """Bit for bit, where it is forgotten."""
    local_size, named, steps = job
    ranks, compressor = len(steps[0]), hc.get_compressor(f"{spec},min_numel=0,hosts=true")
    exchanges = discardable(
        make_ranks(compressor, named, Loopback.group(ranks), local_size=local_size)
    )
    for step in steps:
        run_step(exchanges, flat(step))
    before = [
        {n: {k: a.copy() for k, a in arrays.items()} for n, arrays in exchange.arrays().items()}
        for exchange in exchanges
    ]
    last = flat(steps[-1])
    last[at % ranks][sorted(named)[at % len(named)]][-1] = np.nan
    results = run_step(exchanges, last)
    assert all(np.isnan(result[sorted(named)[at % len(named)]]).any() for result in results)
    for exchange, arrays in zip(exchanges, before):
        exchange.end_step()
        for name, each in arrays.items():
            for key, array in each.items():
                np.testing.assert_array_equal(exchange.arrays()[name][key], array)


@pytest.mark.parametrize("id", GATHERING)
def test_hosts_of_one_rank_change_nothing(id):
    rng = np.random.default_rng(0)
    steps = [
        [{"w": rng.standard_normal((30, 40)).astype(np.float32)} for _ in range(3)]
        for _ in range(4)
    ]
    expected, found = (
        hc.simulate(f"{id}:min_numel=0,hosts={hosts}", steps) for hosts in ("false", "true")
    )
    for one, other in zip(expected.mean, found.mean):
        np.testing.assert_array_equal(one["w"], other["w"])
    assert expected.bytes_sent == found.bytes_sent


def test_each_rank_clips_its_own_gradient():
    rng = np.random.default_rng(0)
    steps = [[{"w": rng.standard_normal((30, 40)).astype(np.float32)} for _ in range(4)]]
    spec = "dgc:ratio=1,momentum=0,clip_norm=0.01,min_numel=0,hosts="
    alone, hosts = (hc.simulate(spec + each, steps, local_size=2) for each in ("false", "true"))
    np.testing.assert_allclose(hosts.mean[0]["w"], alone.mean[0]["w"], rtol=1e-5, atol=1e-9)


# Which draw nothing.
@pytest.mark.parametrize("id", ["adacomp", "variance", "efsignsgd", "strom", "onebit"])
def test_hosts_are_what_so_many_ranks_with_their_sums_are(id):
    """On tensors that are the parts, bit for bit but for the mean over more ranks."""
    rng, hosts, local_size = np.random.default_rng(1), 3, 2
    steps = [
        [{"w": rng.standard_normal((31, 40)).astype(np.float32)} for _ in range(hosts * local_size)]
        for _ in range(6)
    ]
    summed = [
        [step[first]["w"] + step[first + 1]["w"] for first in range(0, len(step), local_size)]
        for step in steps
    ]
    parts = [[{"0": each[:15], "1": each[15:]} for each in step] for step in summed]
    found = hc.simulate(f"{id}:min_numel=0,hosts=true", steps, local_size=local_size)
    expected = hc.simulate(f"{id}:min_numel=0", parts)
    for one, other in zip(expected.mean, found.mean):
        np.testing.assert_allclose(
            other["w"], np.concatenate([one["0"], one["1"]]) / local_size, rtol=1e-6, atol=1e-7
        )
    for rank, state in enumerate(found.state):
        for key, array in state["w"].items():
            np.testing.assert_array_equal(
                array, expected.state[rank // local_size][str(rank % local_size)][key]
            )


@pytest.mark.parametrize("id", ["topk", "dgc", "adacomp", "variance"])
def test_portable_states_keep_what_is_owed_on_any_hosts(id):
    """From 6 ranks on hosts of 3, by all ranks' states or their mean, to any others and to one
    level."""
    rng, named = np.random.default_rng(2), {"w": (31, 40), "bias": (40,)}

    def trained(ranks, local_size, hosts="true"):
        exchanges = ranks_on_hosts(f"{id}:hosts={hosts}", named, ranks, local_size)
        for _ in range(5):
            run_step(
                exchanges,
                flat(
                    [
                        {n: rng.standard_normal(s).astype(np.float32) for n, s in named.items()}
                        for _ in range(ranks)
                    ]
                ),
            )
        return exchanges

    old = trained(6, 3)
    states, expected = [exchange.state_dict() for exchange in old], owed(old, "w") / 6
    portable = on_all_ranks(
        lambda exchange, transport: checkpoint.portable(exchange.state_dict(), transport, "state"),
        old,
    )[0]
    for ranks, local_size, hosts in (
        (6, 3, "true"),
        (6, 2, "true"),
        (4, 4, "true"),
        (2, 1, "true"),
        (6, 3, "false"),
        (3, 1, "false"),
    ):
        for state in (states, portable):
            new = trained(ranks, local_size, hosts)
            for exchange in new:
                exchange.load_state_dict(state)
            np.testing.assert_allclose(owed(new, "w") / ranks, expected, rtol=1e-5, atol=1e-6)
            run_step(
                new,
                flat([{n: np.ones(s, np.float32) for n, s in named.items()} for _ in range(ranks)]),
            )
    again = trained(6, 3)
    for exchange, state in zip(again, states):
        exchange.load_state_dict(state)
    np.testing.assert_array_equal(owed(again, "w") / 6, expected)
    with pytest.raises(ValueError, match="shards"):
        trained(6, 2)[1].load_state_dict(states[1])


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param("topk:ratio=0.001", marks=pytest.mark.release),
        pytest.param("dgc:ratio=0.001", marks=pytest.mark.release),
        pytest.param("adacomp:seed=0", marks=pytest.mark.extended),
    ],
)
def test_a_rank_of_eight_hosts_of_eight_receives_a_seventh_at_most(spec):
    """Real payloads of 64 ranks, of layers of ResNet-50's shapes, one after the other to take less
    memory."""
    rng, received = np.random.default_rng(3), {"false": 0, "true": 0}
    layers = {"conv4": (256, 256, 3, 3), "conv5": (512, 2048, 1, 1)}
    for name, shape in layers.items():
        gradient = rng.standard_normal(np.prod(shape), np.float32)
        for hosts in received:
            exchanges = ranks_on_hosts(f"{spec},hosts={hosts}", {name: shape}, 64, 8)
            run_step(exchanges, [{name: np.roll(gradient, 7919 * rank)} for rank in range(64)])
            received[hosts] += exchanges[0].stats()["bytes_received"]
    assert received["true"] <= received["false"] / 7, received


@pytest.mark.parametrize(
    "spec, words",
    [
        ("topk:hosts=true,exchange=split", "give hosts=true or exchange=split"),
        ("variance:hosts=true,moments=per_sample", "leave out hosts, or moments"),
        ("maxnorm:hosts=true", "no option 'hosts'"),
        ("topk:hosts=2", "hosts must be true or false"),
    ],
)
def test_what_hosts_do_not_go_with_is_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        hc.get_compressor(spec)


def test_ranks_that_are_no_hosts_of_that_size_are_refused():
    with pytest.raises(ValueError, match="5 ranks are not hosts of 2"):
        hc.simulate("topk", [[{"w": np.ones((4, 4))} for _ in range(5)]], local_size=2)


def test_memory_that_cannot_be_had_is_an_error_on_all_ranks(monkeypatch, tmp_path):
    """Nothing is left behind."""
    monkeypatch.setattr("horovod_compress.engine.hosts._FOLDER", str(tmp_path / "none"))
    machines = [Machine(local, 2) for local in range(2)]

    def meet(machine, transport):
        SharedMemory.of(machine).want(machine, "w", 100)
        with pytest.raises(RuntimeError, match="rank 0 cannot share memory.*docker run --shm-size"):
            machine.arrange(transport, "label", 0)

    on_all_ranks(meet, machines)
    monkeypatch.setattr("horovod_compress.engine.hosts._FOLDER", str(tmp_path))
    machines = [Machine(local, 2) for local in range(2)]

    def met(machine, transport):
        memory = SharedMemory.of(machine)
        memory.want(machine, "w", 100)
        machine.arrange(transport, "label", 0)
        memory.slots["w"][machine.local] = 1 + machine.local
        return memory

    assert [memory.slots["w"][:, 99].tolist() for memory in on_all_ranks(met, machines)] == [
        [1, 2],
        [1, 2],
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("id", GATHERING)
def test_tensors_without_rows_or_elements_stay_whole(id):
    """As layers' scales, which are scalars, and layers that have nothing."""
    named = {"scale": (), "nothing": (4, 0), "no rows": (0, 3), "w": (4, 3)}
    rng = np.random.default_rng(4)
    steps = [
        [{n: rng.standard_normal(s).astype(np.float32) for n, s in named.items()} for _ in range(4)]
        for _ in range(3)
    ]
    run = hc.simulate(f"{id}:min_numel=0,hosts=true", steps, local_size=2)
    for mean in run.mean:
        assert {name: result.shape for name, result in mean.items()} == named
        assert all(np.isfinite(result).all() for result in mean.values())


KILLED = """
import os, signal, sys
import numpy as np
from ranks import on_all_ranks
from horovod_compress.engine import hosts
from horovod_compress.protocol.machine import Machine

folder, when = sys.argv[1:]
hosts._FOLDER = folder


def and_then_killed(function):
    def call(*arguments):
        function(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    return call


if when == "opened":
    os.pwrite = and_then_killed(os.pwrite)
elif when == "made":
    os.posix_fallocate = and_then_killed(os.posix_fallocate)


def meet(machine, transport):
    hosts.SharedMemory.of(machine).want(machine, "w", 10**6)
    machine.arrange(transport, "label", 0)
    and_then_killed(lambda: None)()


on_all_ranks(meet, [Machine(local, 2) for local in range(2)])
"""


@pytest.mark.parametrize("when", ["opened", "made", "shared"])
def test_ranks_that_are_killed_leave_no_memory_behind(when, tmp_path):
    """Whenever that is. Before all have opened it there is a name, of a file with two tokens."""
    here = os.path.dirname(__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), when],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [file.stat().st_size <= 32 for file in tmp_path.iterdir()] == [True] * (when == "opened")
