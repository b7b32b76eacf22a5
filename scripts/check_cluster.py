"""Run this first on a cluster: are all ranks installed alike, does every algorithm work on this network, and which would pay?

    mpirun -np 4 -H host1:2,host2:2 python scripts/check_cluster.py
    horovodrun -np 4 -H host1:2,host2:2 python scripts/check_cluster.py

Checks versions on all ranks; runs every algorithm on both transports (MPI's where Horovod runs on MPI) and compares with what N ranks in
one process give; measures latency and bandwidth, and says from these and from this machine's encoding speed what a step of a model of
--million parameters would wait. Ends with 1 where something failed.
"""
import argparse
import math
import platform
import socket
import statistics
import sys
import time

import horovod.torch as hvd
import numpy as np
import torch

import horovod_compress as hc
import horovod_compress.torch as hvdc
from horovod_compress import bench, kernels

STEPS = 2
SHAPES = {"matrix": (64, 80), "kernel": (16, 8, 3, 3), "bias": (64,)}
PIECE = 2**21  # elements on which encoding and decoding are timed


def gathered(value):
    return hvd.allgather_object(value, name="check")


def versions():
    """Prints what is installed where; whether it is the same everywhere."""
    found = {
        "python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
        "horovod_compress": hc.__version__, "kernels": kernels.backend,
    }
    everywhere = gathered((socket.gethostname(), found))
    hosts = [host for host, _ in everywhere]
    say(f"{hvd.size()} ranks on {', '.join(f'{host} ({hosts.count(host)})' for host in dict.fromkeys(hosts))}; Horovod on {runs_on()}")
    for what, here in everywhere[0][1].items():
        others = {host: theirs[what] for host, theirs in everywhere if theirs[what] != here}
        say(f"  {what} {here}" + "".join(f"; DIFFERENT on {host}: {theirs}" for host, theirs in others.items()))
    return all(theirs == everywhere[0][1] for _, theirs in everywhere)


def runs_on():
    return "MPI" if hvd.mpi_enabled() else "Gloo"


def told(rank, step):
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def works(id, transport):
    """None, or the text of this rank's first error, where this algorithm does not give what `simulate` gives. All steps are taken even
    then, so that the ranks stay together."""
    wrong = None
    try:
        expected = hc.simulate(id, [[told(rank, step) for rank in range(hvd.size())] for step in range(STEPS)])
        params = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        optimizer = torch.optim.Adam(params.values())
        asked = {"transport": transport, "momentum": 0.9}  # without an SGD there is none to take over
        spec = {"id": id, **{key: value for key, value in asked.items() if key in hc.available()[id]["options"]}}
        compression = hvdc.Compression.from_spec(spec, optimizer, params.items())
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=params.items(), compression=compression)
        for step in range(STEPS):
            mine = told(hvd.rank(), step)
            optimizer.zero_grad()
            sum((param * torch.from_numpy(mine[name])).sum() for name, param in params.items()).backward()
            optimizer.synchronize()
            for name, param in params.items():
                mean = expected.mean[step][name]
                error = np.abs(param.grad.numpy() - mean).max()
                if not error <= (2e-3 if id == "fp16" else 1e-5) * hvd.size() * np.abs(mean).max():
                    wrong = wrong or f"{name} is wrong by {error:.2g} in step {step}"
            with optimizer.skip_synchronize():
                optimizer.step()
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
    return wrong


def timed(function, times):
    """Median seconds of the slowest rank."""
    seconds = []
    for _ in range(times):
        hvd.barrier()
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(hvd.allreduce(torch.tensor(seconds), op=hvd.Max, name="seconds").tolist())


def network():
    """(seconds of a small allreduce, bytes per second that a rank sends in a large one)."""
    small, large = torch.ones(1), torch.ones(2**22)
    latency = timed(lambda: hvd.allreduce_(small, name="small"), 20)
    seconds = timed(lambda: hvd.allreduce_(large, name="large"), 3)
    return latency, 4 * large.numel() * 2 * (hvd.size() - 1) / hvd.size() / max(seconds - latency, 1e-9)


def costs(id, numel):
    """(bytes a step, seconds of encoding and decoding) of a model with `numel` parameters, from those of a piece of it."""
    shape = (PIECE // 1024, 1024)
    gradients = bench.random_gradients({"piece": shape}, seed=0)
    found = bench.measure(hc.get_compressor(id), gradients, hvd.size(), steps=3)
    scale = numel / PIECE
    return scale * found["bytes_per_step"], scale * (found["encode_seconds"] + found["decode_seconds"])


def advise(numel):
    latency, rate = network()
    say(f"\nan allreduce of 4 bytes takes {1e3 * latency:.2f} ms; a rank sends {8e-6 * rate:.0f} Mbit/s in large ones")
    say(f"what a step of a model with {numel / 1e6:g} million parameters would wait, computed, behind a backward that hides nothing (on")
    say("random gradients, on which adacomp, variance and strom send more than in training):\n")
    ranks, rows = hvd.size(), []
    for id, about in hc.available().items():
        sent, work = costs(id, numel)
        around = 2 * (ranks - 1) / ranks  # what a ring allreduce moves
        moved = min(sent * (ranks - 1), 4 * numel * around) if about["collective"] == "allgather" else sent * around
        rows.append((work + moved / rate + 3 * latency, id, sent, work))
    for wait, id, sent, work in sorted(rows):
        say(f"  {id:12} {1e3 * wait:9.1f} ms, of which {1e3 * work:7.1f} ms are work; {sent / 1e6:8.2f} MB sent")
    best = min(rows)[1]
    say(f"\n{best} waits least. What it costs in accuracy is another matter: docs/algorithms.md" if best != "none" else "\nno compression pays here")


def say(text):
    if hvd.rank() == 0:
        print(text, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=25.6, help="parameters of the model, in millions (default: 25.6, ResNet-50)")
    options = parser.parse_args()
    if not (math.isfinite(options.million) and options.million > 0):
        parser.error("--million: must be above 0")
    hvd.init()
    torch.set_num_threads(1)
    good = versions()
    for transport in ("horovod", "mpi") if hvd.mpi_enabled() else ("horovod",):
        errors = {id: [error for error in gathered(works(id, transport)) if error] for id in hc.available()}
        failed = {id: its for id, its in errors.items() if its}
        say(f"transport {transport}: {len(errors) - len(failed)} of {len(errors)} algorithms work")
        for id, its in failed.items():
            say(f"  {id} FAILED on {len(its)} ranks: {its[0]}")
        good &= not failed
    if hvd.size() > 1:
        advise(1e6 * options.million)
    say("\nall is well" if good else "\nsomething is wrong: see above")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
