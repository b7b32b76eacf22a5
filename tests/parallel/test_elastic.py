"""A job whose ranks come and go: its parameters are those of the same history in one process, step by step and without Horovod."""
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("horovod.torch", reason="real ranks need Horovod with PyTorch")

import torch
from elastic_job import FIRST_HOSTS, HOSTS, KILLED_AT, SPECS, STEPS, loss_of, model_of, optimizer_of, write_hosts
from jobs import ENVIRONMENT, HERE, LIMIT

from horovod_compress.compressors import get_compressor
from horovod_compress.exchange import Exchange
from horovod_compress.lockstep import run_step
from horovod_compress.transport.loopback import Loopback


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of a job that has ended."""
    folder = tmp_path_factory.mktemp("elastic")
    write_hosts(folder, FIRST_HOSTS)
    discover = folder / "discover"
    discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    discover.chmod(0o755)
    launcher = f"horovodrun --gloo -np 2 --min-np 1 --max-np 3 --host-discovery-script {discover} --network-interfaces lo"
    with open(folder / "output", "w+") as output:
        command = [*launcher.split(), sys.executable, HERE / "elastic_job.py", folder]
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(LIMIT)
        finally:
            end(folder, process)
        output.seek(0)
        assert status == 0, output.read()[-5000:]
    return folder


def end(folder, launcher):
    """Ends what is left of a job."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    for file in folder.glob("*.*"):
        with contextlib.suppress(ValueError, FileNotFoundError, ProcessLookupError):
            pid = int(file.suffix[1:])
            if os.fsencode(folder) in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def history(folder):
    """What happened on the host that was there from the first step to the last: {"step", "rank", "size"} whenever training began anew."""
    (file,) = folder.glob("localhost.*")
    return [json.loads(line) for line in file.read_text().splitlines()]


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
    """The model at step `last`. A rank that dies takes with it what it has not sent; before others leave or join, all have the mean."""
    model, compressor = model_of(spec), get_compressor(spec)
    optimizer = optimizer_of(spec, model, momentum=0.0 if compressor.corrects_momentum else 0.9)
    exchanges = ranks_of(compressor.bound(0.9, False) if compressor.corrects_momentum else compressor, model, [None, None])
    for now, then in zip(history, [*history[1:], {"step": STEPS}]):
        for step in range(now["step"], min(then["step"], last)):
            train_step(model, optimizer, exchanges, step)
        if then["step"] >= last:
            break
        states = [exchange.state_dict() for exchange in exchanges]
        states = [states[now["rank"]]] if then is history[1] else [mean_of(states)] * then["size"]
        exchanges = ranks_of(exchanges[0].compressor, model, states)
    return model


def ranks_of(compressor, model, states):
    tensors = {name: (tuple(param.shape), compressor) for name, param in model.named_parameters()}
    exchanges = [Exchange(compressor, transport, tensors, dense_alone=True) for transport in Loopback.group(len(states))]
    for rank, (exchange, state) in enumerate(zip(exchanges, states)):
        if state:
            exchange.load_state_dict({**state, "rank": rank, "size": len(states)})
    return exchanges


def mean_of(states):
    tensors = {
        name: {key: np.mean([state["tensors"][name][key] for state in states], axis=0) for key in arrays}
        for name, arrays in states[0]["tensors"].items()
    }
    return {**states[0], "tensors": tensors}


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
