"""What TensorFlow's users do beside the plain training loop, on real ranks.

run_cases.py runs the cases, test_users.py asks.
"""

import os
import warnings

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from checks import raises, registry
from tensorflow_cases import start  # noqa: F401

import horovod_compress.tensorflow as hvdc
from horovod_compress.session import notices

CASES, case = registry()
keras = tf.keras


@case(2)
def discarded_gradients_do_not_come_back():
    """Bit for bit as if the step had never been: gradients of a tape that are not applied, and such
    as are not finite."""
    for spec in (
        "topk:sample_ratio=1,min_numel=0",
        "dgc:sample_ratio=1,momentum=0.9,min_numel=0",
        "powersgd:min_numel=0",
    ):
        trained = []
        for bad in (None, 1e6, float("nan")):
            weight = tf.Variable(tf.zeros((40, 50)))
            compression = hvdc.Compression.from_spec(spec, discardable=True)

            @tf.function
            def gradient_of(factor, weight=weight, compression=compression):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(weight * factor)
                return hvd_tape(tape, compression).gradient(loss, [weight])[0]

            for step in range(4):
                factor = np.random.default_rng((step, hvd.rank())).standard_normal(
                    (40, 50), np.float32
                )
                if bad is not None and step % 2:
                    result = gradient_of(
                        tf.constant(factor * np.float32(bad if hvd.rank() == 1 else 1))
                    ).numpy()
                    assert np.isfinite(result).all() == np.isfinite(bad)
                    if np.isfinite(bad):
                        compression.discard()
                weight.assign_sub(gradient_of(tf.constant(factor)))
            trained.append((weight.numpy(), compression.state_dict()["tensors"]))
            assert compression.stats()["steps_undone"] == (0 if bad is None else 2)
        for weights, state in trained[1:]:
            np.testing.assert_array_equal(weights, trained[0][0])
            for arrays, expected in zip(state.values(), trained[0][1].values()):
                for key, array in arrays.items():
                    np.testing.assert_array_equal(array, expected[key], f"{spec} {key}")
    with raises(RuntimeError, "discardable=True"):
        hvdc.Compression.topk().discard()


def hvd_tape(tape, compression):
    import horovod.tensorflow

    return horovod.tensorflow.DistributedGradientTape(tape, compression=compression)


@case(2)
def mistakes_get_clear_errors():
    weights = [tf.Variable(tf.zeros((100, 100)))]
    with raises(TypeError, "an option goes by its name: ratio=0.01"):
        hvdc.Compression.dgc(keras.optimizers.SGD(0.1), weights)
    for wrong in (keras.Sequential([keras.layers.Dense(2, input_shape=(2,))]), weights):
        try:
            hvdc.Compression.dgc(wrong)
        except ValueError as error:
            assert "bound to a Keras optimizer" in str(error) and len(str(error)) < 200, error
        else:
            raise AssertionError("no error")
    for mistake in (hvdc.Compression.topk, hvdc.Compression):
        model = keras.Sequential([keras.layers.Dense(2, input_shape=(2,))])
        model.compile(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=mistake), "mse"
        )
        with raises(TypeError, "call it, as in compression="):
            model.train_on_batch(np.ones((4, 2)), np.ones((4, 2)))


def elastic_model_with_loss_scale(dynamic):
    compression = hvdc.Compression.topk()
    model = keras.Sequential([keras.layers.Dense(2, input_shape=(2,))])
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression)
    model.compile(
        keras.mixed_precision.LossScaleOptimizer(wrapped, dynamic=dynamic, initial_scale=8), "mse"
    )
    hvdc.elastic.TensorFlowKerasState(model, compression=compression).sync()
    return model


@case(2)
def mistakes_in_elastic_jobs_are_named():
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        with raises(ValueError, "Horovod reduces nothing", "hvdc.Compression.topk(optimizer)"):
            hvdc.elastic.TensorFlowState([tf.Variable(0.0)], compression=hvdc.Compression.topk())
        with raises(ValueError, "signsgd adds up integers", "take another algorithm"):
            hvdc.Compression.signsgd(keras.optimizers.SGD(0.1))
        with raises(ValueError, "dense=int8 adds up integers", "say dense=fp32 or dense=fp16"):
            hvdc.Compression.dgc(keras.optimizers.SGD(0.1), dense="int8")
        with raises(ValueError, "needs the variables to keep"):
            hvdc.elastic.TensorFlowState([])
        optimizer, x = keras.optimizers.SGD(0.1), np.ones((4, 2))
        compression = hvdc.Compression.topk(optimizer)
        model = keras.Sequential([keras.layers.Dense(2, input_shape=(2,))])
        wrapped = hvd.DistributedOptimizer(optimizer, compression=compression)
        model.compile(wrapped, "mse")
        with raises(RuntimeError, "hvdc.elastic.TensorFlowKerasState(", "and nowhere before it"):
            model.train_on_batch(x, x[:, :2])
        hvdc.elastic.TensorFlowKerasState(model, compression=compression).sync()
        model.train_on_batch(x, x[:, :2])
        assert compression.stats()["bytes_sent"] > 0
        compression = hvdc.Compression.topk(keras.optimizers.SGD(0.1))
        model.compile(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression), "mse"
        )
        hvdc.elastic.TensorFlowKerasState(model, compression=compression).sync()
        with raises(ValueError, "bound to another optimizer"):
            model.train_on_batch(x, x[:, :2])
        model = elastic_model_with_loss_scale(dynamic=False)
        model.train_on_batch(x, x[:, :2])
        assert np.isfinite(model.get_weights()[0]).all()
        model = elastic_model_with_loss_scale(dynamic=True)
        with raises(ValueError, "dynamic=False"):
            model.train_on_batch(x, x[:, :2])
    finally:
        del os.environ["HOROVOD_ELASTIC"]


@case(2)
def a_change_of_momentum_that_is_not_followed_is_told():
    for make in (keras.optimizers.legacy.SGD, keras.optimizers.SGD):
        optimizer = make(0.1, momentum=0.9)
        compression = hvdc.Compression.dgc(optimizer)
        model = keras.Sequential([keras.layers.Dense(2, input_shape=(2,))])
        model.compile(hvd.DistributedOptimizer(optimizer, compression=compression), "mse")
        notices._warned.clear()
        # Once, as a callback of Horovod's changes it in every batch.
        for momentum, times in ((0.9, 0), (0.5, 1), (0.25, 0)):
            model.optimizer.momentum = momentum
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model.train_on_batch(np.ones((4, 2)), np.ones((4, 2)))
            told = [each for each in caught if "momentum was changed" in str(each.message)]
            assert len(told) == times, (momentum, told)


@case(2)
def graph_mode_of_tensorflow_1():
    """The last: eager execution does not come back."""
    tf.compat.v1.disable_eager_execution()
    with raises(
        ValueError, "TensorFlow 1's graph mode is not supported", "disable_eager_execution"
    ):
        hvdc.Compression.topk().handshake()
