"""The checks that all ranks of a job make together: their installations, every algorithm, and the
network's figures."""

import dataclasses
import functools
import platform
import socket
import statistics
import time
import warnings
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

import numpy as np
import torch

from .. import __version__, available, kernels, simulate
from ..engine.lockstep import Named
from . import loads, prediction
from .cost import COLLECTIVES, Load, Network
from .job import Job
from .place import HERE, Place

_STEPS = 2
_SHAPES = {"matrix": (64, 80), "kernel": (16, 8, 3, 3), "bias": (64,)}
# Bytes of the collectives that are timed.
_SIZES = (2**12, 2**18, 2**22, 2**24)
# Seconds by which one takes longer than the smallest: none of a larger size is needed.
_ENOUGH = 0.1
_TIMES = 5  # of each
_FUSED = 16  # tensors in each
# Of the step that tells what each costs.
_OPERATIONS = 100


class _Parameters(torch.nn.Module):
    """Parameters of {name: shape}, whose gradients are those of what is done with `forward`'s."""

    def __init__(self, shapes: Dict[str, Tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            zeros = torch.zeros(shape, dtype=torch.float32, device="cpu")
            self.register_parameter(name, torch.nn.Parameter(zeros))

    def forward(self) -> torch.Tensor:
        """All of them, one after the other."""
        return torch.cat([param.view(-1) for param in self.parameters()])


def run(
    job: Job,
    compressors: Dict[str, Any],
    model: loads.Model,
    backward: float,
    place: Place = HERE,
) -> Dict[str, Any]:
    """Checks a cluster. All ranks call it.

    Args:
        job: its ranks.
        compressors: by spec. Steps of the model are predicted with each.
        model: the model of the prediction.
        backward: seconds of its backward pass.
        place: where steps of the model are measured.

    Returns:
        A JSON-able dict, the same on all ranks: "good", "installed", "algorithms"; and with several
        ranks what `prediction.predict` returns.
    """
    torch.set_num_threads(1)
    installed = _compare_installations(job)
    algorithms = _try_algorithms(job)
    found = {
        "good": installed["good"] and algorithms["good"],
        "installed": installed,
        "algorithms": algorithms,
    }
    if job.transport.size == 1:
        job.say(
            "one rank: nothing was exchanged, and there is no network to measure. On a cluster, "
            "put before it: horovodrun -np 4 -H host1:2,host2:2"
        )
        return found
    job.say("measuring what collectives take")
    network = _measure_network(job)
    rate = 8e-6 / network.seconds_per_byte["allreduce float32"]
    job.say(
        f"an allreduce of 4 bytes takes {1e3 * network.latency:.2f} ms; a rank sends {rate:.0f} "
        f"Mbit/s in large ones\n"
    )
    measured = _measure_loads(job, compressors, model, place)
    return {**found, **prediction.predict(model, measured, network.faster, backward)}


def _compare_installations(job: Job) -> Dict[str, Any]:
    """Says what is installed where. Returns {"good": whether it is alike, "launcher", "ranks":
    [{"host", "python", …} of each]}."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "horovod_compress": __version__,
        "kernels": kernels.backend,
        **job.installed,
    }
    everywhere = job.ranks.gathered("installed", {"host": socket.gethostname(), **found})
    hosts = [theirs["host"] for theirs in everywhere]
    job.say(
        f"ranks: {', '.join(f'{hosts.count(host)} on {host}' for host in dict.fromkeys(hosts))}; "
        f"{job.launcher}"
    )
    good = True
    for what in found:
        first = everywhere[0][what]
        others = {theirs["host"]: theirs[what] for theirs in everywhere if theirs[what] != first}
        job.say(
            f"  {what} {first}"
            + "".join(f"; DIFFERENT on {host}: {theirs}" for host, theirs in others.items())
        )
        good &= not others
    return {"good": good, "launcher": job.launcher, "ranks": everywhere}


def _try_algorithms(job: Job) -> Dict[str, Any]:
    """Runs every algorithm on each transport that there is, and says which fail. Returns {"good",
    transport: {id: None or its first error}}."""
    found: Dict[str, Any] = {"good": True}
    for transport in job.transports:
        job.say(f"transport {transport}: trying every algorithm")
        errors = {
            id: [
                error
                for error in job.ranks.gathered("error", _error_of(job, id, transport))
                if error
            ]
            for id in available()
        }
        failed = {id: its for id, its in errors.items() if its}
        job.say(
            f"transport {transport}: {len(errors) - len(failed)} of {len(errors)} algorithms work"
        )
        for id, its in failed.items():
            job.say(f"  {id} FAILED on {len(its)} ranks: {its[0]}")
        found["good"] &= not failed
        found[transport] = {id: its[0] if its else None for id, its in errors.items()}
    return found


def _error_of(job: Job, id: str, transport: str) -> Optional[str]:
    """The text of this rank's first error, where this algorithm does not give what `simulate`
    gives, or on one rank, where nothing is exchanged, the gradient. All steps are taken even then,
    so that the ranks stay together."""
    rank, size, wrong = job.transport.rank, job.transport.size, None
    try:
        steps = [[_gradients_of(each, step) for each in range(size)] for step in range(_STEPS)]
        simulated = simulate(id, steps).mean
        expected = simulated if size > 1 else [step[0] for step in steps]
        # Without an SGD there is no momentum to take over.
        asked = {"momentum": 0.9, **({"transport": "mpi"} if transport == "mpi" else {})}
        taken = asked.keys() & available()[id]["options"].keys()
        spec = {"id": id, **{key: asked[key] for key in taken}}
        results = _exchanged(job, spec, [step[rank] for step in steps])
        for step, found in enumerate(results):
            for name, result in found.items():
                mean = expected[step][name]
                error = np.abs(result - mean).max()
                limit = (2e-3 if id == "fp16" else 1e-5) * size * np.abs(mean).max()
                if not error <= limit:
                    wrong = wrong or f"{name} is wrong by {error:.2g} in step {step}"
    except Exception as error:
        # Whatever it is, the other algorithms are to be tried, too.
        wrong = f"{type(error).__name__}: {error}"
    return wrong


def _gradients_of(rank: int, step: int) -> Named:
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape, np.float32) for name, shape in _SHAPES.items()}


def _exchanged(job: Job, spec: Any, steps: Sequence[Named]) -> Iterator[Named]:
    """Yields the results of a compression for this rank's gradients of each step."""
    params = _Parameters(_SHAPES)
    with warnings.catch_warnings():
        # Nobody trains so.
        warnings.simplefilter("ignore", RuntimeWarning)
        model, optimizer = job.training(params, torch.optim.ASGD(params.parameters()), spec)
    for step in steps:
        optimizer.zero_grad()
        gradients = np.concatenate([grad.reshape(-1) for grad in step.values()])
        torch.dot(model(), torch.from_numpy(gradients)).backward()
        optimizer.step()
        grads = {name: param.grad for name, param in params.named_parameters()}
        yield {name: grad.numpy() for name, grad in grads.items() if grad is not None}


def _measure_network(job: Job) -> Network:
    """Latency and rates of collectives; the slowest rank's, so that all ranks find the
    same."""
    size, one = job.transport.size, np.zeros(1, np.float32)
    latency = _seconds(job, lambda: job.transport.allreduce("check.one", one)(), times=2 * _TIMES)
    together, alone = _step_seconds(job, True), _step_seconds(job, False)
    operation = max(together - alone - latency, 0.0) / _OPERATIONS
    network, rates = Network(size, latency, operation, {}), {}
    for kind in COLLECTIVES:
        # Of what a rank has afterwards, of which it hands in one.
        shares = size if kind.startswith("allgather") else 1
        least = _collective_seconds(job, kind, _SIZES[0] // shares)
        for nbytes in _SIZES[1:]:
            more = _collective_seconds(job, kind, nbytes // shares) - least
            if more > _ENOUGH:
                break
        crossed = network.crossing(kind) * (nbytes - _SIZES[0]) / shares
        rates[kind] = max(more, 1e-9) / crossed
    return dataclasses.replace(network, seconds_per_byte=rates)


def _step_seconds(job: Job, exchanged: bool) -> float:
    """That of backward and step of many parameters of one element, exchanged or not."""
    params = _Parameters({str(i): (1,) for i in range(_OPERATIONS)})
    model, optimizer = params, torch.optim.SGD(params.parameters(), lr=0.0)
    if exchanged:
        model, optimizer = job.training(params, optimizer, None)

    def step() -> None:
        model().sum().backward()
        optimizer.step()

    return _seconds(job, step, optimizer.zero_grad)


def _collective_seconds(job: Job, kind: str, nbytes: int) -> float:
    """Of a collective to which each rank hands `nbytes`, in several tensors where those
    are fused, as a step's are."""
    (verb, dtype), size = kind.split(), job.transport.size
    count = 1 if verb == "alltoall" else _FUSED
    length = max(nbytes // count // np.dtype(dtype).itemsize // size, 1) * size
    # Zeros of float16 are added faster than others.
    values = np.random.default_rng(0).standard_normal(length).astype(dtype)
    arrays = [values.copy() for _ in range(count)]
    start = {
        "allreduce": job.transport.allreduce,
        "allgather": job.transport.allgather,
        "alltoall": functools.partial(job.transport.alltoall, splits=[length // size] * size),
    }[verb]

    def exchange() -> None:
        waits = [start(f"check.{kind}.{nbytes}.{i}", each) for i, each in enumerate(arrays)]
        for wait in waits:
            wait()

    def renew() -> None:
        for each in arrays:
            each[:] = values

    return _seconds(job, exchange, renew)


def _seconds(
    job: Job,
    function: Callable[[], Any],
    before: Callable[[], Any] = lambda: None,
    times: int = _TIMES,
) -> float:
    """Median seconds of the slowest rank, after a first time that makes buffers. before: what comes
    before each, not timed."""
    seconds = []
    for _ in range(1 + times):
        before()
        # All ranks begin together.
        job.ranks.gathered("begin", None)
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(job.slowest(seconds[1:]))


def _measure_loads(
    job: Job, compressors: Dict[str, Any], model: loads.Model, place: Place
) -> Dict[str, Load]:
    """The load of a step with each of {spec: compressor}, encoded and decoded on all ranks at once,
    as in training; the slowest rank's."""
    gradients, found, placement = model.gradients(), {}, job.ranks.placement()
    local_size = placement.size if placement.even else 1
    for spec, compressor in compressors.items():
        job.say(f"measuring {spec}")
        (load,) = loads.measured(
            compressor, model, gradients, [job.transport.size], local_size, place
        )
        encode, decode = job.slowest([load.encode, load.decode])
        found[spec] = dataclasses.replace(load, encode=encode, decode=decode)
    return found
