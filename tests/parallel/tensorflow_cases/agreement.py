"""The adapter gives what PyTorch's and `simulate` give."""

import alike
import horovod.tensorflow as hvdt
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from checks import registry
from owners import Owners
from tensorflow import keras

import horovod_compress.tensorflow as hvdc
from horovod_compress import simulate

from .training import SGD, exchanged, told

CASES, case = registry()


@case(2, 3)
def an_alltoall_in_a_step():
    """A compressor that yields one gives the mean, in a function that is traced once and in eager
    code."""
    for in_graph in (True, False):
        step = exchanged(hvdc.Compression.from_spec(Owners(min_numel=0)), in_graph=in_graph)
        for number in range(3):
            found = step(told(number))
            given = [alike.gradients(rank, number) for rank in range(hvd.size())]
            for name, mean in found.items():
                np.testing.assert_allclose(
                    mean, sum(named[name] for named in given) / hvd.size(), rtol=1e-5, atol=1e-6
                )


@case(2)
def told_gradients_give_what_simulate_gives_to_the_last_bit():
    for spec in alike.SPECS:
        compression = hvdc.Compression.from_spec(spec)
        step = exchanged(compression)
        results = [{n: g.numpy() for n, g in step(told(i)).items()} for i in range(alike.STEPS)]
        # In a graph no tensor has a carrier of its own.
        variables = compression.the_only()._graph.variables.values()
        carriers = sum(bool(each.moved) for each in variables)
        sent = alike.sent_of_tensors(compression) + 4 * carriers * alike.STEPS
        alike.assert_simulated(spec, hvd.rank(), hvd.size(), results, sent)


@case()
def a_compressor_of_another_package():
    """For test_other_packages.py, which installs one."""
    compression = hvdc.Compression.cyclic(every=4)
    step = exchanged(compression)
    for i, means in enumerate(alike.cyclic_means(4, hvd.size())):
        found = step(told(i))
        for name, mean in means.items():
            np.testing.assert_allclose(found[name].numpy(), mean, atol=1e-6)
    assert compression.stats()["ratio"] > 2


def simulated(spec, steps=alike.STEPS):
    return simulate(
        spec, [[alike.gradients(rank, step) for rank in range(hvd.size())] for step in range(steps)]
    )


@case(2, 3)
def a_tape_gives_what_simulate_gives():
    """In graphs and eagerly, averages and sums, in groups and not, with predivision; clipped by the
    norm of all gradients."""
    for spec, in_graph, options in (
        ("topk", False, {}),
        ("multiscale", False, {}),
        ("adacomp", True, {"op": hvdt.Sum}),
        ("maxnorm", True, {"op": hvdt.Sum, "groups": 1}),
        ("powersgd", True, {"groups": 2}),
        ("topk", True, {"gradient_predivide_factor": 4.0}),
        ("dgc:momentum=0.9,clip_norm=20", True, {}),
    ):
        expected = simulated(spec)
        step = exchanged(hvdc.Compression.from_spec(spec), in_graph=in_graph, tape_options=options)
        for i, mean in enumerate(expected.mean):
            for name, gradient in step(told(i)).items():
                wanted = mean[name] * (hvd.size() if options.get("op") == hvdt.Sum else 1)
                error = np.abs(gradient.numpy() - wanted).max()
                assert error <= 1e-5 * np.abs(wanted).max(), (
                    f"{spec} {options}: {name} differs by {error} in step {i}"
                )


@case(2, 4, 8)
def clip_norm_limits_the_update():
    """Independent gradients far above the limit give a result of norm clip_norm, whatever Horovod
    does with the sum."""
    noise = {
        name: np.random.default_rng(hvd.rank()).standard_normal(shape, np.float32)
        for name, shape in alike.SHAPES.items()
    }
    norm = np.sqrt(sum(np.square(array).sum() for array in noise.values()))
    for options in ({}, {"op": hvdt.Sum}, {"gradient_predivide_factor": 4.0}):
        for in_graph in (True, False) if hvd.size() == 2 else (True,):
            compression = hvdc.Compression.dgc(ratio=1, momentum=0, clip_norm=1)
            step = exchanged(compression, in_graph=in_graph, tape_options=options)
            result = step(
                {name: tf.constant(10 * hvd.size() / norm * array) for name, array in noise.items()}
            )
            found = np.sqrt(sum(np.square(array.numpy()).sum() for array in result.values()))
            assert 0.9 < found < 1.1, f"{options}, in_graph={in_graph}: {found}"
    for average in (True, False):
        variable, sgd = tf.Variable(tf.zeros((40, 50))), keras.optimizers.SGD(1.0)
        compression = hvdc.Compression.dgc(sgd, ratio=1, clip_norm=1)
        options = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
        wrapped = hvd.DistributedOptimizer(sgd, compression=compression, **options)
        wrapped.build([variable])
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * noise["matrix"])
            wrapped.minimize(loss, [variable], tape=tape)
        found = np.linalg.norm(variable.numpy())
        assert 0.9 < found < 1.1, f"{options}: {found}"


@case(8)
def payloads_that_would_move_more_than_dense_ones_go_dense():
    """9 bits an element from 8 ranks move more than a ring allreduce of 32."""
    compression = hvdc.Compression.natural()
    step = exchanged(compression)
    for i in range(3):
        result = step(told(i))
        for name in alike.SHAPES:
            mean = (
                sum(alike.gradients(rank, i)[name].astype(np.float64) for rank in range(hvd.size()))
                / hvd.size()
            )
            np.testing.assert_allclose(result[name].numpy(), mean, atol=1e-6)
    dense = compression.stats()["dense_bytes"]
    assert alike.sent_of_tensors(compression) == dense, compression.stats()


@case(2)
def residuals_follow_the_learning_rate():
    """efsignsgd with a schedule and with a rate that is set, of both kinds of optimizers and with a
    tape: as `simulate`, which is as published. Others wait at a rate of 0, and dgc's momentum too,
    as Keras' own does."""
    names, rates = ("matrix", "kernel"), [0.1, 0.2, 0.0, 0.02, 0.5, 0.05]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1, 2, 3, 4], rates)
    ef, topk = "efsignsgd:min_numel=0", "topk:ratio=0.1,min_numel=0"
    dgc = "dgc:ratio=0.1,momentum=0.9,min_numel=0"
    for kind, scheduled, taped, spec in (
        ("new", True, False, ef),
        ("legacy", True, True, ef),
        ("new", False, True, dgc),
        ("legacy", False, False, topk),
    ):
        gradients = [
            [{n: alike.gradients(rank, i)[n] for n in names} for rank in range(2)]
            for i in range(len(rates))
        ]
        if spec == dgc:
            gradients[2] = [{n: 0 * named[n] for n in names} for named in gradients[2]]
        means = [simulate(spec, gradients, **lr).mean for lr in ({"lr": rates}, {})]
        expected, plain = (
            {
                n: -sum(rate * mean[n].astype(np.float64) for rate, mean in zip(rates, its))
                for n in names
            }
            for its in means
        )
        variables = {name: tf.Variable(tf.zeros(alike.SHAPES[name]), name=name) for name in names}
        bound = SGD[kind](schedule if scheduled else rates[0], momentum=0.9 * (spec == dgc))
        compression = hvdc.Compression.from_spec(spec, bound)
        optimizer = bound if taped else hvd.DistributedOptimizer(bound, compression=compression)
        if kind == "new":
            optimizer.build(list(variables.values()))

        @tf.function
        def step(given):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(variables[n] * given[n]) for n in names])
            if taped:
                tape = hvdt.DistributedGradientTape(tape, compression=compression)
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, list(variables.values())), variables.values())
                )
            else:
                optimizer.minimize(loss, list(variables.values()), tape=tape)

        for i, rate in enumerate(rates):
            if not scheduled:
                optimizer.learning_rate = rate
            step(told(i, names))
        for name, variable in variables.items():
            what = (
                f"{kind} {'schedule' if scheduled else 'rate'} {'tape' if taped else 'optimizer'} "
                f"{name}"
            )
            error = np.abs(variable.numpy() - expected[name]).max()
            assert error <= 1e-4 * np.abs(expected[name]).max(), f"{what}: off by {error}"
            assert np.abs(plain[name] - expected[name]).max() > 0.01 * np.abs(expected[name]).max()
