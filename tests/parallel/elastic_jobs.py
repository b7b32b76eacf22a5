"""What tests of elastic jobs share: starting one, changing its hosts, its history, and that history
in one process."""

import contextlib
import faulthandler
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
from jobs import ENVIRONMENT, HERE, HOROVODRUN, LIMIT, PATIENT

from horovod_compress.compressors import get_compressor
from horovod_compress.engine.exchange import Exchange
from horovod_compress.transport.loopback import Loopback

# Ranks on each of three hosts; a rank that dies is on the second, which Horovod does not use again.
AT_FIRST = (1, 1, 0)
ON_ONE_MACHINE = ("localhost", "127.0.0.1", "127.1")  # their names


def run(folder, script, *arguments, names=ON_ONE_MACHINE, hosts=None):
    """Runs a job of `script FOLDER arguments…` to its end, here or on two hosts, of which names are
    those of three."""
    (folder / "names").write_text("\n".join(names))
    write_hosts(folder, AT_FIRST)
    discover = folder / "discover"
    discover.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    discover.chmod(0o755)
    launcher = (
        f"{HOROVODRUN} --gloo -np 2 --min-np 1 --max-np 4 --host-discovery-script {discover} "
        f"--network-interfaces"
    )
    command = [
        *launcher.split(),
        "lo" if hosts is None else "eth0",
        sys.executable,
        HERE / script,
        folder,
        *arguments,
    ]
    environment = ENVIRONMENT if hosts is None else {**hosts.environment, **PATIENT}
    with open(folder / "output", "w+") as output:
        command = command if hosts is None else hosts.command("a", command)
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status, stacks = process.wait(LIMIT), ""
        except subprocess.TimeoutExpired:
            status, stacks = f"did not end within {LIMIT} s", _stacks(folder)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _signal_ranks(folder, signal.SIGKILL)
        output.seek(0)
        assert status == 0, f"{status}\n{stacks}\nthe job printed:\n{output.read()[-5000:]}"


def _signal_ranks(folder, number):
    """Sends a signal to the ranks that are alive, and returns the files of their histories."""
    alive = []
    for file in folder.glob("*.*"):
        with contextlib.suppress(ValueError, FileNotFoundError, ProcessLookupError):
            pid = int(file.suffix[1:])
            if os.fsencode(folder) in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, number)
                alive.append(file)
    return alive


def _stacks(folder):
    """What the ranks that are alive are doing."""
    files = _signal_ranks(folder, signal.SIGUSR1)
    time.sleep(10)  # time to write it
    return "\n".join(
        f"{file.name}, at step {file.read_text().splitlines()[-1]}\n{_stacks_of(file).read_text()}"
        for file in files
    )


def _stacks_of(file):
    return file.with_name(f"{file.name}.stacks")


def names_of(folder):
    """The names of the three hosts."""
    return (folder / "names").read_text().split()


def write_hosts(folder, ranks):
    """From now on there are so many ranks on each host."""
    (folder / "hosts.new").write_text(
        "".join(f"{name}:{number}\n" for name, number in zip(names_of(folder), ranks) if number)
    )
    os.replace(folder / "hosts.new", folder / "hosts")


# -- in a rank


def tell(folder, hvd, step):
    """Writes down that training begins anew, from this step; what its threads are doing, too,
    whenever SIGUSR1 comes from now on."""
    file = folder / f"{os.environ['HOROVOD_HOSTNAME']}.{os.getpid()}"
    faulthandler.register(signal.SIGUSR1, file=_stacks_of(file).open("a"), all_threads=True)
    with file.open("a") as out:
        print(
            json.dumps(
                {
                    "step": step,
                    "rank": hvd.rank(),
                    "size": hvd.size(),
                    "machine": socket.gethostname(),
                }
            ),
            file=out,
        )


def wait_for_hosts(state, folder, hvd, ranks):
    """Has the job go on with so many ranks on each host, from here."""
    while sum(ranks) != hvd.size():
        if hvd.rank() == 0:
            write_hosts(folder, ranks)
        state.commit()
        time.sleep(0.05)


def on_the_host_that_dies(folder):
    return os.environ["HOROVOD_HOSTNAME"] == names_of(folder)[1]


# -- in one process


def history(folder):
    """What happened on the host that was there from the first step to the last: {"step", "rank",
    "size", …} whenever training began anew."""
    (began,) = histories(folder, names_of(folder)[0])
    return began


def histories(folder, name):
    """The history of each process on the host of this name."""
    return [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in folder.glob(f"{name}.*")
        if file.suffix[1:].isdigit()
    ]


def bound(spec):
    """The compressor of a spec, as it serves an SGD with a momentum of 0.9."""
    compressor = get_compressor(spec)
    return compressor.bound(0.9, False) if compressor.traits.corrects_momentum else compressor


def switch(exchanges, spec, shapes):
    """Has all ranks go on with another compressor, beside an SGD with a momentum of 0.9."""
    compressor = bound(spec)
    gain = (1 if compressor.traits.corrects_momentum else 10) / (
        1 if exchanges[0].tensors.compressor.traits.corrects_momentum else 10
    )
    for exchange in exchanges:
        exchange.switch(
            compressor,
            {name: (tuple(shape), compressor) for name, shape in shapes.items()},
            dict.fromkeys(shapes, gain),
        )


def replay(history, steps, compressor, shapes, train_step):
    """The first steps of it without Horovod: calls train_step(exchanges, step) for each. A rank
    that dies takes with it what it has not sent; before others leave or join, all have the mean."""
    history = [each for each in history if each["step"] < steps]
    exchanges = _ranks_of(compressor, shapes, [None, None])
    for now, then in zip(history, [*history[1:], {"step": steps}]):
        for step in range(now["step"], then["step"]):
            train_step(exchanges, step)
        if then["step"] < steps:
            states = [exchange.state_dict() for exchange in exchanges]
            states = (
                [states[now["rank"]]] if then is history[1] else [_mean_of(states)] * then["size"]
            )
            exchanges = _ranks_of(exchanges[0].tensors.compressor, shapes, states)


def _ranks_of(compressor, shapes, states):
    tensors = {name: (tuple(shape), compressor) for name, shape in shapes.items()}
    exchanges = [
        Exchange(compressor, transport, tensors, dense_alone=True)
        for transport in Loopback.group(len(states))
    ]
    for rank, (exchange, state) in enumerate(zip(exchanges, states)):
        if state:
            exchange.load_state_dict({**state, "rank": rank, "size": len(states)})
    return exchanges


def _mean_of(states):
    tensors = {
        name: {
            key: np.mean([state["tensors"][name][key] for state in states], axis=0)
            for key in arrays
        }
        for name, arrays in states[0]["tensors"].items()
    }
    return {**states[0], "tensors": tensors}
