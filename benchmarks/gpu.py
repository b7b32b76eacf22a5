#!/usr/bin/env python3
"""A step of a compression where gradients are on a GPU, by the kernels there and through the host.

    .venv/bin/python benchmarks/gpu.py [SPEC ...] [--models resnet50 bert] [--ranks 2] [--steps 20]

Encodes and decodes a whole model's gradients. The payloads of all ranks are taken to be this one's:
there is no network. For dgc, also in torch's operations. Beside them stands a copy of 24 bytes an
element on the device: reading and writing gradient, u and v once.

Gradients are normal numbers, whose scale is log-normal by row. In every other step they have the
other sign, so that what is kept of most of them stays as small as noise is that averages out; one
in 200 has a mean besides, as large as that, which does not change. So variance sends a few of a
thousand; of independent numbers it would send a third.

Prints a table in Markdown of medians, and of all elements the share that a step has sent, where
tensors that are sent whole count whole; --points writes all times as docs/results/data/README.md
describes them. Needs neither Horovod nor a second GPU. On the CPU, with
HOROVOD_COMPRESS_KERNELS=device, it only shows that it works: that interprets the programs.
"""

import argparse
import pathlib
import re
import statistics
import sys
import time
from typing import Callable, Dict, List, NamedTuple, Optional

import numpy as np
import torch

from horovod_compress import get_compressor, kernels
from horovod_compress.engine.lockstep import make_ranks
from horovod_compress.tools.bench import Echo
from horovod_compress.tools.models import MODELS

DEFAULT = [
    "dgc:ratio=0.001",
    "topk:ratio=0.001",
    "adacomp",
    "variance",
    "maxnorm",
    "multiscale",
    "powersgd",
    "fp16",
]
# Steps that compile and touch new memory.
WARMUP = 3
COPYING = "copying 24 bytes an element"


class Parts(NamedTuple):
    """Both parts of a step; sent: of how many elements something was sent, in all steps so far."""

    encode: Callable[[], None]
    decode: Callable[[], None]
    sent: Callable[[], Optional[int]] = lambda: None


def gradients(shapes, device):
    """({name: mean}, {name: what is added to it and subtracted from it in turn}) of gradients."""
    means, noise = {}, {}
    for name, shape in shapes.items():
        scale = torch.randn(shape[:1] + (1,) * (len(shape) - 1), device=device).exp() * 1e-3
        noise[name] = torch.randn(shape, device=device) * scale
        means[name] = noise[name].roll(1, 0) * (torch.rand(shape, device=device) < 1 / 200)
    return means, noise


def fill(grads, given, number):
    """Makes them the gradients of a step."""
    means, noise = given
    for name, grad in grads.items():
        torch.add(means[name], noise[name], alpha=(-1) ** number, out=grad)


class EchoThere(Echo):
    """As over NCCL: frames of entries stay on the device."""

    gathers_on_device = True

    def allgather(self, name, payload):
        if isinstance(payload, np.ndarray):
            return super().allgather(name, payload)
        self.count(payload.nbytes, (self.size - 1) * payload.nbytes)
        frames = payload.tensor.repeat(self.size, 1)
        # As each of the ranks would have made it.
        frames[:, 1] += torch.arange(self.size, dtype=torch.int32, device=frames.device)
        return lambda: type(payload)(frames.view(-1))


def by_exchange(spec, grads, options, arrays, echo=Echo):
    """A step of all tensors, whose results are left in the arrays' memory."""
    shapes = {name: grad.shape for name, grad in grads.items()}
    (exchange,) = make_ranks(get_compressor(spec), shapes, [echo(options.ranks)])
    carriers = {}

    def encode():
        carriers.update({name: exchange.submit(name, array) for name, array in arrays.items()})
        exchange.flush()

    def decode():
        for name, carrier in carriers.items():
            exchange.finish(name, carrier)
        exchange.end_step()

    return Parts(encode, decode, lambda: exchange.stats()["elements_sent"])


def on_device(spec, grads, options, echo=Echo):
    """A step by the kernels where the gradients are."""
    from horovod_compress.kernels.device import DeviceArray  # imports Triton

    arrays = {name: DeviceArray(grad.view(-1)) for name, grad in grads.items()}
    return by_exchange(spec, grads, options, arrays, echo)


def through_host(spec, grads, options):
    """A step on the host, through pinned memory."""
    copies = {
        name: torch.empty_like(grad, device="cpu", pin_memory=grad.is_cuda)
        for name, grad in grads.items()
    }
    arrays = {name: copy.view(-1).numpy() for name, copy in copies.items()}
    encode, decode, sent = by_exchange(spec, grads, options, arrays)

    def encode_copies():
        for name, grad in grads.items():
            copies[name].copy_(grad)
        encode()

    def decode_copies():
        decode()
        for name, grad in grads.items():
            grad.copy_(copies[name])

    return Parts(encode_copies, decode_copies, sent)


def in_torch(ratio, grads, options):
    """Deep Gradient Compression in torch's operations: a sampled threshold, a mask, no coding."""
    state = {name: torch.zeros(2, g.numel(), device=g.device) for name, g in grads.items()}
    entries = {}

    def encode():
        for name, grad in grads.items():
            (u, v), g = state[name], grad.view(-1)
            v.add_(u.mul_(0.9).add_(g))
            magnitude = v.abs()
            places = torch.randint(v.numel(), (v.numel() // 100 + 256,), device=v.device)
            sample = magnitude[places]
            floor = sample.topk(max(int(ratio * sample.numel()), 1)).values[-1]
            indices = (magnitude >= floor).nonzero().view(-1)
            entries[name] = indices, v[indices]
            v[indices], u[indices] = 0, 0
            g.zero_()

    def decode():
        for name, (indices, values) in entries.items():
            for _ in range(options.ranks):
                grads[name].view(-1).index_add_(0, indices, values, alpha=1 / options.ranks)

    return Parts(encode, decode)


def copying(grads):
    """Reads and writes 24 bytes an element: three arrays, each in place of another."""
    numel = sum(grad.numel() for grad in grads.values())
    arrays = [torch.zeros(numel, device=next(iter(grads.values())).device) for _ in range(6)]

    def copy():
        for to, source in zip(arrays[:3], arrays[3:]):
            to.copy_(source)

    return Parts(copy, lambda: None)


def timed(parts, grads, given, options):
    """[[ms of encoding, ms of decoding] of each step], on fresh gradients."""
    synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    found = []
    for number in range(WARMUP + options.steps):
        fill(grads, given, number)
        synchronize()
        times = [time.perf_counter()]
        for part in parts[:2]:
            part()
            synchronize()
            times.append(time.perf_counter())
        if number >= WARMUP:
            found.append([1e3 * (after - before) for before, after in zip(times, times[1:])])
    return found


def traced(parts, grads, given):
    """Of one step on a GPU: launches, copies between host and device, waits for the device, and the
    milliseconds that the device was busy."""
    fill(grads, given, 0)
    torch.cuda.synchronize()
    with torch.profiler.profile(acc_events=True) as profiler:
        for part in parts[:2]:
            part()
    counts = {event.key: event.count for event in profiler.key_averages()}

    def of(pattern):
        return sum(count for key, count in counts.items() if re.match(pattern, key))

    busy = sum(event.self_device_time_total for event in profiler.key_averages())
    return {
        "launches": of("cu.*Launch"),
        "copies": of("cudaMemcpy|cuMemcpy"),
        # The profiler itself waits for the device once, when it ends.
        "waits": of("cu.*Synchronize") - 1,
        "busy": busy / 1e3,
    }


class Row(NamedTuple):
    """A step of `what`, where: times of all steps, as `timed` has them; sent: share of elements, or
    None; trace: as `traced` has it, on a GPU."""

    model: str
    what: str
    where: str
    times: List[List[float]]
    sent: Optional[float]
    trace: Dict[str, float]


def measured(model, options):
    """The rows of a model, what copies first."""
    torch.manual_seed(0)
    shapes = MODELS[model]()
    given = gradients(shapes, options.device)
    grads = {name: torch.empty_like(grad) for name, grad in given[0].items()}
    numel = sum(grad.numel() for grad in grads.values()) * (WARMUP + options.steps)

    def row(what, where, parts):
        times, sent = timed(parts, grads, given, options), parts.sent()
        trace = traced(parts, grads, given) if options.device == "cuda" else {}
        return Row(model, what, where, times, None if sent is None else sent / numel, trace)

    yield row(COPYING, "on the device", copying(grads))
    for spec in options.specs:
        yield row(spec, "on the device", on_device(spec, grads, options))
        if spec.startswith(("dgc", "topk")):
            parts = on_device(spec, grads, options, EchoThere)
            yield row(spec, "on the device, as over NCCL", parts)
        yield row(spec, "through the host", through_host(spec, grads, options))
        if spec.startswith("dgc:ratio="):
            parts = in_torch(get_compressor(spec).ratio, grads, options)
            yield row(spec, "torch's operations", parts)


def table(rows):
    """The lines of a table in Markdown."""
    columns = ["sent", "encode ms", "decode ms", "times copying"]
    columns += ["launches", "copies", "waits", "busy ms"]
    yield "| " + " | ".join(["model", "a step of", "where", *columns]) + " |"
    yield "|---|---|---|" + "---:|" * 8
    for row in rows:
        encode, decode = (statistics.median(column) for column in zip(*row.times))
        if row.what == COPYING:
            copied = encode
        numbers = ["" if row.sent is None else f"{row.sent:.2%}"]
        numbers += [f"{encode:.2f}", f"{decode:.2f}", f"{(encode + decode) / copied:.1f}"]
        numbers += [str(row.trace.get(key, "")) for key in ("launches", "copies", "waits")]
        numbers += [f"{row.trace['busy']:.2f}" if row.trace else ""]
        yield "| " + " | ".join([row.model, row.what, row.where, *numbers]) + " |"


UNITS = {
    "step": "ms, encode and decode",
    "encode": "ms",
    "decode": "ms",
    "sent": "% of elements",
    "busy": "ms",
    **dict.fromkeys(("launches", "copies", "waits"), "a step"),
}


def points_of(rows):
    """The points of what was measured."""
    for row in rows:
        encode, decode = zip(*row.times)
        figures = {
            "step": [round(sum(each), 2) for each in row.times],
            "encode": [round(each, 2) for each in encode],
            "decode": [round(each, 2) for each in decode],
            "sent": None if row.sent is None else round(100 * row.sent, 2),
            **{key: row.trace.get(key) for key in ("launches", "copies", "waits")},
            "busy": round(row.trace["busy"], 2) if row.trace else None,
        }
        yield {"model": row.model, "run": row.what, "where": row.where}, figures


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC", default=DEFAULT)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet50", "bert"])
    parser.add_argument("--ranks", type=int, default=2, help="whose payloads are decoded")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--points", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    there = options.device == "cpu" or torch.cuda.is_available()
    if not kernels.serves(options.device) or not there:
        sys.exit(
            f"there are no kernels for {options.device} here: a GPU that torch sees is needed, and "
            "triton, as horovod-compress[gpu] installs it"
        )
    found = [row for model in options.models for row in measured(model, options)]
    print(torch.cuda.get_device_name() if options.device == "cuda" else "interpreted")
    print(*table(found), sep="\n")
    if options.points:
        import points

        gpu = {"machine": torch.cuda.get_device_name()} if options.device == "cuda" else {}
        points.write(options.points, UNITS, points_of(found), **gpu)


if __name__ == "__main__":
    main()
