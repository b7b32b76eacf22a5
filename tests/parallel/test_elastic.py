"""Jobs whose ranks come and go: parameters are those of the same history in one process, step by
step and without Horovod, and nothing is lost."""

import functools

import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

import elastic_sums_job as sums
import elastic_switches as switches
import torch
from elastic_gradients import SPECS, UNBOUND, optimizer_of
from elastic_jobs import ON_ONE_MACHINE, bound, histories, history, names_of, replay, run, switch
from elastic_training import KILLED_AT, RANKS, STEPS, loss_of, model_of

from horovod_compress.compressors import get_compressor
from horovod_compress.engine.lockstep import run_step

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As ranks have: with more of them PyTorch adds up in another order, which PowerSGD
    amplifies."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_ranks_die_join_and_leave(elastic_job):
    """What the others are about. The dead rank's step was not committed."""
    began = [(each["step"], each["size"]) for each in history(elastic_job)]
    assert began == [
        (0, 2),
        (KILLED_AT // 4 * 4, 1),
        *((step, sum(ranks)) for step, ranks in RANKS.items()),
    ]


def test_each_rank_was_on_its_host(elastic_job):
    """Those that died or joined on another one, where there are two."""
    first, *others = [
        {began["machine"] for process in histories(elastic_job, name) for began in process}
        for name in names_of(elastic_job)
    ]
    assert others == (
        [first, first] if names_of(elastic_job) == [*ON_ONE_MACHINE] else [{"b"}, {"b"}]
    ), others


def test_replicas_are_identical(elastic_job):
    for step, size in {80: 2, 92: 3, STEPS: 2}.items():
        replicas = [torch.load(elastic_job / f"{step}.{rank}.pt") for rank in range(size)]
        for ways in replicas:
            for way, models in ways.items():
                for model, first in zip(models, replicas[0][way]):
                    for name, values in model.items():
                        assert torch.equal(values, first[name]), (step, way, name)


@pytest.mark.parametrize("i", range(len(SPECS)), ids=SPECS)
def test_parameters_are_those_of_the_same_history_in_one_process(elastic_job, i):
    """PowerSGD's only while there are at most two ranks: Horovod adds up the floats of three in
    another order, which it amplifies."""
    last = 80 if "powersgd" in SPECS[i] else STEPS
    model = torch.load(elastic_job / f"{last}.0.pt")["elastic_gradients"][i]
    for name, values in replayed(i, history(elastic_job), last).state_dict().items():
        error = (model[name] - values).abs().max() / values.abs().max()
        assert error <= 1e-6, f"{name} differs by {error:.1e}"


def replayed(i, history, last):
    """The model at step `last`. Its parameters are named as Horovod's optimizer does where the
    compression has their names from that: samples, and by these how many entries are sent, depend
    on names."""
    spec, prefix = SPECS[i], str(i) if i == UNBOUND else ""
    model, compressor = model_of(spec), get_compressor(spec)
    optimizer = optimizer_of(
        spec, model, momentum=0.0 if compressor.traits.corrects_momentum else 0.9
    )
    compressor = compressor.bound(0.9, False) if compressor.traits.corrects_momentum else compressor
    params = dict(model.named_parameters(prefix))
    shapes = {name: param.shape for name, param in params.items()}
    replay(
        history, last, compressor, shapes, functools.partial(train_step, model, params, optimizer)
    )
    return model


def gradients_of(model, params, step, size):
    """Those of each rank."""
    for rank in range(size):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        yield {name: param.grad.numpy().flatten() for name, param in params.items()}


def train_step(model, params, optimizer, exchanges, step):
    results = run_step(exchanges, list(gradients_of(model, params, step, len(exchanges))))
    for name, param in params.items():
        np.testing.assert_array_equal(results[0][name], results[-1][name])
        param.grad = torch.from_numpy(results[0][name].reshape(param.shape))
    optimizer.step()


# -- where compressions are switched


@pytest.mark.parametrize("i", range(len(switches.WHEN)), ids=switches.WHEN)
def test_switches_are_those_of_the_same_history_in_one_process(elastic_job, i):
    """A failure takes back a switch, and ranks that join take over the compression in force, with
    what is owed."""
    found = torch.load(elastic_job / f"{STEPS}.0.pt")["elastic_switches"][i]
    planned, model = switches.WHEN[i] == "planned", model_of(switches.WHEN[i])
    params = dict(model.named_parameters())
    shapes, momenta = (
        {name: param.shape for name, param in params.items()},
        {name: torch.zeros_like(param) for name, param in params.items()},
    )

    def train_step(exchanges, step):
        if planned and step in switches.SWITCHES:
            switch(exchanges, switches.SWITCHES[step], shapes)
        results = run_step(exchanges, list(gradients_of(model, params, step, len(exchanges))))[0]
        # Whether momentum is the optimizer's.
        own = not exchanges[0].tensors.compressor.traits.corrects_momentum
        for name, param in params.items():
            result = torch.from_numpy(results[name].reshape(param.shape))
            momenta[name].mul_(0.9).add_(result, alpha=float(own))
            param.data.sub_(momenta[name] if own else momenta[name] + result, alpha=0.05)
        if not planned and step + 1 in switches.SWITCHES:
            switch(exchanges, switches.SWITCHES[step + 1], shapes)

    replay(history(elastic_job), STEPS, bound(switches.FIRST), shapes, train_step)
    for name, values in params.items():
        error = (found[name] - values).abs().max() / values.abs().max()
        assert error <= 1e-6, f"{name} differs by {error:.1e}"


# -- where gradients are known


@pytest.fixture(scope="module")
def sums_job(tmp_path_factory):
    """The folder of a job that has ended, in which ranks came and went in good order."""
    folder = tmp_path_factory.mktemp("sums")
    run(folder, "elastic_sums_job.py")
    return folder


def test_ranks_come_and_go_in_good_order(sums_job):
    assert [(each["step"], each["size"]) for each in history(sums_job)] == [
        (0, 2),
        (20, 4),
        (40, 3),
        (60, 1),
        (80, 2),
    ]


@pytest.mark.parametrize("spec", sums.SPECS)
def test_nothing_is_lost_from_two_ranks_to_four_to_three_to_one_and_back(sums_job, spec):
    """Before each change and at the end: what parameters have moved by, and the mean of what ranks
    keep, are the mean of all gradients."""
    total, accumulator = 0, get_compressor(spec).traits.accumulator
    ends = [*sums.RANKS, sums.STEPS]
    for each, end in zip(history(sums_job), ends):
        size = each["size"]
        total += (
            sum(
                sums.gradient(spec, step, rank).astype(np.float64)
                for step in range(each["step"], end)
                for rank in range(size)
            )
            / size
        )
        ranks = [torch.load(sums_job / f"{end}.{rank}.pt")[spec] for rank in range(size)]
        kept = [
            np.concatenate(
                [
                    its[name][accumulator] if accumulator in its[name] else np.zeros(70)
                    for name in params
                ]
            )
            for params, its in ranks
        ]
        values = [
            np.concatenate([param.numpy().flatten() for param in params.values()])
            for params, _ in ranks
        ]
        for each_ranks in values:
            np.testing.assert_array_equal(each_ranks, values[0])
        error = (
            np.abs(np.mean(kept, axis=0, dtype=np.float64) - values[0] - total).max()
            / np.abs(total).max()
        )
        assert error <= 1e-5, f"after step {end} on {size} ranks: off by {error:.1e}"
        assert np.any(kept) == (size > 1)  # a rank alone sends everything
