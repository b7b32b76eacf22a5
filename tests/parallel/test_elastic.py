"""A job whose ranks come and go: its parameters are those of the same history in one process, step by step and without Horovod."""
import functools

import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

import torch
from elastic_job import HOSTS, KILLED_AT, SPECS, STEPS, loss_of, model_of, optimizer_of
from elastic_jobs import history, replay, run

from horovod_compress.compressors import get_compressor
from horovod_compress.lockstep import run_step


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As ranks have: with more of them PyTorch adds up in another order, which PowerSGD amplifies."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of a job that has ended."""
    folder = tmp_path_factory.mktemp("elastic")
    run(folder, "elastic_job.py")
    return folder


def test_ranks_die_join_and_leave(job):
    """What the others are about. The dead rank's step was not committed."""
    began = [(each["step"], each["size"]) for each in history(job)]
    assert began == [(0, 2), (KILLED_AT // 4 * 4, 1), *((step, sum(hosts.values())) for step, hosts in HOSTS.items())]


def test_replicas_are_identical(job):
    for step, size in {80: 2, 92: 3, STEPS: 2}.items():
        replicas = [torch.load(job / f"{step}.{rank}.pt") for rank in range(size)]
        for models in replicas:
            for model, first in zip(models, replicas[0]):
                for name, values in model.items():
                    assert torch.equal(values, first[name]), (step, name)


@pytest.mark.parametrize("i", range(len(SPECS)), ids=SPECS)
def test_parameters_are_those_of_the_same_history_in_one_process(job, i):
    """PowerSGD's only while there are at most two ranks: Horovod adds up the floats of three in another order, which it amplifies."""
    last = 80 if "powersgd" in SPECS[i] else STEPS
    model = torch.load(job / f"{last}.0.pt")[i]
    for name, values in replayed(SPECS[i], history(job), last).state_dict().items():
        error = (model[name] - values).abs().max() / values.abs().max()
        assert error <= 1e-6, f"{name} differs by {error:.1e}"


def replayed(spec, history, last):
    """The model at step `last`."""
    model, compressor = model_of(spec), get_compressor(spec)
    optimizer = optimizer_of(spec, model, momentum=0.0 if compressor.corrects_momentum else 0.9)
    compressor = compressor.bound(0.9, False) if compressor.corrects_momentum else compressor
    shapes = {name: param.shape for name, param in model.named_parameters()}
    replay(history, last, compressor, shapes, functools.partial(train_step, model, optimizer))
    return model


def train_step(model, optimizer, exchanges, step):
    grads = []
    for rank in range(len(exchanges)):
        model.zero_grad()
        loss_of(model, step, rank).backward()
        grads.append({name: param.grad.numpy().flatten() for name, param in model.named_parameters()})
    results = run_step(exchanges, grads)
    for name, param in model.named_parameters():
        np.testing.assert_array_equal(results[0][name], results[-1][name])
        param.grad = torch.from_numpy(results[0][name].reshape(param.shape))
    optimizer.step()
