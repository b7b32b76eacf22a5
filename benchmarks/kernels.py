"""One step's work of a compression on one core, against a native loop that only streams the same bytes.

    python benchmarks/kernels.py [SPEC] [--ranks N] [--steps N]

Encode and decode go the way of a real step: through the exchange, wire format and checks included, with N ranks' payloads
to decode (other ranks' gradients are this rank's, so only its own encode and its own decode are timed). The streaming loop
reads and writes u, v and the gradient once, in the same process, taking turns with the steps. Medians are compared.
"""
import argparse
import ctypes
import pathlib
import resource
import statistics
import subprocess
import tempfile
import time
import tracemalloc

import numpy as np

from horovod_compress import kernels
from horovod_compress.compressors import get_compressor
from horovod_compress.compressors.base import zeros
from horovod_compress.exchange import Exchange
from horovod_compress.models import resnet50
from horovod_compress.transport.base import Transport


def streaming_loop():
    """stream(u, v, g) of streaming.cpp, built for this very machine."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/streaming.so"
        source = pathlib.Path(__file__).with_name("streaming.cpp")
        subprocess.run(["g++", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
        function = ctypes.CDLL(library).stream
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t]
    return lambda u, v, g: function(u.ctypes.data, v.ctypes.data, g.ctypes.data, g.size)


class Echo(Transport):
    """`size` ranks that all send what this one sends."""

    rank = 0

    def __init__(self, size):
        self.size = size

    def allgather(self, name, payload):
        return lambda: np.tile(payload, self.size)

    def allreduce(self, name, array, op="sum"):
        return lambda: np.multiply(array, self.size if op == "sum" else 1, out=array)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("spec", nargs="?", default="dgc:ratio=0.001")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    shapes = resnet50()
    compressor = get_compressor(arguments.spec)
    exchange = Exchange(compressor, Echo(arguments.ranks), {n: (s, compressor) for n, s in shapes.items()})
    rng = np.random.default_rng(0)
    fresh = {n: rng.standard_normal(int(np.prod(s)), np.float32) for n, s in shapes.items()}
    grads = {n: zeros(g.size) for n, g in fresh.items()}  # on cache lines, as torch's gradients are
    gradient_bytes = sum(g.nbytes for g in grads.values())
    floats = gradient_bytes // 4
    print(f"{compressor!r} on ResNet-50: {len(shapes)} tensors, {floats / 1e6:.1f} M floats, kernels: {kernels.backend}")

    stream = streaming_loop()
    streams = [zeros(floats) for _ in range(3)]
    times = {"encode": [], "decode": [], "streaming": []}
    allocated = 0
    for step in range(arguments.steps + 3):
        for name, grad in grads.items():
            np.copyto(grad, fresh[name])
        if step == arguments.steps + 2:
            tracemalloc.start()
        started = time.perf_counter()
        carriers = {name: exchange.submit(name, grad) for name, grad in grads.items()}
        encoded = time.perf_counter()
        for name, carrier in carriers.items():
            exchange.finish(name, carrier)
        decoded = time.perf_counter()
        if tracemalloc.is_tracing():
            allocated = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        else:
            stream(*streams)
            streamed = time.perf_counter()
            if step >= 2:  # the first steps touch new memory
                times["encode"].append(encoded - started)
                times["decode"].append(decoded - encoded)
                times["streaming"].append(streamed - decoded)
    median = {key: statistics.median(values) for key, values in times.items()}
    work = median["encode"] + median["decode"]
    stats = exchange.stats()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for key in ("encode", "decode", "streaming"):
        print(f"  {key:10} {1e3 * median[key]:7.2f} ms  (min {1e3 * min(times[key]):.2f}, max {1e3 * max(times[key]):.2f})")
    print(f"  (encode + decode) / streaming   {work / median['streaming']:.2f}")
    print(f"  ratio on the wire               {stats['ratio']:.0f}  ({stats['bytes_sent'] / stats['steps'] / 1e3:.0f} kB a step)")
    share = 100 * allocated / gradient_bytes
    print(f"  allocated in a step             {allocated / 1e3:.0f} kB at most, {share:.2f} % of the gradient")
    print(f"  peak memory of the process      {peak / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
