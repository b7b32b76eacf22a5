#!/usr/bin/env python3
"""Gradients of an embedding, sparse or dense, on two hosts joined by links of several speeds: what
a step takes and sends.

    .venv/bin/python benchmarks/sparse.py [--rates 100mbit 1gbit none]
        [--rows 10000 100000 1000000] [--width 256] [--tokens 2048]

Needs root (see two_hosts.py). One job of 2 ranks for each link, number of rows and way: `sparse`,
nn.Embedding(sparse=True) with Horovod's own allgather of rows; `densified`, the same with
sparse_as_dense=True; `dense`, sparse=False; each of the last two also with a compression. Tokens
are drawn by Zipf's law, as words are, and half of them from words that one rank alone has. Steps
have no other parameters. Prints a table in Markdown; --points writes the figures as
docs/results/data/README.md describes them.
"""

import argparse
import json
import pathlib
import statistics
import time

import points
from two_hosts import LAUNCHERS, Hosts, link_rate

OURS = "topk:ratio=0.001"
WAYS = {
    "sparse": (True, False, None),
    "densified": (True, True, None),
    f"densified, {OURS}": (True, True, OURS),
    "dense": (False, False, None),
    f"dense, {OURS}": (False, False, OURS),
}
WARMUP, STEPS, SECONDS = 2, 12, 20  # at most, and for about how long


def worker(options):
    import horovod.torch as hvd
    import numpy as np
    import torch

    import horovod_compress.torch as hvdc

    hvd.init()
    torch.set_num_threads(1)
    is_sparse, sparse_as_dense, spec = WAYS[options.way]
    rows = options.rows[0]
    embedding = torch.nn.Embedding(rows, options.width, sparse=is_sparse)
    compression = hvdc.Compression.from_spec(spec) if spec else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(embedding.parameters(), lr=0.1),
        embedding.named_parameters(),
        compression,
        sparse_as_dense=sparse_as_dense,
    )
    rng, seconds, steps, values = np.random.default_rng(hvd.rank()), [], WARMUP + STEPS, 0
    while len(seconds) < steps:
        tokens = torch.from_numpy(
            (rng.zipf(1.2, options.tokens) * (1 + hvd.rank() * (np.arange(options.tokens) % 2)))
            % rows
        )
        loss = (embedding(tokens) ** 2).sum()
        if is_sparse:
            embedding.weight.grad = None
        elif embedding.weight.grad is not None:
            # Not None: new memory in every step takes longer than all the rest.
            embedding.weight.grad.zero_()
        hvd.barrier()
        started = time.perf_counter()
        loss.backward()
        values = embedding.weight.grad._nnz() if is_sparse else 0
        optimizer.step()
        seconds.append(
            hvd.allreduce(
                torch.tensor(time.perf_counter() - started), op=hvd.Max, name="seconds"
            ).item()
        )
        if len(seconds) == 2:
            steps = WARMUP + max(3, min(STEPS, int(SECONDS / seconds[1])))
    if spec:
        sent = compression.stats()["bytes_sent"] / len(seconds)
    else:
        # Horovod's own: values and int64 indices of what backward made, or the dense gradient.
        sent = (
            values * (4 * options.width + 8)
            if is_sparse and not sparse_as_dense
            else 4 * rows * options.width
        )
    if hvd.rank() == 0:
        pathlib.Path(options.worker).write_text(
            json.dumps({"seconds": statistics.median(seconds[WARMUP:]), "bytes": sent})
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rates",
        type=link_rate,
        nargs="+",
        default=["100mbit", "1gbit", "none"],
        help="of the link; none: as fast as it goes",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[10000, 100000, 1000000], help="of the embedding"
    )
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048, help="of a rank's batch")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="gloo")
    parser.add_argument("--points", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    print(
        f"| rows | way | kB sent | {' | '.join(f'ms, {rate}' for rate in options.rates)} "
        f"|\n|---|---|---:|{'---:|' * len(options.rates)}"
    )
    measured = []
    for rows in options.rows:
        for way in WAYS:
            figures = []
            for rate in options.rates:
                with Hosts(rate) as hosts:
                    given = [
                        "--rows",
                        rows,
                        "--width",
                        options.width,
                        "--tokens",
                        options.tokens,
                        "--way",
                        way,
                    ]
                    figures.append(hosts.measure(options.launcher, 2, __file__, given))
            times = [f"{1e3 * each['seconds']:.1f}" for each in figures]
            for rate, its in zip(options.rates, figures):
                at = {"rows": rows, "gradient": way, "link": points.LINKS.get(rate, rate)}
                sent = round(its["bytes"] / 1e3)
                measured.append((at, {"step": round(1e3 * its["seconds"], 1), "sent": sent}))
            print(
                f"| {rows} | {way} | {figures[0]['bytes'] / 1e3:.0f} | {' | '.join(times)} |",
                flush=True,
            )
    if options.points:
        units = {"step": "ms", "sent": "kB a step that a rank sends"}
        points.write(options.points, units, measured)


if __name__ == "__main__":
    main()
