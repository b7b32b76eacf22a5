#!/usr/bin/env python3
"""A step of a compression where gradients are on a GPU: by the kernels there, through the host, and, for dgc, in torch's operations; beside copying.

    .venv/bin/python benchmarks/gpu.py [SPEC ...] [--models resnet50 bert] [--ranks 2] [--steps 20]

Encoding and decoding of a whole model's gradients, of which the payloads of all ranks are taken to be this one's; no network is in it. Copying is
that of 24 bytes an element on the device, what a pass over gradient, u and v reads and writes. Prints a table in Markdown, medians in milliseconds;
--json writes all times. On the CPU, with HOROVOD_COMPRESS_KERNELS=device, it only shows that it works: that interprets the programs.
"""
import argparse
import json
import pathlib
import statistics
import sys
import time

import torch

from horovod_compress import get_compressor, kernels
from horovod_compress.bench import Echo
from horovod_compress.lockstep import make_ranks
from horovod_compress.models import MODELS
from horovod_compress.torch.parameters import flat

DEFAULT = ["dgc:ratio=0.001", "topk:ratio=0.001", "adacomp", "variance", "maxnorm", "multiscale", "fp16"]
WARMUP = 3  # steps that compile and touch new memory


def exchanged(exchange, grads):
    """A step of all tensors, whose results are left in the gradients' memory."""
    carriers = {name: exchange.submit(name, grad) for name, grad in grads.items()}
    exchange.flush()
    for name, carrier in carriers.items():
        exchange.finish(name, carrier)
    exchange.end_step()


def on_device(spec, grads, options):
    """A step by the kernels where the gradients are."""
    (exchange,) = make_ranks(get_compressor(spec), {name: grad.shape for name, grad in grads.items()}, [Echo(options.ranks)])
    arrays = {name: flat(grad, True) for name, grad in grads.items()}
    return lambda: exchanged(exchange, arrays)


def through_host(spec, grads, options):
    """A step on the host, through pinned memory."""
    (exchange,) = make_ranks(get_compressor(spec), {name: grad.shape for name, grad in grads.items()}, [Echo(options.ranks)])
    copies = {name: torch.empty_like(grad, device="cpu", pin_memory=grad.is_cuda) for name, grad in grads.items()}
    arrays = {name: flat(copy, False) for name, copy in copies.items()}

    def step():
        for name, grad in grads.items():
            copies[name].copy_(grad)
        exchanged(exchange, arrays)
        for name, grad in grads.items():
            grad.copy_(copies[name])

    return step


def in_torch(ratio, grads, options):
    """Deep Gradient Compression as torch's operations say it: a threshold from a sample, entries by a mask, no coding."""
    state = {name: (torch.zeros_like(grad).view(-1), torch.zeros_like(grad).view(-1)) for name, grad in grads.items()}

    def step():
        for name, grad in grads.items():
            (u, v), g = state[name], grad.view(-1)
            v.add_(u.mul_(0.9).add_(g))
            magnitude = v.abs()
            sample = magnitude[torch.randint(v.numel(), (v.numel() // 100 + 256,), device=v.device)]
            indices = (magnitude >= sample.topk(max(int(ratio * sample.numel()), 1)).values[-1]).nonzero().view(-1)
            values = v[indices]
            v[indices], u[indices] = 0, 0
            g.zero_()
            for _ in range(options.ranks):
                g.index_add_(0, indices, values, alpha=1 / options.ranks)

    return step


def copying(grads):
    """Reads and writes 24 bytes an element: three arrays, each in place of another."""
    numel = sum(grad.numel() for grad in grads.values())
    arrays = [torch.zeros(numel, device=next(iter(grads.values())).device) for _ in range(6)]

    def step():
        for to, source in zip(arrays[:3], arrays[3:]):
            to.copy_(source)

    return step


def milliseconds(step, grads, given, options):
    """The times of a step on fresh gradients."""
    found = []
    for number in range(WARMUP + options.steps):
        for name, grad in grads.items():
            grad.copy_(given[name])
        synchronize = torch.cuda.synchronize if options.device == "cuda" else lambda: None
        synchronize()
        started = time.perf_counter()
        step()
        synchronize()
        if number >= WARMUP:
            found.append(1e3 * (time.perf_counter() - started))
    return found


def measured(model, options):
    """{what: {where: times}} of a model."""
    torch.manual_seed(0)
    given = {name: 1e-3 * torch.randn(shape, device=options.device) for name, shape in MODELS[model]().items()}
    grads = {name: torch.empty_like(grad) for name, grad in given.items()}
    found = {"copying 24 bytes an element": {"on the device": milliseconds(copying(grads), grads, given, options)}}
    for spec in options.specs:
        ways = {"on the device": on_device(spec, grads, options), "through the host": through_host(spec, grads, options)}
        if spec.startswith("dgc:ratio="):
            ways["torch's operations"] = in_torch(get_compressor(spec).ratio, grads, options)
        found[spec] = {where: milliseconds(step, grads, given, options) for where, step in ways.items()}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("specs", nargs="*", metavar="SPEC", default=DEFAULT)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet50", "bert"])
    parser.add_argument("--ranks", type=int, default=2, help="whose payloads are decoded")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if not kernels.serves(options.device) or options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"there are no kernels for {options.device} here: a GPU that torch sees is needed, and triton, as horovod-compress[gpu] installs it")
    found = {model: measured(model, options) for model in options.models}
    columns = "on the device", "through the host", "torch's operations"
    print(torch.cuda.get_device_name() if options.device == "cuda" else "interpreted")
    print("| " + " | ".join(["model", "ms a step", *columns]) + " |\n|---|---|" + "---:|" * len(columns))
    for model, rows in found.items():
        for what, times in rows.items():
            print("| " + " | ".join([model, what, *(f"{statistics.median(times[at]):.2f}" if at in times else "" for at in columns)]) + " |")
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
