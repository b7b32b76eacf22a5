"""Measures compressions on one rank. Steps through the exchange alternate with merely reading and
writing the same memory."""

import math
import re
import statistics
import time
import zipfile
from typing import Any, Callable, Counter, Dict, List, Sequence, Tuple

import numpy as np

from . import kernels
from .compressors.base import Compressor, Step, zeros
from .exchange import Exchange
from .hosts import Host
from .lockstep import Named
from .transport.base import Transport

# Steps that touch new memory, not measured.
WARMUP = 3
# Bytes of random gradients, but at least two steps.
_PREPARED = 1e9


class Echo(Transport):
    """`size` ranks that all send the same as this one. seconds is the time spent on copies, which
    is no part of a compression; sent counts bytes by collective, as "allreduce float32";
    operations, how many were started."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size, self.seconds = size, 0.0
        self.sent: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def count(self, verb: str, array: np.ndarray) -> None:
        self.sent[f"{verb} {array.dtype}"] += array.nbytes
        self.operations[f"{verb} {array.dtype}"] += 1

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        self.count("allgather", payload)
        return lambda: self._timed(np.tile, payload, self.size)

    def allreduce(self, name: str, array: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        self.count("allreduce", array)
        return lambda: self._timed(np.multiply, array, self.size if op == "sum" else 1, out=array)

    def alltoall(
        self, name: str, payload: np.ndarray, splits: Sequence[int]
    ) -> Callable[[], List[np.ndarray]]:
        self.count("alltoall", payload)
        return lambda: self._timed(lambda: [payload[: splits[0]].copy() for _ in range(self.size)])

    def _timed(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments, **options)
        self.seconds += time.perf_counter() - started
        return result


def random_gradients(shapes: Dict[str, Tuple[int, ...]], seed: int) -> List[Named]:
    """Gradients {name: array} of a few steps: normal numbers, whose scale is log-normal by row and
    the same in all steps."""
    rng = np.random.default_rng(seed)
    scales = {n: 1e-3 * rng.lognormal(size=s[:1] + (1,) * (len(s) - 1)) for n, s in shapes.items()}
    count = int(_PREPARED / (4 * sum(map(math.prod, shapes.values()))))
    steps = [
        {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}
        for _ in range(min(max(count, 2), 4))
    ]
    for named in steps:
        for name, array in named.items():
            array *= scales[name].astype(np.float32)
    return steps


def load_gradients(path: str) -> List[Named]:
    """Gradients {name: array} of the steps in an .npz file: one entry for each tensor, or with
    several steps, entries `step/name`. Raises ValueError, naming the entry, for arrays that cannot
    be gradients."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not there, or not an .npz file")
    steps: Dict[int, Named] = {}
    try:
        opened = np.load(path)
    # Whatever zip and NumPy make of a damaged file.
    except Exception as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    with opened as file:
        for entry in file.files:
            array = _read(file, entry, path)
            match, first_match = (
                re.fullmatch(r"(\d+)/(.+)", name) for name in (entry, file.files[0])
            )
            if bool(match) != bool(first_match):
                raise ValueError(
                    f"{path}: {entry}: either all entries are named step/name, or none is"
                )
            step, name = (int(match[1]), match[2]) if match else (0, entry)
            steps.setdefault(step, {})[name] = array
    if not steps:
        raise ValueError(f"{path} holds no gradients")
    first = min(steps)
    shapes = {name: array.shape for name, array in steps[first].items()}
    for step, named in steps.items():
        for name in [*shapes, *named]:
            if name not in shapes or name not in named or named[name].shape != shapes[name]:
                raise ValueError(
                    f"{path}: {step}/{name}: every step needs the names and shapes of step {first}"
                )
    return [{name: steps[step][name] for name in shapes} for step in sorted(steps)]


def _read(file: Any, entry: str, path: str) -> np.ndarray:
    try:
        array = np.asarray(file[entry])
    except Exception as error:
        # Whatever zip, zlib or NumPy make of a damaged entry.
        raise ValueError(f"{path}: {entry} cannot be read: {error}") from None
    if array.dtype.kind != "f" or not array.size:
        raise ValueError(
            f"{path}: {entry} must hold floats, not {array.dtype} of shape {array.shape}"
        )
    with np.errstate(over="ignore"):
        array = np.asarray(array, np.float32, order="C")
    if not np.isfinite(array).all():
        raise ValueError(f"{path}: {entry} holds numbers that are not finite in float32")
    return array


def measure(
    compressor: Compressor,
    gradients: Sequence[Named],
    ranks: int,
    steps: int,
    progress: Callable[[], Any] = lambda: None,
    local_size: int = 1,
) -> Dict[str, Any]:
    """Measures a compression on each of `ranks` ranks. Steps cycle through gradients[step] = {name:
    array}. local_size: how many ranks a host has, for `hosts=true`, where parts but this rank's
    stay zero, so that the error says nothing. Returns a dict: collective; ratio and bytes_per_step
    of the measured steps; exchanged, those bytes by collective, as {"allreduce float32": …}, and
    operations, how many of these a step starts; medians encode_seconds, decode_seconds (of all
    ranks' payloads) and streaming_seconds (to read and write gradient, state and one payload once);
    gradient_bytes_per_second; times_streaming, of an encode and the decode of one payload; error;
    residual, whether there is one. ValueError for what cannot be measured on one rank."""
    _refuse_split(compressor, ranks)
    echo = Echo(ranks)
    tensors = {name: (array.shape, compressor) for name, array in gradients[0].items()}
    exchange = Exchange(compressor, echo, tensors, host=Host.alone(ranks, local_size))
    grads = {n: zeros(a.size) for n, a in gradients[0].items()}
    seconds = []
    for step in range(WARMUP + steps):
        given = gradients[step % len(gradients)]
        if step == WARMUP - 1:
            earlier = exchange.stats()
        if step == WARMUP:
            before = exchange.stats()
            state = [array for arrays in exchange.arrays().values() for array in arrays.values()]
            payload = zeros(int(before["bytes_sent"] - earlier["bytes_sent"]) // 4)
            streams = [*grads.values(), *state, payload]
            echo.sent.clear()
            echo.operations.clear()
        encode, decode = _time_step(exchange, echo, grads, given)
        # No residual and no momentum yet, so the result can be compared with the gradient.
        if step == 0:
            error = _relative_error(grads, given)
        if step >= WARMUP:
            seconds.append((encode, decode, _time_streaming(streams)))
        progress()
    after = exchange.stats()
    encode, decode, streaming = map(statistics.median, zip(*seconds))
    decoded_payloads = ranks if compressor.collective == "allgather" else 1
    sent = after["bytes_sent"] - before["bytes_sent"]
    dense = after["dense_bytes"] - before["dense_bytes"]
    return {
        "collective": compressor.collective,
        "ratio": dense / sent,
        "bytes_per_step": sent / steps,
        "exchanged": {kind: nbytes / steps for kind, nbytes in echo.sent.items()},
        "operations": {kind: count / steps for kind, count in echo.operations.items()},
        "encode_seconds": encode,
        "decode_seconds": decode,
        "streaming_seconds": streaming,
        "gradient_bytes_per_second": dense / steps / (encode + decode),
        "times_streaming": (encode + decode / decoded_payloads) / streaming,
        "error": error,
        "residual": after["residual_norm"] > 0,
    }


def _refuse_split(compressor: Compressor, ranks: int) -> None:
    if compressor.split(1, Step(0, 0, ranks)) is not None:
        raise ValueError(
            f"{compressor.id}: exchange=split is work of all ranks, and this measures one: measure "
            f"exchange=gather, compare both with `hvdcompress "
            "plan`, or both on real ranks with benchmarks/step_time.py"
        )


def _time_step(exchange: Exchange, echo: Echo, grads: Named, given: Named) -> Tuple[float, float]:
    """Runs one step on copies of the given gradients, made in the memory of `grads`. Returns the
    seconds of encoding and of decoding."""
    carriers, encode, echoed = {}, 0.0, echo.seconds
    for name, grad in grads.items():
        # Just written, as backward hands it over.
        np.copyto(grad, given[name].reshape(-1))
        started = time.perf_counter()
        carriers[name] = exchange.submit(name, grad)
        encode += time.perf_counter() - started
        echo.count("allreduce", carriers[name])  # by the host
    started = time.perf_counter()
    exchange.flush()
    between, encoded = echo.seconds, time.perf_counter()
    encode += encoded - started - (between - echoed)
    for name, carrier in carriers.items():
        exchange.finish(name, carrier)
    exchange.end_step()
    decoded = time.perf_counter()
    return encode, decoded - encoded - (echo.seconds - between)


def _time_streaming(streams: Sequence[np.ndarray]) -> float:
    """Reads and writes arrays once, which changes nothing in them. Returns the seconds."""
    started = time.perf_counter()
    for stream in streams:
        np.add(stream, stream.dtype.type(-0.0), out=stream)
    return time.perf_counter() - started


def _relative_error(results: Named, given: Named) -> float:
    """‖result − gradient‖ / ‖gradient‖; the results are not needed afterwards."""
    whole = sum(kernels.of(array).squared_norm(array.reshape(-1)) for array in given.values())
    for name, result in results.items():
        result -= given[name].reshape(-1)
    missing = sum(kernels.of(result).squared_norm(result) for result in results.values())
    return math.sqrt(missing / whole) if whole else 0.0
