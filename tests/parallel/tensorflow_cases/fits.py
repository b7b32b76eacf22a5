"""Training with Keras, as with plain Horovod and under its options."""

import os
import tempfile

import alike
import horovod.tensorflow as hvdt
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from checks import raises, registry
from tensorflow import keras

import horovod_compress.tensorflow as hvdc
from horovod_compress import simulate

from .training import (
    LOSS,
    SGD,
    assert_close,
    assert_replicas_identical,
    data,
    deep_model_of,
    exchanged,
    fit,
    flat,
    make_variables,
    model_of,
    told,
    trained,
)

CASES, case = registry()

TRAINED = ("dgc:ratio=0.02", "maxnorm", "powersgd")


@case(2)
def fit_learns_and_resumes_bit_for_bit():
    """Three epochs as with plain Horovod; the state that a callback saved after two, restored,
    gives the third once more."""
    plain = fit(model_of(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), 40, epochs=3)
    for spec in TRAINED:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "state-{epoch}")
            model = model_of()
            adam = keras.optimizers.Adam(0.01)
            compression = hvdc.Compression.from_spec(spec, adam)
            optimizer = hvd.DistributedOptimizer(adam, compression=compression)
            saved = []
            keep = keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: saved.append(
                    [model.get_weights(), [v.numpy() for v in optimizer.variables()]]
                )
            )
            losses = fit(
                model, optimizer, 40, [hvdc.StateCheckpoint(compression, path), keep], epochs=3
            )
            assert losses[2] < losses[0] - 0.5 * (plain[0] - plain[2]), (
                f"{spec}: {losses}, plain {plain}"
            )
            assert_replicas_identical(model)
            ratio = compression.stats()["ratio"]
            assert ratio > 1.2, f"{spec}: {ratio}"

            again = model_of(seed=5)
            again.set_weights(saved[1][0])
            adam = keras.optimizers.Adam(0.01)
            compression = hvdc.Compression.from_spec(spec, adam)
            optimizer = hvd.DistributedOptimizer(adam, compression=compression)
            optimizer.build(again.trainable_variables)
            for variable, value in zip(optimizer.variables(), saved[1][1]):
                variable.assign(value)
            restore = hvdc.StateCheckpoint(
                compression, os.path.join(folder, "other"), restore=path.format(epoch=2)
            )
            fit(again, optimizer, 40, [restore], epochs=1)
            assert (flat(again) == flat(model)).all(), spec


@case(2)
def dense_limit():
    """With every element sent, parameters are those of plain Horovod: momentum is taken over, and
    applied once."""
    # Every pair of two of the options once. The legacy optimizer has no weight decay.
    for kind, nesterov, decay, small in (
        ("new", False, 0.01, "1024"),
        ("new", True, None, "1024"),
        ("new", True, 0.01, "0"),
        ("legacy", False, None, "0"),
        ("legacy", True, None, "1024"),
    ):
        sgd = {"momentum": 0.9, "nesterov": nesterov, **({"weight_decay": decay} if decay else {})}
        make = model_of if kind == "new" and small == "1024" else deep_model_of
        options = {"kind": kind, "sgd": sgd, "make": make}
        model, _ = trained(f"dgc:ratio=1,masking=false,min_numel={small}", **options)
        assert_close(model, trained(None, **options)[0])


@case(2)
def options_of_horovods_optimizer():
    for kind, make, wrap in (
        ("new", deep_model_of, {"num_groups": 2, "gradient_predivide_factor": 2.0}),
        ("new", model_of, {"backward_passes_per_step": 2}),
        ("legacy", model_of, {"backward_passes_per_step": 2}),
        ("legacy", model_of, {"op": hvdt.Sum}),
    ):
        options = {"kind": kind, "sgd": {"momentum": 0.9}, "make": make, "wrap": wrap}
        assert_close(
            trained("dgc:ratio=1,masking=false", **options)[0], trained(None, **options)[0]
        )
    model, optimizer = deep_model_of(), SGD["new"](0.05)
    variables = model.trainable_variables
    compression = hvdc.Compression.topk(optimizer)
    groups = [variables[1:3], variables[:1]]
    fit(model, hvd.DistributedOptimizer(optimizer, compression=compression, groups=groups), 5)
    assert_replicas_identical(model)
    assert compression.stats()["steps"] == 5


@case(2)
def sparse_gradients():
    """As dense ones they are compressed; as IndexedSlices they keep Horovod's way, and SGD its
    momentum for them."""

    def run(spec, sparse_as_dense):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        words = [keras.layers.Embedding(60, 20, input_length=4), keras.layers.Flatten()]
        model = keras.Sequential([*words, keras.layers.Dense(30), keras.layers.Dense(5)])
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        compression = (
            hvdt.Compression.none if spec is None else hvdc.Compression.from_spec(spec, optimizer)
        )
        wrapped = hvd.DistributedOptimizer(
            optimizer, compression=compression, sparse_as_dense=sparse_as_dense
        )
        x = np.random.default_rng(hvd.rank()).integers(0, 60, (120, 4))
        make_variables(wrapped, model)
        model.compile(wrapped, LOSS)
        model.fit(x, x.sum(1) % 5, batch_size=12, shuffle=False, verbose=0)
        return model, compression

    for sparse_as_dense in (True, False):
        model, compression = run("dgc:ratio=1,masking=false", sparse_as_dense)
        assert_close(model, run(None, sparse_as_dense)[0])
        assert any("embedding" in name for name in compression.stats_by_tensor()) == sparse_as_dense
        assert_replicas_identical(model)


@case(3)
def process_set():
    members = hvd.add_process_set([0, 2])
    names = ("matrix", "bias")
    expected = simulate(
        "maxnorm",
        [[{n: alike.gradients(r, i)[n] for n in names} for r in (0, 2)] for i in range(3)],
    ).mean
    compression = hvdc.Compression.maxnorm()  # finds the set
    step = exchanged(compression, names, tape_options={"process_set": members})
    for i in range(3):
        for name, gradient in step(told(i, names)).items():
            wanted = (
                expected[i][name] if members.included() else alike.gradients(hvd.rank(), i)[name]
            )
            assert np.allclose(gradient.numpy(), wanted, atol=1e-6), (i, name)
    # Each rank has a file of its own, whatever its number in the set is.
    with tempfile.TemporaryDirectory() as folder:
        hvdc.StateCheckpoint(compression, os.path.join(folder, "state")).on_epoch_end(0)
        assert os.listdir(folder) == [f"state.rank{hvd.rank()}.npz"]
    by_hand = hvdc.Compression.topk(keras.optimizers.SGD())
    with raises(ValueError, "is for the process set", "give both the same process_set"):
        exchanged(by_hand, names, tape_options={"process_set": members})(told(0, names))
    hvd.remove_process_set(members)


@case(3)
def a_portable_state_goes_from_two_ranks_to_three():
    """What two ranks had not sent is on average what three have not sent; and back, from the list
    of all states."""
    pair, names = hvd.add_process_set([0, 1]), ("matrix", "bias")
    spec = "topk:ratio=0.1,min_numel=100"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(hvdt.broadcast_object(folder), "state")
        two = hvdc.Compression.from_spec(spec, process_set=pair)
        step = exchanged(two, names, tape_options={"process_set": pair})
        for i in range(3):
            step(told(i, names))
        hvdc.StateCheckpoint(two, path, portable=True).on_epoch_end(0)
        hvdt.allgather_object(0)
        assert os.listdir(os.path.dirname(path)) == ["state.npz"]
        owed = np.mean(
            [
                state["tensors"]["matrix"]["residual"]
                for state in hvdt.allgather_object(two.state_dict())[:2]
            ],
            axis=0,
        )
        three = hvdc.Compression.from_spec(spec)
        hvdc.StateCheckpoint(three, path, restore=path, portable=True).on_train_begin()
        np.testing.assert_allclose(
            three.state_dict()["tensors"]["matrix"]["residual"], owed, rtol=1e-6, atol=1e-6
        )
        step = exchanged(three, names)
        total = owed
        for i in range(3, 6):
            total = total + np.mean(
                [alike.gradients(rank, i)["matrix"].ravel() for rank in range(3)], axis=0
            )
            total = total - step(told(i, names))["matrix"].numpy().ravel()
        states = hvdt.allgather_object(three.state_dict())
        np.testing.assert_allclose(
            np.mean([state["tensors"]["matrix"]["residual"] for state in states], axis=0),
            total,
            atol=1e-5,
        )
        if pair.included():
            two.load_state_dict(states)
            np.testing.assert_allclose(
                two.state_dict()["tensors"]["matrix"]["residual"], total, atol=1e-5
            )
        hvdt.allgather_object(0)
    hvd.remove_process_set(pair)


@case(1)
def one_rank_trains_as_without_compression():
    sgd = {"momentum": 0.9, "nesterov": True}
    model, compression = trained("dgc", sgd=sgd)
    assert (flat(model) == flat(trained(None, sgd=sgd)[0])).all()
    assert compression.stats()["steps"] == 0 and compression.state_dict()["tensors"] == {}
    unbound, compression = model_of(), hvdc.Compression.dgc()
    fit(
        unbound,
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, **sgd), compression=compression),
    )
    assert (flat(unbound) == flat(model)).all()
    assert compression.stats()["steps"] == 0 and compression.state_dict()["tensors"] == {}


@case(2)
def squares_of_backward_passes():
    for kind in SGD:
        model, optimizer = model_of(), SGD[kind](1e-20)
        compression = hvdc.Compression.variance(
            optimizer, moments="microbatch", alpha=1e30, min_numel=0
        )
        x, y = data(24)
        squares = {}
        for half in (slice(0, 12), slice(12, 24)):
            with tf.GradientTape() as tape:
                loss = LOSS(y[half], model(x[half], training=True))
            for variable, gradient in zip(
                model.trainable_variables, tape.gradient(loss, model.trainable_variables)
            ):
                name = variable.name.split(":")[0]
                squares[name] = squares.get(name, 0) + np.square(gradient.numpy()).ravel()
        # What one step has collected is gone in the next.
        for step in range(2):
            wrapped = hvd.DistributedOptimizer(
                optimizer, compression=compression, backward_passes_per_step=2
            )
            make_variables(wrapped, model)
            model.compile(wrapped, LOSS)
            model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
            state = compression.state_dict()["tensors"]
            assert set(state) == set(squares) and len(state) == 2
            for name, expected in squares.items():
                both = expected * (0.999 if step == 0 else 0.999 * 1.999)  # zeta = 0.999
                assert np.abs(state[name]["v"] - both).max() <= 1e-3 * both.max(), (
                    kind,
                    name,
                    step,
                )


@case(2)
def keras_saves_the_optimizer_as_ever():
    """Momentum is the user's in its configuration, and the classes keep their names."""
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    hvdc.Compression.dgc(sgd)
    assert sgd.get_config()["momentum"] == 0.9
    assert keras.optimizers.serialize(sgd) == keras.optimizers.serialize(
        keras.optimizers.SGD(0.05, momentum=0.9)
    )
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    # Bound again: the second compression is the one in force.
    for _ in range(2):
        compression = hvdc.Compression.dgc(sgd, ratio=1, masking=False)
    model = model_of()
    fit(model, hvd.DistributedOptimizer(sgd, compression=compression))
    assert_close(model, trained(None, sgd={"momentum": 0.9})[0])
