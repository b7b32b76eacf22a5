"""Mistakes are errors: on every rank, in words, without a hang."""

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
from horovod_compress import MismatchError, kernels
from horovod_compress.session import notices

from .training import LOSS, data, exchanged, model_of, told

CASES, case = registry()


class OwnSGD(keras.optimizers.SGD):
    def update_step(self, gradient, variable):
        super().update_step(gradient / 2, variable)


@case(2)
def a_variable_that_is_given_twice():
    """As of lists of layers' variables that were joined, where layers share some."""
    variable = tf.Variable(tf.ones((40, 50)), name="tied")

    def gradients(spec):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable)
        compression = hvdc.Compression.from_spec(spec)
        tape = hvdt.DistributedGradientTape(tape, compression=compression)
        return tape.gradient(loss, [variable, variable])

    assert all((gradient.numpy() == 1).all() for gradient in gradients("none"))
    with raises(ValueError, "tied is twice among", "give each variable once"):
        gradients("topk:ratio=0.1")


@case(2)
def gradients_of_results_are_missing_and_warned_of():
    for traced in (False, True):
        variable, compression = tf.Variable(tf.ones((40, 50))), hvdc.Compression.topk(ratio=0.1)

        def penalty(variable=variable, compression=compression):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(variable**2)
                tape = hvdt.DistributedGradientTape(tape, compression=compression)
                (gradient,) = tape.gradient(loss, [variable])
                norm = tf.reduce_sum(gradient**2) + tf.reduce_sum(variable)
            return outer.gradient(norm, variable)

        notices._warned.clear()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            (tf.function(penalty) if traced else penalty)()
        assert sum("gradients through them" in str(each.message) for each in said) == 1, traced


@case(2)
def mistakes_get_clear_errors():
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    for words, make in {
        "moments=per_sample needs PyTorch": lambda: hvdc.Compression.variance(
            sgd, moments="per_sample"
        ),
        "moments=microbatch needs the optimizer": lambda: hvdc.Compression.variance(
            moments="microbatch"
        ),
        "say transport=horovod": lambda: hvdc.Compression.topk(transport="mpi"),
        "no option 'ration'": lambda: hvdc.Compression.dgc(sgd, ration=1),
        "unknown compressor 'gdc'": lambda: hvdc.Compression.from_spec("gdc", sgd),
        "bind the inner optimizer": lambda: hvdc.Compression.dgc(
            keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        ),
        "to the optimizer itself": lambda: hvdc.Compression.dgc(
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        ),
        "update_step is not SGD's own": lambda: hvdc.Compression.dgc(OwnSGD(0.1, momentum=0.9)),
        "nothing else, not 'loss'": lambda: hvdc.StateCheckpoint(None, "state-{epoch}-{loss:.3f}"),
        "bound to a Keras optimizer": lambda: hvdc.Compression.dgc(model_of().trainable_variables),
        "not registered": lambda: hvdc.Compression.topk(
            process_set=hvd.ProcessSet([0])
        ).handshake(),
    }.items():
        with raises(ValueError, words):
            make()
    with raises(TypeError, "an option goes by its name: ratio=0.01"):
        hvdc.Compression.dgc(sgd, [("a", 1)])  # in the order of PyTorch
    with raises(ValueError, "source_0 has the shape (50,) and had (40,) before"):
        compression = hvdc.Compression.topk(min_numel=0)
        for n in (40, 40, 50):
            with tf.GradientTape() as tape:
                tape.watch(source := tf.ones(n))
                loss = tf.reduce_sum(source * source)
            hvdt.DistributedGradientTape(tape, compression=compression).gradient(loss, [source])
    with raises(ValueError, "its shape, (None, 3), must be known"):
        unknown = tf.Variable(tf.ones((2, 3)), shape=(None, 3), name="unknown")

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(unknown * unknown)
            return hvdt.DistributedGradientTape(tape, compression=hvdc.Compression.topk()).gradient(
                loss, [unknown]
            )

        step()
    with raises(ValueError, "jit_compile=False"):
        model = model_of()
        model.compile(
            hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.1), compression=hvdc.Compression.topk()
            ),
            LOSS,
            jit_compile=True,
        )
        model.fit(*data(12), verbose=0)
    with raises(ValueError, "has seen no backward pass of"):
        adam = keras.optimizers.Adam()
        exchanged(hvdc.Compression.variance(adam, moments="microbatch"))(told(0))
    with raises(ValueError, "here comes a tensor"):
        hvdt.allreduce(tf.ones(3), compression=hvdc.Compression.topk())
    compression = hvdc.Compression.topk(ratio=0.01)
    step = exchanged(compression)
    step(told(0))
    state = compression.state_dict()
    for broken, words in (
        ({**state, "rank": 1 - hvd.rank()}, "rank"),
        ({**state, "id": "dgc"}, "id"),
        ({"a": 1}, "not a state_dict"),
        ({**state, "step": 3}, "steps by tensor"),
        ({**state, "step": {**state["step"], "bias": -1}}, "step.bias"),
    ):
        with raises(ValueError, words):
            compression.load_state_dict(broken)
    other = hvdc.Compression.topk(ratio=0.01)
    other.load_state_dict(
        {**state, "tensors": {"other": {}}, "step": {"other": 3}, "shapes": {"other": [3]}}
    )
    step = exchanged(other)
    for _ in range(2):
        with raises(ValueError, "it has nothing for matrix, kernel, wide, bias"):
            step(told(0))
    wrong = {**state["tensors"], "matrix": {"residual": np.zeros(3, np.float32)}}
    other.load_state_dict({**state, "tensors": wrong})
    for _ in range(2):
        with raises(ValueError, "matrix.residual"):
            step(told(0))
    other.load_state_dict(state)
    step(told(1))
    assert set(other.state_dict()["step"].values()) == {2}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state")
        with raises(ValueError, "no state of a compression", f"state.rank{hvd.rank()}.npz"):
            hvdc.StateCheckpoint(compression, path, restore=path).on_train_begin()
        hvdc.StateCheckpoint(compression, path).on_epoch_end(0)
        with open(f"{path}.rank{hvd.rank()}.npz", "r+b") as file:
            file.truncate(1000)
        with raises(ValueError, "no state of a compression"):
            hvdc.StateCheckpoint(compression, path, restore=path).on_train_begin()


@case()
def ranks_on_different_kernels():
    """Asked for by name, with the reference on rank 1."""
    assert kernels.backend == ("reference" if hvd.rank() == 1 else "native")
    hvdc.Compression.topk().handshake()
    with raises(MismatchError, "rank 1 differs from rank 0 in kernels", "powersgd"):
        hvdc.Compression.powersgd().handshake()


@case(2)
def mismatched_ranks_are_named():
    with raises(MismatchError, "rank 1 differs from rank 0 in options.ratio"):
        hvdc.Compression.topk(ratio=0.01 + 0.01 * hvd.rank()).handshake()
    compression = hvdc.Compression.topk()
    variable = tf.Variable(tf.zeros((40, 50 + hvd.rank())), name="w")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable)
    # Of a type that TensorFlow chooses, while it traces.
    with raises(Exception, "MismatchError", "variables.w"):
        hvdt.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])


@case(2)
def join_is_refused():
    step = exchanged(hvdc.Compression.topk(ratio=0.01))
    # Until frames keep their lengths, so that Horovod would answer from its cache.
    for number in range(20):
        step(told(number))
    if hvd.rank() == 0:
        with raises(
            tf.errors.OpError,
            "1 of 2 ranks have called hvd.join()",
            "Horovod's own reductions only",
        ):
            step(told(20))
    hvdt.join()


@case(2)
def a_state_loaded_on_one_rank_only_is_a_clear_error():
    """The last, because the ranks are not in step afterwards."""
    for spec, words in (
        ("topk:ratio=0.01", "was a state loaded on some ranks only?"),
        ("globalrandk", "others are not"),
    ):
        compression = hvdc.Compression.from_spec(spec)
        step = exchanged(compression, ("matrix",))
        step(told(0, ("matrix",)))
        state = compression.state_dict()
        step(told(1, ("matrix",)))
        if hvd.rank() == 0:
            compression.load_state_dict(state)
        with raises(tf.errors.OpError, words):
            step(told(2, ("matrix",)))
