"""A model, data that differs between ranks, and training as users write it: what cases in
TensorFlow share."""

import sys

import alike
import horovod.tensorflow as hvdt
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow import keras

import horovod_compress.tensorflow as hvdc

SGD = {"new": keras.optimizers.SGD, "legacy": keras.optimizers.legacy.SGD}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def start():
    """The rank, ready to run cases."""
    assert "torch" not in sys.modules, "TensorFlow's adapter imports PyTorch"
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init(process_sets="dynamic")
    # TensorFlow rewrites each graph before its first run, a fifth of a job's time. Ranks that Gloo
    # connects have it done, as users' programs do.
    if not hvd.gloo_enabled():
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    return hvd.rank()


def _inputs(seed):
    """Of a model that has the same names and values whenever it is made."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    return keras.Input((8, 8, 1))


def model_of(seed=0):
    """Two dense layers, 2 thousand parameters. Two variables: TensorFlow traces each of them."""
    inputs = _inputs(seed)
    x = keras.layers.Flatten()(inputs)
    x = keras.layers.Dense(24, activation="relu", use_bias=False)(x)
    return keras.Model(inputs, keras.layers.Dense(5, use_bias=False)(x))


def deep_model_of(seed=0):
    """A convolution, normalization, a layer that is used twice, and dense layers, 9 thousand
    parameters in ten variables."""
    x = inputs = _inputs(seed)
    x = keras.layers.Conv2D(8, 3, activation="relu")(x)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(24, activation="relu")(x)
    shared = keras.layers.Dense(24, activation="relu")
    return keras.Model(inputs, keras.layers.Dense(5)(shared(shared(x))))


def data(n=120, seed=0):
    """So many images of this rank, which can be learnt."""
    rng = np.random.default_rng((seed, hvd.rank()))
    x = rng.standard_normal((n, 8, 8, 1)).astype(np.float32)
    return x, (x.reshape(n, -1) @ np.random.default_rng(7).standard_normal((64, 5))).argmax(1)


def flat(model):
    return np.concatenate([v.numpy().astype(np.float32).ravel() for v in model.trainable_variables])


def assert_replicas_identical(model, **options):
    mine = flat(model)
    assert np.isfinite(mine).all(), "parameters are not finite"
    all_of_them = hvdt.allgather(tf.constant(mine[None]), name="replicas", **options).numpy()
    assert (all_of_them == all_of_them[0]).all(), "replicas differ"


def assert_close(model, reference, tolerance=1e-6):
    a, b = flat(model), flat(reference)
    error = np.abs(a - b).max() / np.abs(b).max()
    assert error <= tolerance, f"parameters differ by {error:.2e} relative"


def make_variables(optimizer, model):
    """Makes the optimizer's. Where a first step makes them, Keras traces it twice."""
    make = getattr(optimizer, "build", None) or optimizer._create_all_weights
    make(model.trainable_variables)


def fit(model, optimizer, steps=20, callbacks=(), seed=0, **options):
    """Trains, and returns the losses of epochs. A model that has this optimizer goes on with its
    traces."""
    x, y = data(12 * steps, seed)
    if getattr(model, "optimizer", None) is not optimizer:
        make_variables(optimizer, model)
        model.compile(optimizer, LOSS)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    return model.fit(
        x, y, batch_size=12, shuffle=False, verbose=0, callbacks=callbacks, **options
    ).history["loss"]


def trained(spec, kind="new", steps=20, seed=0, sgd=None, wrap=None, make=model_of, **options):
    """(model, compression) after so many steps; spec None: plain Horovod."""
    model = make(seed)
    optimizer = SGD[kind](0.05, **(sgd or {}))
    compression = (
        hvdt.Compression.none if spec is None else hvdc.Compression.from_spec(spec, optimizer)
    )
    fit(
        model,
        hvd.DistributedOptimizer(optimizer, compression=compression, **(wrap or {})),
        steps,
        **options,
    )
    return model, compression


def horovods_tape(compression):
    """What makes a tape Horovod's."""
    return lambda tape: hvdt.DistributedGradientTape(tape, compression=compression)


class Own(keras.Model):
    """A model with the training step of Keras' guide; `wrap` says what becomes of its tape."""

    def __init__(self, wrap=lambda tape: tape):
        super().__init__()
        self.inner, self.wrap = model_of(), wrap

    def call(self, x, training=None):
        return self.inner(x, training=training)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = LOSS(y, self(x, training=True))
        gradients = self.wrap(tape).gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return {"loss": loss}


def exchanged(compression, names=tuple(alike.SHAPES), in_graph=True, tape_options=None):
    """A function of gradients, by name, that gives what a tape makes of them."""
    variables = {name: tf.Variable(tf.zeros(alike.SHAPES[name]), name=name) for name in names}

    def step(gradients):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(variables[name] * gradients[name]) for name in names])
        tape = hvdt.DistributedGradientTape(tape, compression=compression, **(tape_options or {}))
        return dict(zip(names, tape.gradient(loss, [variables[name] for name in names])))

    return tf.function(step) if in_graph else step


def told(step, names=tuple(alike.SHAPES)):
    gradients = alike.gradients(hvd.rank(), step)
    return {name: tf.constant(gradients[name]) for name in names}
