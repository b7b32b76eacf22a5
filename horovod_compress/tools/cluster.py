"""The checks that all ranks of a job make together: their installations, every algorithm, and the
network's figures."""

import dataclasses
import platform
import socket
import statistics
import time
import warnings
from abc import ABC, abstractmethod
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch

from .. import __version__, available, kernels, simulate
from ..protocol.handshake import gather
from ..transport.base import Transport
from . import loads, prediction
from .cost import COLLECTIVES, Load, Network
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

Say = Callable[[str], Any]
Named = Dict[str, np.ndarray]
Parameters = Dict[str, torch.nn.Parameter]


class Ranks(ABC):
    """The ranks of a job, as the checks need them.

    Args:
        transport: between them.

    Attributes:
        rank, size: this rank, and the number of ranks.
        local_size: how many are on each machine, or 1 where machines have different numbers.
        launcher: what moves their messages.
        installed: {what: version} that must be the same everywhere.
        transports: ways in which compressions exchange, by the option `transport`.
    """

    local_size: int
    launcher: str
    installed: Dict[str, str]
    transports: List[str]

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank, self.size = transport.rank, transport.size

    def gathered(self, value: Any) -> List[Any]:
        """A value of each rank, JSON-able, in rank order."""
        return gather(self._transport, "check", value)

    def slowest(self, seconds: Sequence[float]) -> List[float]:
        """The largest of all ranks, of each."""
        return self._transport.allreduce("check.seconds", np.array(seconds), "max")().tolist()

    @abstractmethod
    def barrier(self) -> None:
        """Waits for all ranks."""

    @abstractmethod
    def start(self, verb: str, tensor: torch.Tensor, name: str) -> Callable[[], Any]:
        """Starts an allreduce, allgather or alltoall. Returns a function that waits for it."""

    @abstractmethod
    def training(
        self, params: Parameters, optimizer: torch.optim.Optimizer, spec: Any = None
    ) -> Tuple[Callable[[], Iterable[torch.Tensor]], Any]:
        """Has the gradients of parameters reduced.

        Args:
            params: by name, which has no dot.
            optimizer: theirs.
            spec: of a compression; None: none.

        Returns:
            (a function that returns the parameters of a forward pass, the optimizer that steps
            them).
        """

    def leave(self) -> None:
        """Ends this rank's part."""


def run(
    ranks: Ranks,
    compressors: Dict[str, Any],
    model: loads.Model,
    backward: float,
    say: Say,
    place: Place = HERE,
) -> Dict[str, Any]:
    """Checks a cluster. All ranks call it.

    Args:
        ranks: those of the job.
        compressors: by spec. Steps of the model are predicted with each.
        model: the model of the prediction.
        backward: seconds of its backward pass.
        say: prints a line, on the first rank.
        place: where steps of the model are measured.

    Returns:
        A JSON-able dict, the same on all ranks: "good", "installed", "algorithms"; and with several
        ranks what `prediction.predict` returns.
    """
    torch.set_num_threads(1)
    if ranks.rank:
        # The others say nothing.
        say = str
    installed = _compare_installations(ranks, say)
    algorithms = _try_algorithms(ranks, say)
    found = {
        "good": installed["good"] and algorithms["good"],
        "installed": installed,
        "algorithms": algorithms,
    }
    if ranks.size == 1:
        say(
            "one rank: nothing was exchanged, and there is no network to measure. On a cluster, "
            "put before it: horovodrun -np 4 -H host1:2,host2:2"
        )
        return found
    say("measuring what collectives take")
    network = _measure_network(ranks)
    rate = 8e-6 / network.seconds_per_byte["allreduce float32"]
    say(
        f"an allreduce of 4 bytes takes {1e3 * network.latency:.2f} ms; a rank sends {rate:.0f} "
        f"Mbit/s in large ones\n"
    )
    return {
        **found,
        **prediction.predict(
            model,
            _measure_loads(ranks, compressors, model, say, place),
            network.faster,
            backward,
        ),
    }


def _compare_installations(ranks: Ranks, say: Say) -> Dict[str, Any]:
    """Says what is installed where. Returns {"good": whether it is alike, "launcher", "ranks":
    [{"host", "python", …} of each]}."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "horovod_compress": __version__,
        "kernels": kernels.backend,
        **ranks.installed,
    }
    everywhere = ranks.gathered({"host": socket.gethostname(), **found})
    hosts = [theirs["host"] for theirs in everywhere]
    say(
        f"ranks: {', '.join(f'{hosts.count(host)} on {host}' for host in dict.fromkeys(hosts))}; "
        f"{ranks.launcher}"
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
    return {"good": good, "launcher": ranks.launcher, "ranks": everywhere}


def _try_algorithms(ranks: Ranks, say: Say) -> Dict[str, Any]:
    """Runs every algorithm on each transport that there is, and says which fail. Returns {"good",
    transport: {id: None or its first error}}."""
    found: Dict[str, Any] = {"good": True}
    for transport in ranks.transports:
        say(f"transport {transport}: trying every algorithm")
        errors = {
            id: [error for error in ranks.gathered(_error_of(ranks, id, transport)) if error]
            for id in available()
        }
        failed = {id: its for id, its in errors.items() if its}
        say(f"transport {transport}: {len(errors) - len(failed)} of {len(errors)} algorithms work")
        for id, its in failed.items():
            say(f"  {id} FAILED on {len(its)} ranks: {its[0]}")
        found["good"] &= not failed
        found[transport] = {id: its[0] if its else None for id, its in errors.items()}
    return found


def _measure_network(ranks: Ranks) -> Network:
    """Latency and rates of collectives; the slowest rank's, so that all ranks find the
    same."""
    size, one = ranks.size, torch.zeros(1, dtype=torch.float32, device="cpu")
    latency = _seconds(
        ranks, lambda: ranks.start("allreduce", one, "check.one")(), times=2 * _TIMES
    )
    network = Network(
        size,
        latency,
        max(_step_seconds(ranks, True) - _step_seconds(ranks, False) - latency, 0.0) / _OPERATIONS,
        {},
    )
    rates = {}
    for kind in COLLECTIVES:
        spent: Dict[int, float] = {}
        # Of what a rank has afterwards, of which it hands in one.
        shares = size if kind.startswith("allgather") else 1
        for nbytes in _SIZES:
            spent[nbytes] = _collective_seconds(ranks, kind, nbytes // shares)
            if spent[nbytes] - spent[_SIZES[0]] > _ENOUGH:
                break
        crossed = network.crossing(kind) * (nbytes - _SIZES[0]) / shares
        rates[kind] = max(spent[nbytes] - spent[_SIZES[0]], 1e-9) / crossed
    return dataclasses.replace(network, seconds_per_byte=rates)


def _measure_loads(
    ranks: Ranks, compressors: Dict[str, Any], model: loads.Model, say: Say, place: Place
) -> Dict[str, Load]:
    """The load of a step with each of {spec: compressor}, encoded and decoded on all ranks at once,
    as in training; the slowest rank's."""
    gradients, found = model.gradients(), {}
    for spec, compressor in compressors.items():
        say(f"measuring {spec}")
        (load,) = loads.measured(
            compressor, model, gradients, [ranks.size], ranks.local_size, place
        )
        encode, decode = ranks.slowest([load.encode, load.decode])
        found[spec] = dataclasses.replace(load, encode=encode, decode=decode)
    return found


def _gradients_of(rank: int, step: int) -> Dict[str, np.ndarray]:
    rng = np.random.default_rng([rank, step])
    return {name: rng.standard_normal(shape, np.float32) for name, shape in _SHAPES.items()}


def _error_of(ranks: Ranks, id: str, transport: str) -> Optional[str]:
    """The text of this rank's first error, where this algorithm does not give what `simulate`
    gives, or on one rank, where nothing is exchanged, the gradient. All steps are taken even then,
    so that the ranks stay together."""
    wrong = None
    try:
        steps = [
            [_gradients_of(rank, step) for rank in range(ranks.size)] for step in range(_STEPS)
        ]
        simulated = simulate(id, steps).mean
        expected = simulated if ranks.size > 1 else [step[0] for step in steps]
        # Without an SGD there is none to take over.
        asked = {"transport": transport, "momentum": 0.9}
        spec = {
            "id": id,
            **{key: value for key, value in asked.items() if key in available()[id]["options"]},
        }
        results = _exchanged(ranks, spec, [step[ranks.rank] for step in steps])
        for step, found in enumerate(results):
            for name, result in found.items():
                mean = expected[step][name]
                error = np.abs(result - mean).max()
                limit = (2e-3 if id == "fp16" else 1e-5) * ranks.size * np.abs(mean).max()
                if not error <= limit:
                    wrong = wrong or f"{name} is wrong by {error:.2g} in step {step}"
    except Exception as error:
        # Whatever it is, the other algorithms are to be tried, too.
        wrong = f"{type(error).__name__}: {error}"
    return wrong


def _exchanged(ranks: Ranks, spec: Any, steps: Sequence[Named]) -> Iterator[Named]:
    """Yields the results of a compression for this rank's gradients of each step."""
    params = {name: _parameter(grad.shape) for name, grad in steps[0].items()}
    with warnings.catch_warnings():
        # Nobody trains so.
        warnings.simplefilter("ignore", RuntimeWarning)
        forward, optimizer = ranks.training(params, torch.optim.ASGD(params.values()), spec)
    for step in steps:
        optimizer.zero_grad()
        used = zip(forward(), step.values())
        torch.stack(
            [(param * torch.from_numpy(grad)).sum() for param, grad in used]
        ).sum().backward()
        optimizer.step()
        yield {name: param.grad.numpy() for name, param in params.items() if param.grad is not None}


def _seconds(
    ranks: Ranks,
    function: Callable[[], Any],
    before: Callable[[], Any] = lambda: None,
    times: int = _TIMES,
) -> float:
    """Median seconds of the slowest rank, after a first time that makes buffers. before: what comes
    before each, not timed."""
    seconds = []
    for _ in range(1 + times):
        before()
        ranks.barrier()
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(ranks.slowest(seconds[1:]))


def _parameter(shape: Tuple[int, ...]) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu"))


def _step_seconds(ranks: Ranks, exchanged: bool) -> float:
    """That of backward and step of many parameters of one element, exchanged or not."""
    params = {str(i): _parameter((1,)) for i in range(_OPERATIONS)}
    alone = params.values, torch.optim.SGD(params.values(), lr=0.0)
    forward, optimizer = ranks.training(params, alone[1]) if exchanged else alone

    def step() -> None:
        torch.cat(list(forward())).sum().backward()
        optimizer.step()

    return _seconds(ranks, step, optimizer.zero_grad)


def _collective_seconds(ranks: Ranks, kind: str, nbytes: int) -> float:
    """Of a collective to which each rank hands `nbytes`, in several tensors where those
    are fused, as a step's are."""
    verb, dtype = kind.split()
    count = 1 if verb == "alltoall" else _FUSED
    length = max(nbytes // count // np.dtype(dtype).itemsize // ranks.size, 1) * ranks.size
    # Zeros of float16 are added faster than others.
    numbers = np.random.default_rng(0).standard_normal(length)
    values = torch.from_numpy(numbers.astype(dtype))
    tensors = [values.clone() for _ in range(count)]

    def exchange() -> None:
        waits = [
            ranks.start(verb, tensor, f"check.{kind}.{nbytes}.{i}")
            for i, tensor in enumerate(tensors)
        ]
        for wait in waits:
            wait()

    return _seconds(ranks, exchange, lambda: [tensor.copy_(values) for tensor in tensors])
