"""hvdcompress bench: measures compressions on one rank. Steps through the exchange alternate with
reading and writing the same memory."""

import argparse
import math
import statistics
import time
from typing import Any, Callable, Counter, Dict, List, Sequence, Tuple

import numpy as np

from .. import available, kernels
from ..compressors import collective_of, for_gradients
from ..compressors.base import Compressor
from ..compressors.state import zeros
from ..engine.exchange import Exchange
from ..engine.lockstep import Named
from ..kernels import Encoded, new_body
from ..kernels.reference.frames import HEADER
from ..protocol import wire
from ..protocol.machine import Machine
from ..transport.base import Transport
from . import arguments
from .gradients import load_gradients, random_gradients
from .models import MODELS
from .place import HERE, Place, add_device
from .printing import Columns, console, digits, table, with_progress, write_json

# Steps that touch new memory, not measured.
WARMUP = 3

_EPILOG = """\
Save your own gradients with NumPy, one entry a tensor. Entries of several steps are named
step/name, in any order:

  entries = {
      f"{step}/{name}": array for step, named in enumerate(steps) for name, array in named.items()
  }
  numpy.savez("gradients.npz", **entries)

A single step's gradients are used in every step. Random gradients are normal, with a log-normal
scale by row; a few sets take turns.

To measure on one core: taskset -c 0 hvdcompress bench
"""

_COLUMNS: Columns = {
    "spec": lambda result: result["spec"],
    "collective": lambda result: result["collective"],
    "ratio": lambda result: digits(result["ratio"]),
    "kB/step": lambda result: digits(result["bytes_per_step"] / 1e3),
    "encode\nms": lambda result: f"{1e3 * result['encode_seconds']:.2f}",
    "decode\nms": lambda result: f"{1e3 * result['decode_seconds']:.2f}",
    "GB/s": lambda result: digits(result["gradient_bytes_per_second"] / 1e9),
    "×\nstreaming": lambda result: digits(result["times_streaming"]),
    "error": lambda result: f"{result['error']:.3f}" + ("*" if result["residual"] else ""),
}

_NOTES = (
    "ratio: float32 bytes of all gradients / bytes that a rank sends, frames and carriers included",
    "encode: from the first gradient to the last framed payload, median",
    "decode: checks and adds the payloads of all ranks, or decodes their sum, and ends the step, "
    "median",
    "There is no network. The copies in its place are not counted.",
    "GB/s: gradient bytes / (encode + decode)",
    "× streaming: encode and the decode of one payload / the time to read and write the gradient, "
    "the state and the payload once",
    "error: ‖mean over ranks − gradient‖ / ‖gradient‖ in the first step; *: the rest stays in a "
    "residual and is sent later",
)


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure bytes, time and error on this machine",
        description="Measures bytes, time and error of compressions on this machine, as one rank "
        "without a network.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "specs",
        nargs="*",
        metavar="SPEC",
        help="such as dgc:ratio=0.01 (default: all compressions, with their defaults)",
    )
    arguments.add_model(parser)
    parser.add_argument(
        "--gradients", metavar="FILE.npz", help="your own gradients, in place of a model's"
    )
    for name, default, least, help in (
        ("--ranks", 2, 1, "ranks whose payloads are decoded"),
        ("--steps", 10, 1, f"measured steps, after a warm-up of {WARMUP}"),
        ("--seed", 0, 0, "seed of the random gradients"),
    ):
        parser.add_argument(
            name,
            type=arguments.whole(least),
            default=default,
            metavar="N",
            help=f"{help} (default: {default})",
        )
    add_device(parser)
    arguments.add_json(parser)
    parser.set_defaults(run=_run, parser=parser)


def _run(options: argparse.Namespace) -> None:
    name, gradients = options.model, []
    try:
        compressors = {spec: for_gradients(spec) for spec in options.specs or available()}
        if options.gradients:
            name, gradients = options.gradients, load_gradients(options.gradients)
        # So that errors show before the long run.
        for compressor in compressors.values():
            measure(compressor, [{"w": np.eye(40, dtype=np.float32)}], options.ranks, 1)
    except ValueError as error:
        options.parser.error(str(error))
    gradients = gradients or random_gradients(MODELS[name](), options.seed)
    results = [
        {
            "spec": spec,
            **measure(
                compressors[spec], gradients, options.ranks, options.steps, place=options.device
            ),
        }
        for spec in with_progress(compressors)
    ]
    run = {
        "gradients": name,
        "tensors": len(gradients[0]),
        "floats": sum(array.size for array in gradients[0].values()),
        "ranks": options.ranks,
        "steps": options.steps,
        "kernels": kernels.backend,
        "results": results,
    }
    if not write_json(run, options.json):
        title = (
            f"{name}: {run['tensors']} tensors, {digits(run['floats'] / 1e6)} million floats; "
            f"{options.ranks} ranks, {options.steps} steps, {kernels.backend} kernels"
        )
        shown = table(_COLUMNS, results, left=("spec", "collective"))
        console().print(title, shown, *_NOTES, sep="\n")


class Echo(Transport):
    """`size` ranks that all send the same as this one. seconds is the time spent on copies, which
    is no part of a compression; sent counts bytes by collective, as "allreduce float32";
    operations, how many were started."""

    rank = 0
    reduces_on_device = True
    # As through Horovod.

    def __init__(self, size: int) -> None:
        self.size, self.seconds = size, 0.0
        self.sent: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()

    def note(self, verb: str, array: np.ndarray) -> None:
        self.sent[f"{verb} {array.dtype}"] += array.nbytes
        self.operations[f"{verb} {array.dtype}"] += 1
        self.count(array.nbytes, array.nbytes * (self.size - 1 if verb == "allgather" else 1))

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        self.note("allgather", payload)
        echo = np.tile if name.endswith(".round") else _frame_of_all
        return lambda: self._timed(echo, payload, self.size)

    def allreduce(self, name: str, array: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        self.note("allreduce", array)
        return lambda: self._timed(np.multiply, array, self.size if op == "sum" else 1, out=array)

    def alltoall(
        self, name: str, payload: np.ndarray, splits: Sequence[int]
    ) -> Callable[[], List[np.ndarray]]:
        self.note("alltoall", payload)
        return lambda: self._timed(lambda: [payload[: splits[0]].copy() for _ in range(self.size)])

    def _timed(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        result = function(*arguments, **options)
        self.seconds += time.perf_counter() - started
        return result


def _frame_of_all(frame: np.ndarray, ranks: int) -> np.ndarray:
    """A rank's frame, as each of so many ranks would have made it."""
    _, _, number, _, digest, step, length, flags = HEADER.unpack_from(frame.data)
    content, finite = frame[HEADER.size :][:length], not flags & 1
    return np.concatenate(
        [
            wire.seal(
                [Encoded(new_body(content), 0, finite)],
                number,
                digest,
                step,
                rank,
                lambda _: frame.size,
            )
            for rank in range(ranks)
        ]
    )


def measure(
    compressor: Compressor,
    gradients: Sequence[Named],
    ranks: int,
    steps: int,
    local_size: int = 1,
    place: Place = HERE,
) -> Dict[str, Any]:
    """Measures a compression on one of several ranks, which all send the same.

    Args:
        compressor: what is measured.
        gradients: by name, of one or more steps, which take turns.
        ranks: number of ranks.
        steps: measured steps, after `WARMUP` others.
        local_size: ranks of a host, for `hosts=true`. Other ranks' parts then stay zero, and the
            error says nothing.
        place: where gradients are, for algorithms that have kernels there.

    Returns:
        "collective"; "ratio" and "bytes_per_step"; "exchanged", these bytes by collective, as
        {"allreduce float32": …}, and "operations", how many of each a step starts; medians
        "encode_seconds", "decode_seconds" (of all ranks' payloads) and "streaming_seconds" (to read
        and write gradient, state and one payload once); "gradient_bytes_per_second";
        "times_streaming", of an encode and the decode of one payload; "error"; "residual", whether
        there is one.

    Raises:
        ValueError: the compression cannot be measured on one rank.
    """
    if compressor.policy.exchange == "split":
        raise ValueError(
            f"{compressor.id}: exchange=split is work of all ranks, and this measures one: measure "
            "exchange=gather, compare both with `hvdcompress plan`, or both on real ranks with "
            "benchmarks/step_time.py"
        )
    echo = Echo(ranks)
    tensors = {name: (array.shape, compressor) for name, array in gradients[0].items()}
    exchange = Exchange(compressor, echo, tensors, machine=Machine.alone(ranks, local_size))
    seconds, error = _take_steps(exchange, echo, gradients, steps, place)
    encode, decode, streaming = map(statistics.median, zip(*seconds))
    # None are gathered where those of so many ranks would be more bytes than a dense exchange.
    gathers = collective_of(compressor) == "allgather" and "allgather uint8" in echo.sent
    sent = sum(echo.sent.values()) / steps
    dense = 4 * sum(array.size for array in gradients[0].values())
    return {
        "collective": collective_of(compressor),
        "ratio": dense / sent,
        "bytes_per_step": sent,
        "exchanged": {kind: nbytes / steps for kind, nbytes in echo.sent.items()},
        "operations": {kind: count / steps for kind, count in echo.operations.items()},
        "encode_seconds": encode,
        "decode_seconds": decode,
        "streaming_seconds": streaming,
        "gradient_bytes_per_second": dense / (encode + decode),
        "times_streaming": (encode + decode / (ranks if gathers else 1)) / streaming,
        "error": error,
        "residual": exchange.stats()["residual_norm"] > 0,
    }


def _take_steps(
    exchange: Exchange,
    echo: Echo,
    gradients: Sequence[Named],
    steps: int,
    place: Place,
) -> Tuple[List[Tuple[float, float, float]], float]:
    """Takes steps, with a warm-up. Returns the seconds to encode, decode and stream in each of the
    measured ones, whose bytes `echo` has counted then; and the error of the first step."""
    seconds = []
    if not exchange.tensors.compressor.traits.on_device:
        place = HERE
    grads = {n: place.put(zeros(a.size)) for n, a in gradients[0].items()}
    for step in range(WARMUP + steps):
        given = gradients[step % len(gradients)]
        if step == WARMUP:
            state = [array for arrays in exchange.arrays().values() for array in arrays.values()]
            # As long as that of the last step.
            payload = place.put(zeros(sum(echo.sent.values()) // 4))
            streams = [*grads.values(), *state, payload]
        if step <= WARMUP:
            echo.sent.clear()
            echo.operations.clear()
        encode, decode = _time_step(exchange, echo, grads, given, place.settle)
        if step == 0:
            # No residual and no momentum yet, so the result can be compared with the gradient.
            error = _relative_error(grads, given)
        if step >= WARMUP:
            seconds.append((encode, decode, _time_streaming(streams, place.settle)))
    return seconds, error


def _time_step(
    exchange: Exchange, echo: Echo, grads: Named, given: Named, settle: Callable[[], None]
) -> Tuple[float, float]:
    """Runs one step on copies of the given gradients, made in the memory of `grads`. Returns the
    seconds of encoding and of decoding."""
    carriers, encode, echoed = {}, 0.0, echo.seconds
    for name, grad in grads.items():
        # Just written, as backward hands it over.
        np.copyto(grad, given[name].reshape(-1))
        settle()
        started = time.perf_counter()
        carriers[name] = exchange.submit(name, grad)
        encode += time.perf_counter() - started
        echo.note("allreduce", carriers[name])  # by the reducer
    started = time.perf_counter()
    exchange.flush()
    settle()
    between, encoded = echo.seconds, time.perf_counter()
    encode += encoded - started - (between - echoed)
    for name, carrier in carriers.items():
        exchange.finish(name, carrier)
    exchange.end_step()
    settle()
    decoded = time.perf_counter()
    return encode, decoded - encoded - (echo.seconds - between)


def _time_streaming(streams: Sequence[np.ndarray], settle: Callable[[], None]) -> float:
    """Reads and writes arrays once, which changes nothing in them. Returns the seconds."""
    started = time.perf_counter()
    for stream in streams:
        np.add(stream, stream.dtype.type(-0.0), out=stream)
    settle()
    return time.perf_counter() - started


def _relative_error(results: Named, given: Named) -> float:
    """‖result − gradient‖ / ‖gradient‖; the results are not needed afterwards."""
    whole = sum(kernels.cpu.squared_norm([array.reshape(-1) for array in given.values()]))
    for name, result in results.items():
        result -= given[name].reshape(-1)
    missing = sum(kernels.cpu.squared_norm([np.asarray(each) for each in results.values()]))
    return math.sqrt(missing / whole) if whole else 0.0
