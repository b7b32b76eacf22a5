#!/usr/bin/env python3
"""Measures what the exchange of a step costs in PyTorch and in TensorFlow, at the gradient shapes
of a known network.

    .venv/bin/python benchmarks/frameworks.py [--model resnet50] [--ranks 2]
        [--framework torch] [--rate 1gbit] [SPEC ...]

The ranks are on this host, or with --rate on two, which needs root (see two_hosts.py); --model
1000x1024 is a thousand tensors of 1 024 elements. For each framework: steps that only make the
gradients (the floor), and steps that make and exchange them, with Horovod's own reduction and with
each SPEC, on the stock DistributedOptimizer or DistributedGradientTape; keras is TensorFlow in the
function that Model.fit calls for each step. The floor and the exchange take turns, step by step;
the frameworks, job by job. Prints a table in Markdown: medians over jobs of the medians over steps
of the slowest rank. --points writes the figures of all jobs as docs/results/data/README.md
describes them.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np
import points
from two_hosts import Hosts, link_rate

from horovod_compress.tools.gradients import random_gradients
from horovod_compress.tools.models import MODELS

DEFAULT = ["dgc:ratio=0.001,momentum=0.9", "maxnorm"]
UNITS = {"floor": "ms", "exchange": "ms, with the floor", "over": "ms over the floor"}
FRAMEWORKS = ("torch", "tensorflow", "keras")
LAUNCH = {
    "gloo": "horovodrun --gloo -np",
    "mpi": "mpirun --allow-run-as-root --bind-to none --oversubscribe -np",
}
WARMUP = 3


# -- what every rank does


def in_torch(shapes, gradients, spec):
    """(hvd, {what: a step}, the compression): gradients are added to zeros, and exchanged while
    that goes on."""
    import horovod.torch as hvd
    import torch
    from told import Model, tensors

    import horovod_compress.torch as hvdc

    hvd.init()
    torch.set_num_threads(1)
    (told,), alone, model = tensors([gradients]), Model(shapes), Model(shapes)
    named, optimizer = model.named, torch.optim.SGD(model.parameters(), lr=1e-6)
    ours = (
        None
        if spec == "none"
        else hvdc.Compression.from_spec(spec, optimizer, named_parameters=named)
    )
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=named, compression=ours or hvd.Compression.none
    )

    def exchange():
        model(told).backward()
        optimizer.synchronize()

    return hvd, {"floor": lambda: alone(told).backward(), "exchange": exchange}, ours


def started_tensorflow():
    """(hvd, tf), with a core for each rank."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    return hvd, tf


def told_loss(tf, variables, tensors, zero):
    """A scalar whose gradients are these tensors."""

    def told(variable, gradient):
        @tf.custom_gradient
        def apply(x):
            return tf.zeros(()), lambda _: gradient + zero

        return apply(variable)

    return tf.add_n([told(v, g) for v, g in zip(variables, tensors)])


def in_tensorflow(shapes, gradients, spec):
    """The same: gradients are added to zero, in a traced function."""
    hvd, tf = started_tensorflow()
    import horovod_compress.tensorflow as hvdc

    variables = [tf.Variable(tf.zeros(shape), name=name) for name, shape in shapes.items()]
    tensors = [tf.constant(array) for array in gradients.values()]
    ours = None if spec == "none" else hvdc.Compression.from_spec(spec)

    def step(distributed):
        @tf.function
        def run(zero, *tensors):
            with tf.GradientTape() as tape:
                loss = told_loss(tf, variables, tensors, zero)
            if distributed:
                tape = hvd.DistributedGradientTape(tape, compression=ours or hvd.Compression.none)
            grads = tape.gradient(loss, variables)
            # All are there at once, as in PyTorch, and as any exchange has them.
            with tf.control_dependencies(grads):
                return tf.add_n([tf.reshape(grad, [-1])[0] for grad in grads])

        return lambda: run(tf.zeros(()), *tensors)

    return hvd, {"floor": step(False), "exchange": step(True)}, ours


def in_keras(shapes, gradients, spec):
    """The same, and an SGD, in the function that Model.fit calls for each step."""
    hvd, tf = started_tensorflow()
    import horovod.tensorflow.keras as keras_hvd

    import horovod_compress.tensorflow as hvdc

    tensors = [tf.constant(array) for array in gradients.values()]
    ours = None if spec == "none" else hvdc.Compression.from_spec(spec)

    class Told(tf.keras.Model):
        def build(self, _):
            self.told = [
                self.add_weight(name=name, shape=shape, initializer="zeros")
                for name, shape in shapes.items()
            ]

        def call(self, zeros):
            return told_loss(tf, self.told, tensors, tf.reduce_sum(zeros))

    def step(distributed):
        model, optimizer = Told(), tf.keras.optimizers.SGD(1e-6)
        if distributed:
            optimizer = keras_hvd.DistributedOptimizer(
                optimizer, compression=ours or keras_hvd.Compression.none
            )
        model.compile(optimizer, loss=lambda _, told: told)
        batches = iter(tf.data.Dataset.from_tensors((tf.zeros((1, 1)), tf.zeros((1,)))).repeat())
        run = model.make_train_function()
        return lambda: run(batches)

    return hvd, {"floor": step(False), "exchange": step(True)}, ours


def shapes_of(model):
    """{name: shape} of a known network, or of NUMBERxELEMENTS."""
    if model in MODELS:
        return MODELS[model]()
    number, elements = map(int, model.split("x"))
    return {f"tensor{i}": (elements,) for i in range(number)}


def worker(options):
    shapes = shapes_of(options.model)
    gradients = random_gradients(
        shapes, int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", 0)))
    )[0]
    make = {"torch": in_torch, "tensorflow": in_tensorflow, "keras": in_keras}[options.framework]
    hvd, steps, ours = make(shapes, gradients, options.specs[0])
    seconds = {what: [] for what in steps}
    before = None
    for step in range(WARMUP + options.steps):
        if step == WARMUP and ours:
            before = ours.stats()
        for what, run in steps.items():
            hvd.allreduce(np_tensor(options.framework, 0.0), name=f"together.{what}")
            started = time.perf_counter()
            run()
            seconds[what].append(time.perf_counter() - started)
    result = {}
    for what, each in seconds.items():
        slowest = hvd.allreduce(
            np_tensor(options.framework, each[WARMUP:]), op=hvd.Max, name=f"seconds.{what}"
        )
        result[what] = statistics.median(np.asarray(slowest).tolist())
    if ours:
        after = ours.stats()
        for part in ("encode_seconds", "decode_seconds", "bytes_sent"):
            result[part] = (after[part] - before[part]) / options.steps
    if hvd.rank() == 0:
        pathlib.Path(options.worker).write_text(json.dumps(result))


def np_tensor(framework, numbers):
    if framework == "torch":
        import torch

        return torch.tensor(numbers)
    import tensorflow as tf

    return tf.constant(numbers)


# -- the driver


def measured(options, hosts, framework, spec):
    """The figures of a job: on this host, or on two."""
    given = ["--framework", framework, "--model", options.model]
    given += ["--steps", str(options.steps), spec]
    if hosts:
        return hosts.measure(options.launcher, options.ranks, __file__, given)
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result"
        launch = [*LAUNCH[options.launcher].split(), str(options.ranks)]
        job = [*launch, sys.executable, __file__, "--worker", str(result), *given]
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
        done = subprocess.run(job, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        if done.returncode or not result.exists():
            raise SystemExit(f"{framework}, {spec} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return json.loads(result.read_text())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "specs", nargs="*", default=DEFAULT, metavar="SPEC", help=f"default: {' '.join(DEFAULT)}"
    )
    parser.add_argument(
        "--model", default="resnet50", help=f"{', '.join(MODELS)}, or NUMBERxELEMENTS"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=5, help="of each kind (default: 5)")
    parser.add_argument(
        "--launcher", choices=LAUNCH, default="gloo", help="what Horovod runs on (default: gloo)"
    )
    parser.add_argument("--points", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--framework", choices=FRAMEWORKS, help="default: all")
    parser.add_argument(
        "--rate", type=link_rate, help="of the link between two hosts; default: one host"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    chosen = [options.framework] if options.framework else FRAMEWORKS
    jobs = {spec: {name: [] for name in chosen} for spec in ["none", *options.specs]}
    with Hosts(options.rate) if options.rate else contextlib.nullcontext() as hosts:
        for spec, by_framework in jobs.items():
            for _ in range(options.jobs):
                for name, results in by_framework.items():
                    results.append(measured(options, hosts, name, spec))
                    results[-1]["over"] = results[-1]["exchange"] - results[-1]["floor"]
    where = f"two hosts, link {options.rate}" if options.rate else "one host"
    print(f"{options.model}, {options.ranks} ranks on {where}, {options.launcher}; milliseconds\n")
    titles = [
        "floor",
        "with the exchange",
        "over the floor",
        "encode",
        "decode",
        "of PyTorch's over the floor",
    ]
    print(f"| spec | framework | {' | '.join(titles)} |\n|---|---|" + "---:|" * len(titles))
    for spec, by_framework in jobs.items():
        medians = {
            name: {
                part: statistics.median(result[part] for result in results) for part in results[0]
            }
            for name, results in by_framework.items()
        }
        for name, figures in medians.items():
            parts = ("floor", "exchange", "over", "encode_seconds", "decode_seconds")
            row = [f"{1e3 * figures[part]:.1f}" if part in figures else "" for part in parts]
            of_torch = ""
            if "torch" in medians:
                of_torch = f"{figures['over'] / medians['torch']['over']:.2f}"
            print(f"| {spec} | {name} | {' | '.join(row)} | {of_torch} |")
    if options.points:
        library = points.LIBRARIES[options.launcher]
        of_all_jobs = [
            (
                {"run": spec, "library": library, "framework": name},
                {part: [round(1e3 * result[part], 1) for result in results] for part in UNITS},
            )
            for spec, by_framework in jobs.items()
            for name, results in by_framework.items()
        ]
        points.write(options.points, UNITS, of_all_jobs)


if __name__ == "__main__":
    main()
