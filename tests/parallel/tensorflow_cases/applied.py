"""What optimizers apply, next to what compressions have seen."""

import os
import tempfile
import warnings

import horovod.tensorflow as hvdt
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from checks import raises, registry
from tensorflow import keras

import horovod_compress.tensorflow as hvdc
from horovod_compress.session import notices
from horovod_compress.tensorflow.optimizer import build

from .training import (
    LOSS,
    SGD,
    Own,
    assert_replicas_identical,
    data,
    horovods_tape,
    make_variables,
    model_of,
)

CASES, case = registry()
SPEC = "dgc:ratio=0.1,min_numel=0"
ADVICE = "hvd.DistributedGradientTape(tape", "hvdc.UpdateOptimizer(optimizer"


def fitted(model, optimizer, steps=2, **options):
    model.compile(optimizer, LOSS, **options)
    model.fit(*data(12 * steps), batch_size=12, shuffle=False, verbose=0)


def fitted_with_variables(model, optimizer, **options):
    make_variables(optimizer, model)
    fitted(model, optimizer, **options)


@case(2)
def gradients_that_nobody_has_reduced_are_refused():
    """Those of a training step of one's own, by optimizers of both kinds, traced and eagerly."""
    for make in (*SGD.values(), keras.optimizers.Adam, keras.optimizers.legacy.Adam):
        for options in ({}, {"run_eagerly": True}):
            optimizer, compression = make(0.05), hvdc.Compression.from_spec(SPEC)
            wrapped = hvd.DistributedOptimizer(optimizer, compression=compression)
            with raises(ValueError, *ADVICE):
                fitted(Own(), wrapped, **options)
            hvdc.Compression.from_spec(SPEC, optimizer)
            with raises(ValueError, *ADVICE):
                fitted(Own(), optimizer, **options)


@case(2)
def training_steps_of_ones_own_that_reduce():
    for make, options in zip(SGD.values(), ({}, {"run_eagerly": True})):
        compression = hvdc.Compression.from_spec(SPEC)
        model = Own(horovods_tape(compression))
        fitted_with_variables(model, make(0.05, momentum=0.9), **options)
        assert compression.stats()["steps"] == 2
        assert_replicas_identical(model)
        model = Own()
        updating = hvdc.UpdateOptimizer(make(0.05), "topk:ratio=0.1")
        fitted_with_variables(model, updating, **options)
        assert_replicas_identical(model)
        model = Own(hvdt.DistributedGradientTape)
        compression = hvdc.Compression.from_spec(SPEC)
        wrapped = hvd.DistributedOptimizer(make(0.05), compression=compression)
        fitted_with_variables(model, wrapped)
        assert_replicas_identical(model)
    variable, sgd = tf.Variable(tf.ones(3)), keras.optimizers.SGD(0.1)
    optimizer = hvd.DistributedOptimizer(sgd, compression=hvdc.Compression.topk())
    # This makes the optimizer's variables.
    optimizer.apply_gradients([(tf.zeros(3), variable)])
    optimizer.register_local_var(variable)
    optimizer.apply_gradients([(tf.ones(3), variable)])


@case(2)
def gradients_that_need_no_compression_are_applied():
    """Zeros that make an optimizer's variables, what hvd.allreduce has averaged, and what a partial
    tape leaves to its rank, in functions and, where that can be known, eagerly."""
    for make in SGD.values():
        variables = [tf.Variable(tf.ones(3)) for _ in range(2)]
        optimizer = make(0.1)
        hvdc.Compression.from_spec(SPEC, optimizer)
        build(optimizer, variables)

        def apply(gradient_of, optimizer=optimizer, variables=variables):
            optimizer.apply_gradients([(gradient_of(variable), variable) for variable in variables])

        zeros, number = tf.zeros(3), iter(range(9))
        for gradient_of in (
            lambda _: zeros,
            tf.zeros_like,
            lambda _: hvdt.allreduce(tf.ones(3), name=f"mean{next(number)}"),
        ):
            tf.function(apply)(gradient_of)
        np.testing.assert_allclose(variables[0].numpy(), 0.9)
    for in_graph in (True, False):
        layers = [keras.layers.Dense(30), keras.layers.Dense(5)]
        model = keras.Sequential(layers)
        model.build((None, 40))
        optimizer = keras.optimizers.SGD(0.1)
        build(optimizer, model.trainable_variables)
        compression = hvdc.Compression.from_spec("topk:ratio=0.1,min_numel=0", optimizer)

        def step(model=model, layers=layers, optimizer=optimizer, compression=compression):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(tf.ones((2, 40))))
            tape = hvdt.PartialDistributedGradientTape(
                tape, compression=compression, local_layers=layers[1:]
            )
            for pairs in tape.get_local_and_global_gradients(loss, model.trainable_variables):
                optimizer.apply_gradients([(gradient, variable) for variable, gradient in pairs])

        (tf.function(step) if in_graph else step)()
        assert compression.stats()["steps"] == 1


@case(2)
def two_optimizers_of_one_tape():
    """The momentum of the one that the compression is bound to would be given to the other's
    variables: also where each step is another trace, each optimizer gets all variables, and where
    the bound one applies nothing. One alone may apply a part at a time."""
    for kind, in_graph, appliers, steps in (
        # Which optimizer applies each variable's gradient; after how many steps it is refused.
        ("new", True, (0, 0), None),
        ("legacy", False, (0, 0), None),
        ("new", True, (0, 1), 1),
        ("new", False, (1, 0), 1),
        ("legacy", True, (1, 0), 1),
        ("legacy", False, (0, 1), 1),
        ("new", False, (1, 1), 2),
        ("legacy", True, (1, 1), 2),
    ):
        variables = [tf.Variable(tf.ones((40, 50)), name=f"v{i}") for i in range(2)]
        optimizers = [SGD[kind](0.1, momentum=0.9), SGD[kind](0.1)]
        compression = hvdc.Compression.dgc(optimizers[0], ratio=1, min_numel=0, masking=False)
        for optimizer in optimizers:
            build(optimizer, variables)

        def step(number, appliers=appliers, compression=compression, given=(variables, optimizers)):
            variables, optimizers = given
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(variable) for variable in variables])
            tape = hvdt.DistributedGradientTape(tape, compression=compression)
            gradients = tape.gradient(loss, variables)
            for i, k in enumerate(appliers):
                its = [gradients[j] if i == j else None for j in range(2)]
                optimizers[k].apply_gradients(zip(its, variables))

        run = tf.function(step) if in_graph else step
        for number in range(steps or 2):
            run(number)
        if steps:
            with raises(tf.errors.OpError, "has changed, and not by", "give each a"):
                run(steps)
        else:
            for variable in variables:
                np.testing.assert_allclose(variable.numpy(), 1 - 0.1 * (1 + 1.9), rtol=1e-6)


@case(2)
def gradients_that_are_added_up_are_warned_of():
    """Momentum counts in each. Not where the second step is not finite, so that nobody applies
    it."""
    for traced, times in ((True, 2), (False, 2), (True, 1)):
        variable, sgd = tf.Variable(tf.ones((40, 50)), name="v"), SGD["new"](0.1, momentum=0.9)
        compression = hvdc.Compression.from_spec(SPEC, sgd)
        build(sgd, [variable])

        def step(factor, variable=variable, compression=compression, sgd=sgd, times=times):
            results = []
            for _ in range(times):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(variable) * factor
                tape = hvdt.DistributedGradientTape(tape, compression=compression)
                results.extend(tape.gradient(loss, [variable]))
            if tf.reduce_all(tf.math.is_finite(results[0])):
                sgd.apply_gradients([(tf.add_n(results), variable)])

        run = tf.function(step) if traced else step
        notices._warned.clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for factor in (1.0, 1.0, np.inf if times == 1 else 1.0, 1.0):
                run(tf.constant(factor))
        words = [each for each in told if "v came twice" in str(each.message)]
        assert len(words) == times - 1, (traced, times)
        assert int(sgd.iterations) == times + 2


@case(2)
def compressions_that_are_made_anew_are_warned_of():
    """For each step, in eager code; not for each two."""
    for steps in (1, 2):
        variable, sgd = tf.Variable(tf.ones((40, 50)), name="v"), SGD["new"](0.1)
        notices._warned.clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for i in range(3 * steps + 1):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(variable)
                if i % steps == 0:
                    compression = hvdc.Compression.topk(ratio=0.1, min_numel=0)
                tape = hvdt.DistributedGradientTape(tape, compression=compression)
                sgd.apply_gradients(zip(tape.gradient(loss, [variable]), [variable]))
        words = [each for each in told if "another compression in each step" in str(each.message)]
        assert len(words) == (steps == 1), steps


@case(2)
def a_model_that_is_loaded_without_its_compression():
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model, compression = model_of(), hvdc.Compression.topk(ratio=0.1)
        adam = keras.optimizers.Adam(0.01)
        wrapped = hvd.DistributedOptimizer(adam, compression=compression)
        fitted_with_variables(model, wrapped)
        for name in ("saved.h5", "again.h5"):
            model.save(os.path.join(folder, name))
        loaded = hvd.load_model(os.path.join(folder, "saved.h5"))
        path = os.path.join(folder, "state")
        states = hvdc.StateCheckpoint(hvdc.Compression.topk(ratio=0.1), path)
        loaded.fit(*data(24), batch_size=12, verbose=0, epochs=2, callbacks=[states])
        compression = hvdc.Compression.topk(ratio=0.1)
        loaded = hvd.load_model(os.path.join(folder, "saved.h5"), compression=compression)
        states = hvdc.StateCheckpoint(compression, path)
        loaded.fit(*data(24), batch_size=12, verbose=0, callbacks=[states])
        assert compression.stats()["steps"] == 2
    words = [str(each.message) for each in told if issubclass(each.category, RuntimeWarning)]
    assert sum("without compression=" in each for each in words) == 1, words
    assert sum("compressed nothing in a whole epoch" in each for each in words) == 1, words
    assert np.isfinite(loaded.get_weights()[0]).all()


@case(2)
def a_model_is_saved_with_the_function_that_reduces():
    """As SavedModel has it; it can be loaded, and training goes on."""
    for spec in ("topk:ratio=0.1", "fp16"):
        model, compression = model_of(), hvdc.Compression.from_spec(spec)
        wrapped = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=compression)
        fitted_with_variables(model, wrapped)
        with tempfile.TemporaryDirectory() as folder:
            model.save(os.path.join(folder, "model"))
            again = keras.models.load_model(os.path.join(folder, "model"), compile=False)
        np.testing.assert_array_equal(again.get_weights()[0], model.get_weights()[0])
        model.fit(*data(24), batch_size=12, verbose=0)


@case(2)
def checkpoints_hold_nothing_of_a_compression():
    """So they fit an optimizer with one as they fit one without, each way."""
    optimizers = {}
    for spec in ("topk:ratio=0.1", None):
        model = model_of()
        compression = hvdc.Compression.from_spec(spec) if spec else hvdt.Compression.none
        wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
        fitted_with_variables(model, wrapped)
        optimizers[spec] = tf.train.Checkpoint(model=model, optimizer=wrapped)
    for saved, restored in (optimizers.values(), reversed(optimizers.values())):
        with tempfile.TemporaryDirectory() as folder:
            status = restored.restore(saved.save(os.path.join(folder, "checkpoint")))
            status.assert_consumed()
