"""Keras 3, which tf.keras is by itself since TensorFlow 2.16: updates in `fit`, and tapes.

run_cases.py runs the cases, test_tensorflow.py asks.
"""

import functools
import os
import tempfile
import warnings

import alike
import horovod.tensorflow as hvdt
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from checks import raises, registry
from tensorflow_cases import start  # noqa: F401

import horovod_compress as hc
import horovod_compress.tensorflow as hvdc
from horovod_compress import MismatchError
from horovod_compress.session.updates import compressor_for_updates

CASES, case = registry()
keras = tf.keras
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BATCH = 12


def model_of(seed=0, **options):
    """1 800 parameters in four variables, of the same names each time."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(24, "relu", **options), keras.layers.Dense(5)]
    return keras.Sequential([keras.Input((64,)), *layers])


def data(steps, rank=None):
    rng = np.random.default_rng(hvd.rank() if rank is None else rank)
    x = rng.standard_normal((steps * BATCH, 64)).astype(np.float32)
    return x, (x @ np.random.default_rng(7).standard_normal((64, 5))).argmax(1)


def fit(model, optimizer, steps, callbacks=(), **options):
    """A model that has this optimizer goes on with its traces."""
    if getattr(model, "optimizer", None) is not optimizer:
        model.compile(optimizer, LOSS)
    options = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks), **options}
    model.fit(*data(steps), BATCH, **options)
    return model


def flat(model):
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])


def assert_alike(model):
    mine = flat(model)
    found = hvdt.allgather(tf.constant(mine[None]), name="alike").numpy()
    assert np.isfinite(mine).all() and (found == found[0]).all()
    return mine


def takes_updates(id):
    try:
        return bool(compressor_for_updates(id, 1))
    except ValueError:
        return False


@case(2, 3)
def every_algorithm_exchanges_updates_in_fit():
    """Ranks that begin differently are alike after each exchange."""
    for every in (1, 2):
        specs = [f"{id}:min_numel=0" for id in hc.available() if takes_updates(id)]
        specs = ["none", *(each for each in specs if "16" not in each and "none" not in each)]
        optimizer = hvdc.UpdateOptimizer(keras.optimizers.Adam(0.01), specs[0], every=every)
        model = model_of(hvd.rank())
        for spec in specs if every == 1 else specs[:3]:
            optimizer.compression.switch(spec)
            fit(model, optimizer, 2)
            assert_alike(model)
        assert optimizer.compression.stats()["steps"] == (2 * len(specs) if every == 1 else 3)


@case(1, 2, 3)
def dense_updates_are_those_of_one_process():
    """SGD's update is linear in gradients. A rank alone takes part, too."""
    sgd = functools.partial(keras.optimizers.SGD, 0.05, momentum=0.9, nesterov=True)
    batches = [data(6, rank) for rank in range(hvd.size())]
    x, y = (
        np.concatenate([its.reshape(6, BATCH, *its.shape[1:]) for its in part], 1).reshape(
            -1, *part[0].shape[1:]
        )
        for part in zip(*batches)
    )
    reference = model_of()
    reference.compile(sgd(), LOSS)
    reference.fit(x, y, BATCH * hvd.size(), shuffle=False, verbose=0)
    optimizer = hvdc.UpdateOptimizer(sgd(), "none")
    model = fit(model_of(), optimizer, 6)
    optimizer.take_part()
    error = np.abs(assert_alike(model) - flat(reference)).max()
    assert error <= 1e-6 * np.abs(flat(reference)).max(), error


@case(2)
def rounds_are_those_of_local_steps():
    """Of Keras 3's own optimizers, with an outer one as in DiLoCo (arXiv 2311.08105, Algorithm
    1)."""
    for make in (
        functools.partial(keras.optimizers.AdamW, 0.01),
        functools.partial(hvdc.AdamW, 0.01, ranks=2),
    ):
        outer = hvdc.Nesterov(0.7, 0.9)
        model, local = model_of(), model_of()
        fit(model, hvdc.UpdateOptimizer(make(), "none", every=3, outer=outer), 9)
        plain, (x, y) = make(), data(9)
        shared, momentum = flat(local), 0
        for step in range(9):
            rows = slice(step * BATCH, (step + 1) * BATCH)
            with tf.GradientTape() as tape:
                loss = LOSS(y[rows], local(x[rows], training=True))
            gradients = tape.gradient(loss, [v.value for v in local.trainable_variables])
            plain.apply(gradients, local.trainable_variables)
            if step % 3 == 2:
                mean = hvdt.allreduce(tf.constant(flat(local) - shared), name="mean").numpy()
                momentum = 0.9 * momentum + mean
                shared = shared + np.float32(0.7) * (mean + np.float32(0.9) * momentum)
                at = 0
                for variable in local.trainable_variables:
                    size = int(np.prod(variable.shape))
                    variable.assign(shared[at : at + size].reshape(variable.shape))
                    at += size
        np.testing.assert_allclose(assert_alike(model), flat(local), atol=2e-5)


@case(2)
def what_is_not_finite_on_one_rank_moves_nobody():
    """With a scaler inside, whose rank skips its own step, and without one."""
    for inside in (keras.mixed_precision.LossScaleOptimizer, lambda optimizer: optimizer):
        model, optimizer = model_of(), hvdc.UpdateOptimizer(inside(keras.optimizers.SGD(0.1)))
        fit(model, optimizer, 2)
        before, (x, y) = assert_alike(model), data(1)
        model.train_on_batch(x * (np.nan if hvd.rank() else 1), y)
        after = assert_alike(model)
        assert np.array_equal(after, before) == (not hasattr(optimizer, "inner_optimizer"))
        fit(model, optimizer, 2)
        assert not np.array_equal(assert_alike(model), after)
    outside = keras.mixed_precision.LossScaleOptimizer(
        hvdc.UpdateOptimizer(keras.optimizers.SGD(0.1))
    )
    with raises(ValueError, "UpdateOptimizer(keras.mixed_precision.LossScaleOptimizer"):
        fit(model_of(), outside, 1)


@case(2)
def constraints_hold_after_an_exchange():
    """Also where gradients of several steps add up."""
    for accumulated in (None, 2):
        model = model_of(kernel_constraint=keras.constraints.MaxNorm(0.5))
        sgd = keras.optimizers.SGD(0.5, gradient_accumulation_steps=accumulated)
        fit(model, hvdc.UpdateOptimizer(sgd, "topk:ratio=0.1,min_numel=0"), 6)
        assert_alike(model)
        kernel = model.layers[0].kernel.numpy()
        assert np.linalg.norm(kernel, axis=0).max() <= 0.5 + 1e-6


@case(2)
def training_resumes_bit_for_bit():
    for every in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            path, kept = os.path.join(folder, "state"), []

            def run(first, seed, path=path, kept=kept, every=every):
                model = model_of(seed)
                # In its own state, or in that of an optimizer which did not exchange.
                adam = keras.optimizers.Adam(0.01)
                if not first:
                    adam.build(model.trainable_variables)
                optimizer = hvdc.UpdateOptimizer(adam, "topk:ratio=0.1,min_numel=0", every=every)
                if first:
                    optimizer.build(model.trainable_variables)
                if first:
                    for variable, value in zip([*model.variables, *optimizer.variables], kept):
                        variable.assign(value)
                callback = hvdc.StateCheckpoint(
                    optimizer.compression, path + "{epoch}", f"{path}1" if first else None
                )

                def keep(epoch, logs):
                    if not epoch:
                        its = [*model.variables, *optimizer.variables]
                        kept[:] = [each.numpy() for each in its]

                keeps = keras.callbacks.LambdaCallback(on_epoch_end=keep)
                shares = hvdc.ShareUpdates()
                options = {"epochs": 2, "initial_epoch": first}
                return assert_alike(fit(model, optimizer, 3, [shares, callback, keeps], **options))

            expected = run(0, 0)
            np.testing.assert_array_equal(run(1, 9), expected)


def stepping(model, optimizer, compression):
    """A function of a step that takes it with a tape of Horovod's."""
    x, y = data(8)
    variables = [v.value for v in model.trainable_variables]

    @tf.function
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
            if hasattr(optimizer, "inner_optimizer"):
                loss = optimizer.scale_loss(loss)
        tape = hvdt.DistributedGradientTape(tape, compression=compression)
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)

    return lambda i: train(x[i * BATCH : (i + 1) * BATCH], y[i * BATCH : (i + 1) * BATCH])


@case(2)
def tapes_over_values_take_every_algorithm():
    for id in hc.available():
        model, optimizer = model_of(), keras.optimizers.SGD(0.05, momentum=0.9)
        optimizer.build(model.trainable_variables)
        step = stepping(model, optimizer, hvdc.Compression.from_spec(id))
        for i in range(2):
            step(i)
        assert_alike(model)


@case(2)
def a_tape_takes_over_momentum():
    """dgc's dense limit is plain Horovod, with a loss scale, too."""
    for wrap in (
        lambda sgd: sgd,
        lambda sgd: keras.mixed_precision.LossScaleOptimizer(sgd, initial_scale=8.0),
    ):
        found = []
        for ours in (False, True):
            model, sgd = model_of(), keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)
            compression = hvdt.Compression.none
            optimizer = wrap(sgd)
            optimizer.build(model.trainable_variables)
            if ours:
                options = {} if optimizer is sgd else {"grad_scaler": optimizer}
                compression = hvdc.Compression.dgc(
                    sgd, ratio=1, masking=False, min_numel=0, **options
                )
            step = stepping(model, optimizer, compression)
            for i in range(6):
                step(i)
            found.append(assert_alike(model))
        np.testing.assert_allclose(*found, atol=2e-6)


@case(2)
def residuals_follow_a_schedule():
    rates, spec = [0.1, 0.2, 0.02, 0.5], "efsignsgd:min_numel=0"
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1, 2], rates)
    gradients = [
        [{"w": alike.gradients(rank, step)["matrix"]} for rank in range(2)] for step in range(4)
    ]
    means = hc.simulate(spec, gradients, lr=rates).mean
    weight = keras.Variable(np.zeros((40, 50), np.float32))
    optimizer = keras.optimizers.SGD(schedule)
    compression = hvdc.Compression.from_spec(spec, optimizer)
    optimizer.build([weight])

    @tf.function
    def step(gradient):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight.value * gradient)
        tape = hvdt.DistributedGradientTape(tape, compression=compression)
        optimizer.apply(tape.gradient(loss, [weight.value]), [weight])

    for its in gradients:
        step(tf.constant(its[hvd.rank()]["w"]))
    expected = -sum(rate * mean["w"] for rate, mean in zip(rates, means))
    np.testing.assert_allclose(weight.numpy(), expected, atol=1e-6)


@case(2)
def what_keras_3_cannot_is_refused():
    for make in (
        lambda sgd: hvdc.Compression.topk(),
        lambda sgd: hvdc.Compression.topk(sgd),
        lambda sgd: hvdc.Compression.dgc(sgd),
    ):
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        compression = make(sgd)
        optimizer = hvd.DistributedOptimizer(sgd, compression=compression)
        words = "UpdateOptimizer(optimizer, compression)", "v.value for v in", "LEGACY_KERAS=1"
        with raises(ValueError, *words):
            fit(model_of(), optimizer, 1)
    with raises(ValueError, "moments=microbatch"):
        hvdc.Compression.variance(keras.optimizers.SGD(0.1), moments="microbatch")
    with raises(ValueError, "TensorFlowState(variables)"):
        hvdc.elastic.TensorFlowKerasState(model_of(), keras.optimizers.SGD(0.1))
    averaging = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1, use_ema=True))
    with raises(ValueError, "use_ema"):
        hvdc.UpdateOptimizer(averaging)
    with raises(TypeError, f"tf.keras, which is Keras {keras.__version__}", "TF_USE_LEGACY_KERAS"):
        hvdc.UpdateOptimizer(object())
    model = fit(model_of(), hvdc.UpdateOptimizer(keras.optimizers.SGD(0.1)), 1)
    with tempfile.TemporaryDirectory() as folder:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model.save(f"{folder}/model.keras")
        assert any("exchanges nothing when it is loaded" in str(each.message) for each in told)
    with raises(ValueError, "ShareUpdates is for models"):
        fit(model_of(), keras.optimizers.SGD(0.1), 1, [hvdc.ShareUpdates()])
    # Ranks' models differ.
    keras.utils.set_random_seed(0)
    layers = [keras.Input((64,)), keras.layers.Dense(7 + hvd.rank()), keras.layers.Dense(5)]
    with raises(MismatchError, "variables"):
        fit(keras.Sequential(layers), hvdc.UpdateOptimizer(keras.optimizers.SGD(0.1)), 1)
    copy = hvd.DistributedOptimizer(hvdc.UpdateOptimizer(keras.optimizers.SGD(0.1)))
    with raises(ValueError, "a copy of an UpdateOptimizer"):
        fit(model_of(), copy, 1)
