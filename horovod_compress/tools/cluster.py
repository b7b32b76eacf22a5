"""The checks that all ranks of a job make together: their installations, every algorithm, and the
network's figures."""

import dataclasses
import functools
import importlib.util
import platform
import socket
import statistics
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import horovod
import horovod.torch as hvd
import numpy as np
import torch

from .. import __version__, available, kernels, simulate
from .. import torch as hvdc
from . import loads, prediction
from .cost import COLLECTIVES, Load, Network

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

Say = Callable[[str], Any]


def run(
    compressors: Dict[str, Any], model: loads.Model, backward: float, say: Say
) -> Dict[str, Any]:
    """Checks a cluster. All ranks call it.

    Args:
        compressors: by spec. Steps of the model are predicted with each.
        model: the model of the prediction.
        backward: seconds of its backward pass.
        say: prints a line, on the first rank.

    Returns:
        A JSON-able dict, the same on all ranks: "good", "installed", "algorithms"; and with several
        ranks what `prediction.predict` returns.
    """
    hvd.init()
    torch.set_num_threads(1)
    if not is_first():
        # The others say nothing.
        say = str
    installed = _compare_installations(say)
    algorithms = _try_algorithms(say)
    found = {
        "good": installed["good"] and algorithms["good"],
        "installed": installed,
        "algorithms": algorithms,
    }
    if hvd.size() == 1:
        say(
            "one rank: nothing was exchanged, and there is no network to measure. On a cluster, "
            "put before it: horovodrun -np 4 -H host1:2,host2:2"
        )
        return found
    network = _measure_network()
    rate = 8e-6 / network.seconds_per_byte["allreduce float32"]
    say(
        f"an allreduce of 4 bytes takes {1e3 * network.latency:.2f} ms; a rank sends {rate:.0f} "
        f"Mbit/s in large ones\n"
    )
    return {
        **found,
        **prediction.predict(model, _measure_loads(compressors, model), network.faster, backward),
    }


def is_first() -> bool:
    return hvd.rank() == 0


def _compare_installations(say: Say) -> Dict[str, Any]:
    """Says what is installed where. Returns {"good": whether it is alike, "launcher", "ranks":
    [{"host", "python", …} of each]}."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "horovod": horovod.__version__,
        "horovod_compress": __version__,
        "kernels": kernels.backend,
        "mpi4py": "installed" if importlib.util.find_spec("mpi4py") else "missing",
    }
    everywhere = _gathered({"host": socket.gethostname(), **found})
    hosts = [theirs["host"] for theirs in everywhere]
    launcher = "MPI" if hvd.mpi_enabled() else "Gloo"
    say(
        f"ranks: {', '.join(f'{hosts.count(host)} on {host}' for host in dict.fromkeys(hosts))}; "
        f"Horovod on {launcher}"
    )
    good = True
    for what in found:
        first = everywhere[0][what]
        others = {theirs["host"]: theirs[what] for theirs in everywhere if theirs[what] != first}
        say(
            f"  {what} {first}"
            + "".join(f"; DIFFERENT on {host}: {theirs}" for host, theirs in others.items())
        )
        good &= not others
    return {"good": good, "launcher": launcher, "ranks": everywhere}


def _try_algorithms(say: Say) -> Dict[str, Any]:
    """Runs every algorithm on each transport that there is, and says which fail. Returns {"good",
    transport: {id: None or its first error}}."""
    found: Dict[str, Any] = {"good": True}
    with_mpi = hvd.mpi_enabled() and all(_gathered(importlib.util.find_spec("mpi4py") is not None))
    for transport in ("horovod", "mpi") if with_mpi else ("horovod",):
        errors = {
            id: [error for error in _gathered(_error_of(id, transport)) if error]
            for id in available()
        }
        failed = {id: its for id, its in errors.items() if its}
        say(f"transport {transport}: {len(errors) - len(failed)} of {len(errors)} algorithms work")
        for id, its in failed.items():
            say(f"  {id} FAILED on {len(its)} ranks: {its[0]}")
        found["good"] &= not failed
        found[transport] = {id: its[0] if its else None for id, its in errors.items()}
    return found


def _measure_network() -> Network:
    """Latency and rates of Horovod's collectives; the slowest rank's, so that all ranks find the
    same."""
    size, one = hvd.size(), torch.zeros(1, dtype=torch.float32, device="cpu")
    latency = _seconds(lambda: hvd.allreduce_(one, name="check.one"), times=2 * _TIMES)
    network = Network(
        size,
        latency,
        max(_step_seconds(True) - _step_seconds(False) - latency, 0.0) / _OPERATIONS,
        {},
    )
    rates = {}
    for kind in COLLECTIVES:
        spent: Dict[int, float] = {}
        # Of what a rank has afterwards, of which it hands in one.
        shares = size if kind.startswith("allgather") else 1
        for nbytes in _SIZES:
            spent[nbytes] = _collective_seconds(kind, nbytes // shares)
            if spent[nbytes] - spent[_SIZES[0]] > _ENOUGH:
                break
        crossed = network.crossing(kind) * (nbytes - _SIZES[0]) / shares
        rates[kind] = max(spent[nbytes] - spent[_SIZES[0]], 1e-9) / crossed
    return dataclasses.replace(network, seconds_per_byte=rates)


def _measure_loads(compressors: Dict[str, Any], model: loads.Model) -> Dict[str, Load]:
    """What each of {spec: compressor} brings into a step, encoded and decoded on all ranks at once,
    as in training; the slowest rank's."""
    gradients, found = model.gradients(), {}
    local_size = hvd.local_size() if hvd.mpi_ops.is_homogeneous() else 1
    for spec, compressor in compressors.items():
        (load,) = loads.measured(compressor, model, gradients, [hvd.size()], local_size=local_size)
        encode, decode = _slowest([load.encode, load.decode], "check.work")
        found[spec] = dataclasses.replace(load, encode=encode, decode=decode)
    return found


def _gathered(value: Any) -> List[Any]:
    return hvd.allgather_object(value, name="check")


def _told(rank: int, step: int) -> Dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape, np.float32) for name, shape in _SHAPES.items()}


def _error_of(id: str, transport: str) -> Optional[str]:
    """The text of this rank's first error, where this algorithm does not give what `simulate`
    gives, or on one rank, where Horovod exchanges nothing, the gradient. All steps are taken even
    then, so that the ranks stay together."""
    wrong = None
    try:
        steps = [[_told(rank, step) for rank in range(hvd.size())] for step in range(_STEPS)]
        simulated = simulate(id, steps).mean
        expected = simulated if hvd.size() > 1 else [step[0] for step in steps]
        params: Dict[str, Any] = {name: _parameter(shape) for name, shape in _SHAPES.items()}
        optimizer = torch.optim.Adam(params.values())
        # Without an SGD there is none to take over.
        asked = {"transport": transport, "momentum": 0.9}
        spec = {
            "id": id,
            **{key: value for key, value in asked.items() if key in available()[id]["options"]},
        }
        compression = hvdc.Compression.from_spec(spec, optimizer, named_parameters=params.items())
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=params.items(), compression=compression
        )
        for step in range(_STEPS):
            optimizer.zero_grad()
            losses = [
                (params[name] * torch.from_numpy(told)).sum()
                for name, told in steps[step][hvd.rank()].items()
            ]
            torch.stack(losses).sum().backward()
            optimizer.synchronize()
            for name, param in params.items():
                mean = expected[step][name]
                error = np.abs(param.grad.numpy() - mean).max()
                if not error <= (2e-3 if id == "fp16" else 1e-5) * hvd.size() * np.abs(mean).max():
                    wrong = wrong or f"{name} is wrong by {error:.2g} in step {step}"
            with optimizer.skip_synchronize():
                optimizer.step()
    except Exception as error:
        # Whatever it is, the other algorithms are to be tried, too.
        wrong = f"{type(error).__name__}: {error}"
    return wrong


def _seconds(
    function: Callable[[], Any], before: Callable[[], Any] = lambda: None, times: int = _TIMES
) -> float:
    """Median seconds of the slowest rank, after a first time that makes buffers. before: what comes
    before each, not timed."""
    seconds = []
    for _ in range(1 + times):
        before()
        hvd.barrier()
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(_slowest(seconds[1:], "check.seconds"))


def _slowest(seconds: Sequence[float], name: str) -> List[float]:
    """The largest of all ranks, of each."""
    mine = torch.tensor(seconds, dtype=torch.float64, device="cpu")
    return hvd.allreduce(mine, op=hvd.Max, name=name).tolist()


def _parameter(shape: Tuple[int, ...]) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu"))


def _step_seconds(exchanged: bool) -> float:
    """That of backward and step of many parameters of one element, exchanged by Horovod or not."""
    params: List[torch.Tensor] = [_parameter((1,)) for _ in range(_OPERATIONS)]
    optimizer = torch.optim.SGD(params, lr=0.0)
    if exchanged:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=[(f"check.{i}", param) for i, param in enumerate(params)]
        )

    def step() -> None:
        torch.cat(params).sum().backward()
        optimizer.step()

    return _seconds(step, optimizer.zero_grad)


def _collective_seconds(kind: str, nbytes: int) -> float:
    """Of a collective to which each rank hands `nbytes`, in several tensors where Horovod fuses
    those, as it does a step's."""
    verb, dtype = kind.split()
    count = 1 if verb == "alltoall" else _FUSED
    length = max(nbytes // count // np.dtype(dtype).itemsize // hvd.size(), 1) * hvd.size()
    # Zeros of float16 are added faster than others.
    numbers = np.random.default_rng(0).standard_normal(length)
    values = torch.from_numpy(numbers.astype(dtype))
    tensors = [values.clone() for _ in range(count)]
    start = {
        "allreduce": functools.partial(hvd.allreduce_async_, op=hvd.Sum),
        "allgather": hvd.allgather_async,
        "alltoall": hvd.alltoall_async,
    }[verb]

    def exchange() -> None:
        for handle in [
            start(tensor, name=f"check.{kind}.{nbytes}.{i}") for i, tensor in enumerate(tensors)
        ]:
            hvd.synchronize(handle)

    return _seconds(exchange, lambda: [tensor.copy_(values) for tensor in tensors])
