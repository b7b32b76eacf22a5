"""Compressions that are given no optimizer: they train as bound ones do, and find out by themselves
what those are given."""

import copy
import logging
import os
import pickle
import tempfile

import alike
import horovod.tensorflow as hvdt
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from checks import raises, registry
from tensorflow import keras

import horovod_compress.tensorflow as hvdc

from .training import (
    LOSS,
    SGD,
    Own,
    assert_replicas_identical,
    data,
    fit,
    flat,
    horovods_tape,
    model_of,
    told,
    trained,
)

CASES, case = registry()
MOMENTUM = {"momentum": 0.9, "nesterov": True}


def pickled(spec):
    """A compression as a launcher gets it."""
    return pickle.loads(pickle.dumps(hvdc.Compression.from_spec(spec)))


def taped(compression, optimizer, steps=3, in_graph=True):
    """A variable after so many steps of a tape and this optimizer."""
    variable = tf.Variable(tf.ones(alike.SHAPES["matrix"]), name="matrix")

    def step(gradient):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * gradient)
        tape = hvdt.DistributedGradientTape(tape, compression=compression)
        optimizer.apply_gradients(zip(tape.gradient(loss, [variable]), [variable]))

    run = tf.function(step) if in_graph else step
    for i in range(steps):
        run(told(i)["matrix"])
    return variable.numpy()


@case(2)
def tapes_train_as_with_bound_compressions():
    """Bit for bit, where the optimizer matters, of both kinds, traced and eager. Other algorithms
    are unbound in `told_gradients_give_what_simulate_gives_to_the_last_bit`."""
    cases = [
        ("powersgd", keras.optimizers.SGD, {}, True),
        ("efsignsgd", keras.optimizers.SGD, {}, True),
        ("dgc:min_numel=0", SGD["new"], MOMENTUM, False),
        ("dgc:min_numel=0", SGD["legacy"], MOMENTUM, True),
        ("dgc", keras.optimizers.Adam, {}, True),
    ]
    for spec, make, options, in_graph in cases:
        optimizer, compression = make(0.1, **options), pickled(spec)
        bound = hvdc.Compression.from_spec(spec, optimizer)
        wanted, found = (
            taped(bound, optimizer, in_graph=in_graph),
            taped(compression, make(0.1, **options), in_graph=in_graph),
        )
        np.testing.assert_array_equal(found, wanted, spec)
        assert compression.config == bound.config, (compression.config, bound.config)
        assert compression.stats()["bytes_sent"] == bound.stats()["bytes_sent"] > 0


def scaled_by_one(optimizer):
    return keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic=False, initial_scale=1)


@case(2)
def fit_trains_as_with_bound_compressions():
    """Bit for bit: the momentum of Horovod's own optimizer is taken over, and counted once; so is
    that of a model's, beside a tape. A callback of Horovod's changes a legacy optimizer's for the
    first batch."""

    def callbacks(kind):
        return (
            [hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=2)]
            if kind == "legacy"
            else []
        )

    for kind in SGD:
        wanted = flat(
            trained("dgc:min_numel=0", kind, 5, sgd=MOMENTUM, callbacks=callbacks(kind))[0]
        )
        model, compression = model_of(), pickled("dgc:min_numel=0")
        optimizer = hvd.DistributedOptimizer(SGD[kind](0.05, **MOMENTUM), compression=compression)
        fit(model, optimizer, 5, callbacks(kind))
        np.testing.assert_array_equal(flat(model), wanted)
        for momentum in (
            hvdc.compression_of(optimizer).config["momentum"],
            optimizer.get_config()["momentum"],
        ):
            assert abs(momentum - 0.9) < 1e-6
        compression, sgd = pickled("dgc:min_numel=0"), SGD[kind](0.05, **MOMENTUM)
        model = Own(horovods_tape(compression))
        fit(model, scaled_by_one(sgd) if kind == "new" else sgd, 5, callbacks(kind))
        np.testing.assert_array_equal(flat(model), wanted)
        assert compression.stats()["steps"] == 5
    wrap = {"backward_passes_per_step": 2, "op": hvdt.Sum}
    wanted = flat(trained("efsignsgd", steps=6, wrap=wrap)[0])
    model, compression = model_of(), pickled("efsignsgd")
    optimizer = scaled_by_one(
        hvd.DistributedOptimizer(SGD["new"](0.05), compression=compression, **wrap)
    )
    fit(model, optimizer, 6)
    np.testing.assert_array_equal(flat(model), wanted)
    assert hvdc.compression_of(optimizer).config["follow_lr"]


@case(2)
def two_optimizers_with_one_compression():
    """A GAN's, of models with the same shapes: each gets its own, with its momentum."""
    keras.utils.set_random_seed(0)
    compression, sides = hvdc.Compression.dgc(ratio=0.05, min_numel=0), []
    for momentum in (0.5, 0.9):
        model = keras.Sequential(
            [
                keras.layers.Dense(5, input_shape=(64,), name=f"side{momentum}"),
                keras.layers.Dense(5),
            ]
        )
        model.compile(
            hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.05, momentum=momentum), compression=compression
            ),
            LOSS,
        )
        sides.append(model)
    x, y = data(12)
    for _ in range(3):
        for model in sides:
            model.train_on_batch(x.reshape(12, 64), y)
    for model, momentum in zip(sides, (0.5, 0.9)):
        its = hvdc.compression_of(model.optimizer)
        assert its.config["momentum"] == momentum and its.stats()["steps"] == 3
        assert set(its.stats_by_tensor()) == {
            variable.name.split(":")[0] for variable in model.trainable_variables
        }
        assert_replicas_identical(model)
    optimizers = [keras.optimizers.SGD(0.05, momentum=momentum) for momentum in (0.5, 0.9)]
    for optimizer in optimizers:
        taped(compression, optimizer)
    assert [compression.bind(optimizer).config["momentum"] for optimizer in optimizers] == [
        0.5,
        0.9,
    ]
    with raises(
        RuntimeError, "several optimizers have this compression", "hvdc.compression_of(optimizer)"
    ):
        compression.stats()
    assert hvdc.compression_of(keras.optimizers.SGD()) is None


@case(2)
def made_inside_a_traced_function():
    """One state for all its traces; two of the same spec in one trace are two."""
    variables = [tf.Variable(tf.zeros((40, 50)), name=f"w{i}") for i in range(3)]
    made, optimizer = [], keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(variables)

    @tf.function
    def step(gradient, more):
        first, second = (hvdc.Compression.dgc(ratio=0.01) for _ in range(2))
        made.append((first, second))
        with tf.GradientTape(persistent=True) as tape:
            losses = [tf.reduce_sum(variable * gradient) for variable in variables]
        gradients = hvdt.DistributedGradientTape(tape, compression=first).gradient(
            losses[0], variables[:1]
        )
        if more:
            gradients += hvdt.DistributedGradientTape(tape, compression=second).gradient(
                losses[1:], variables[1:]
            )
        optimizer.apply_gradients(zip(gradients, variables))

    for i in range(4):
        step(told(i)["matrix"], i % 2 == 1)
    assert len(made) >= 2 and len(set(made)) == 1
    ((compression, other),) = set(made)
    assert set(compression.state_dict()["step"].values()) == {4} and set(
        other.state_dict()["step"].values()
    ) == {2}
    assert (
        compression.config["momentum"] == other.config["momentum"] == 0.9
        and compression.stats()["residual_norm"] > 0
    )
    # It leaves that to both.
    assert not any(momentum.numpy().any() for momentum in optimizer.momentums)


@case(2)
def states_are_loaded_before_the_first_gradient():
    """By a callback of fit, and by hand, before a tape has an optimizer."""
    sgd = {"momentum": 0.9}
    with tempfile.TemporaryDirectory() as folder:
        path, saved = os.path.join(folder, "state"), []
        model, compression = model_of(), pickled("dgc:ratio=0.02")
        keep = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: saved.append(model.get_weights())
        )
        optimizer = hvd.DistributedOptimizer(SGD["new"](0.05, **sgd), compression=compression)
        fit(
            model,
            optimizer,
            6,
            [hvdc.StateCheckpoint(compression, path + "{epoch}"), keep],
            epochs=2,
        )
        again, compression = model_of(seed=5), pickled("dgc:ratio=0.02")
        again.set_weights(saved[0])
        optimizer = hvd.DistributedOptimizer(SGD["new"](0.05, **sgd), compression=compression)
        fit(
            again,
            optimizer,
            6,
            [hvdc.StateCheckpoint(compression, path, restore=f"{path}1")],
            epochs=1,
        )
        np.testing.assert_array_equal(flat(again), flat(model))
    compression = pickled("dgc")
    taped(compression, SGD["new"](0.1, **sgd))
    state = compression.state_dict()
    for copied in (pickle.dumps, copy.deepcopy):
        with raises(TypeError, "cannot be copied or pickled: save its state_dict()"):
            copied(compression)
    if hvd.rank() == 0:
        # A question on one rank only does not bring names out of step.
        assert hvdc.Compression.topk().stats()["steps"] == 0
    compression = pickled("dgc")
    compression.load_state_dict(state)
    assert set(compression.state_dict()["step"].values()) == {3}
    taped(compression, SGD["new"](0.1, **sgd))
    assert (
        set(compression.state_dict()["step"].values()) == {6}
        and compression.config["momentum"] == 0.9
    )


@case(2)
def what_is_taken_over_is_said_once():
    """By rank 0."""
    said, log = [], logging.getLogger("horovod_compress")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    try:
        trained("dgc:ratio=0.1", steps=2, sgd={"momentum": 0.9})
    finally:
        log.removeHandler(handler)
    assert [text for text in said if "SGD" in text] == [
        "dgc applies momentum=0.9 in place of SGD"
    ] * (hvd.rank() == 0), said


@case(2)
def what_an_unbound_compression_cannot_find_is_named():
    variable = tf.Variable(tf.ones((40, 50)))

    def gradient(compression):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * variable)
        return hvdt.DistributedGradientTape(tape, compression=compression).gradient(
            loss, [variable]
        )

    def with_two(compression, namespace):
        first, second = namespace.SGD(0.1), namespace.Adam(0.1)
        gradient(compression)
        return first, second

    with raises(
        ValueError,
        "dgc needs the optimizer",
        "or say momentum=",
        "has none in reach",
        "hvdc.Compression.dgc(optimizer)",
    ):
        gradient(hvdc.Compression.dgc())
    found = "has several in reach, SGD 'SGD', Adam 'Adam'"
    for namespace in (keras.optimizers, keras.optimizers.legacy):
        with raises(ValueError, "onebit: follow_lr needs the optimizer", found):
            with_two(hvdc.Compression.onebit(follow_lr=True), namespace)
    gradient(hvdc.Compression.dgc(momentum=0.9))
    compression = hvdc.Compression.topk(process_set=hvd.add_process_set([0]))
    with raises(ValueError, "is for the process set", "give both the same process_set"):
        gradient(compression)
    with raises(ValueError, "here comes a tensor"):
        hvdt.allreduce(tf.ones(3), compression=hvdc.Compression.topk())
