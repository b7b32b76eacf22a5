"""A compression that chooses by steps of training."""

import pickle
import tempfile

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
    assert_close,
    assert_replicas_identical,
    data,
    exchanged,
    fit,
    flat,
    make_variables,
    model_of,
    told,
)

CASES, case = registry()
FOUR = ["none", "fp16", "dgc:ratio=0.01", "dgc:ratio=0.01,min_numel=65536"]


def on_all_ranks(value):
    return hvdt.allgather_object(value)


@case(2)
def auto_chooses_while_fit_trains():
    for optimizer, sparse in (
        (SGD["new"](0.02, momentum=0.9), "dgc"),
        (SGD["legacy"](0.02), "topk"),
    ):
        model = model_of()
        compression = pickle.loads(pickle.dumps(hvdc.Compression.auto(probe_steps=12)))
        fit(model, hvd.DistributedOptimizer(optimizer, compression=compression), 25)
        assert_replicas_identical(model)
        plan = compression.plan
        assert list(plan["candidates"]) == [spec.replace("dgc", sparse) for spec in FOUR], plan
        assert plan["spec"] in plan["candidates"] and plan["ranks"] == 2
        assert all(
            its["seconds"] > 0 and its["steps"] >= 1 for its in plan["candidates"].values()
        ), plan
        assert on_all_ranks(plan) == [plan, plan]  # all ranks have seen the same
        assert (
            compression.config["id"] == plan["spec"].partition(":")[0]
            and compression.stats()["steps"] == 25
        )


@case(2)
def what_auto_tries_trains_as_plain_horovod_does_in_fit():
    """Candidates of the dense limit: whatever is tried and chosen, parameters are those of plain
    Horovod."""
    reference, model = model_of(), model_of()
    compression = hvdc.Compression.auto(
        candidates=["none", "dgc:ratio=1,masking=false", "topk:ratio=1"],
        probe_steps=12,
        margin=0,
    )
    for net, its in ((reference, hvdt.Compression.none), (model, compression)):
        wrapped = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.02, momentum=0.9), compression=its
        )
        make_variables(wrapped, net)
        net.compile(wrapped, LOSS, steps_per_execution=3)
        net.fit(*data(12 * 24 * 3), batch_size=12, shuffle=False, verbose=0)
    assert compression.plan["spec"], compression.plan
    assert_close(model, reference, 2e-5)
    assert_replicas_identical(model)


@case(2)
def auto_lets_momentum_go_that_has_decayed():
    """Until then the trajectory is plain Horovod's, and afterwards, too."""
    spec = "dgc:ratio=1,masking=false"
    for kind in SGD:
        reference, model = model_of(), model_of()
        compression = hvdc.Compression.auto(candidates=[spec, "none"])
        optimizers = [
            hvd.DistributedOptimizer(SGD[kind](0.01, momentum=0.5), compression=its)
            for its in (hvdt.Compression.none, compression)
        ]
        for steps in (6, 150):
            for net, optimizer in zip((reference, model), optimizers):
                fit(net, optimizer, steps)
            compression.switch(spec)  # which ends the trial
        assert compression.the_only()._takes_over and not compression.the_only()._lives_on
        assert_close(model, reference, 1e-4)


@case(2)
def each_candidate_is_traced_once_or_twice():
    """Twice where something owed goes out by operations of its own first. Candidates come back to
    the traces that they had."""
    traces = []
    compression = hvdc.Compression.auto(
        candidates=["none", "fp16", "topk:ratio=0.1,min_numel=0"], margin=0
    )
    step = exchanged(compression, in_graph=False)
    step = tf.function(lambda gradients, step=step: traces.append(1) or step(gradients))
    for i in range(45):
        step(told(i))
    assert (
        compression.plan["spec"]
        and sum(its["steps"] for its in compression.plan["candidates"].values()) >= 6
    )
    assert len(traces) <= 5, len(traces)


@case(2)
def auto_serves_tapes():
    """In graphs and in eager code, where it is Horovod that makes a function; with an optimizer in
    reach."""
    for in_graph in (True, False):
        variable = tf.Variable(tf.ones((40, 50)))
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        optimizer.build([variable])
        compression = hvdc.Compression.auto(probe_steps=12)

        def step(told, variable=variable, optimizer=optimizer, compression=compression):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * told)
            gradients = hvdt.DistributedGradientTape(tape, compression=compression).gradient(
                loss, [variable]
            )
            optimizer.apply_gradients(zip(gradients, [variable]))

        step = tf.function(step) if in_graph else step
        for i in range(30):
            step(told(i)["matrix"])
        assert compression.plan["spec"] and list(compression.plan["candidates"]) == FOUR, (
            compression.plan
        )
        values = hvdt.allgather(variable[None], name="values").numpy()
        assert (values[0] == values[1]).all()


@case(2)
def auto_serves_tapes_without_an_optimizer():
    for in_graph in (True, False):
        compression = hvdc.Compression.auto(probe_steps=12)
        step = exchanged(compression, in_graph=in_graph)
        for i in range(30):
            step(told(i))
        # Which may be Adam: nothing sparse is tried by itself.
        assert compression.plan["spec"] and list(compression.plan["candidates"]) == ["none", "fp16"]


@case(2)
def auto_chooses_where_horovods_function_is_traced_already():
    """After a second compile() with the same optimizer, Horovod's own function goes on with its
    trace."""
    model, compression = model_of(), hvdc.Compression.auto(probe_steps=12)
    wrapped = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001), compression=compression)
    fit(model, wrapped, 2)
    model.compile(wrapped, LOSS)
    fit(model, wrapped, 25)
    # Nothing sparse is tried by itself with Adam.
    assert list(compression.plan["candidates"]) == FOUR[:2], compression.plan
    assert compression.plan["spec"], compression.plan
    assert_replicas_identical(model)


@case(2)
def a_switch_of_the_users_is_the_choice():
    for steps in (5, 30):  # during the trial, and after it
        model, compression = model_of(), hvdc.Compression.auto(probe_steps=12)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.01, momentum=0.9), compression=compression
        )
        fit(model, optimizer, steps)
        compression.switch("topk:ratio=0.1")
        fit(model, optimizer, 5)
        state = compression.state_dict()
        assert (
            compression.plan["spec"] == state["auto"]["spec"] == "topk:ratio=0.1"
            and compression.config["id"] == state["id"] == "topk"
        )
        with raises(ValueError, "does not fit"):
            compression.load_state_dict({**state, "id": "adacomp"})
        assert compression.plan["spec"] == "topk:ratio=0.1"
        assert_replicas_identical(model)


@case(2)
def ranks_try_alike():
    # Of a type that TensorFlow chooses, while it traces.
    with raises(Exception, "MismatchError", "auto.probe_steps"):
        fit(
            model_of(),
            hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.01),
                compression=hvdc.Compression.auto(probe_steps=20 + hvd.rank()),
            ),
            2,
        )


@case(2)
def a_choice_is_resumed_in_keras():
    """Bit for bit, by the callback that restores the state before the first gradient. Training ends
    within 50 steps of the choice, after which candidates would be tried again if the machine had
    become slower."""
    with tempfile.TemporaryDirectory() as folder:
        folder = on_all_ranks(folder)[0]

        def run(seed, first, restore=None):
            model, compression = (
                model_of(seed),
                hvdc.Compression.auto(
                    candidates=["topk:ratio=0.5", "dgc:ratio=0.05"], probe_steps=12, margin=0
                ),
            )
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.02, momentum=0.9), compression=compression
            )
            optimizer.build(model.trainable_variables)
            if restore:
                model.set_weights(restore[0])
                for variable, value in zip(optimizer.variables(), restore[1]):
                    variable.assign(value)
            state = hvdc.StateCheckpoint(
                compression, f"{folder}/{{epoch}}", restore=f"{folder}/1" if restore else None
            )
            kept = []

            def keep(epoch, logs):
                kept.append(
                    (model.get_weights(), [variable.numpy() for variable in optimizer.variables()])
                )

            fit(
                model,
                optimizer,
                25,
                [state, keras.callbacks.LambdaCallback(on_epoch_end=keep)],
                epochs=2,
                initial_epoch=first,
            )
            return model, compression, kept

        model, compression, kept = run(0, 0)
        again, resumed, _ = run(7, 1, kept[0])
        assert (
            compression.plan["spec"] == resumed.plan["spec"]
            and len(resumed.plan["candidates"]) == 1
        )
        np.testing.assert_array_equal(flat(again), flat(model))


@case(2)
def what_auto_refuses_in_keras():
    with raises(ValueError, "unknown compressor 'gdc'"):
        hvdc.Compression.auto(candidates=["none", "gdc"])
    with raises(ValueError, "moments=microbatch needs the optimizer"):
        hvdc.Compression.auto(candidates=["none", "variance:moments=microbatch"])
    with raises(ValueError, "say transport=horovod"):
        hvdc.Compression.auto(candidates=["none", "topk:transport=mpi"])
    with raises(ValueError, "candidates must be a list of specs"):
        hvdc.Compression.auto(candidates="none")
    with raises(ValueError, "margin must be a share"):
        hvdc.Compression.auto(margin=-1)
    with raises(ValueError, "candidates must be a list"):
        hvdc.Compression.auto(keras.optimizers.SGD(0.1))
    with raises(TypeError, "no compression yet"):
        hvdc.Compression.auto.compress(tf.zeros(3))
    with raises(ValueError, "name one for updates"):
        hvdc.UpdateOptimizer(keras.optimizers.Adam(), hvdc.Compression.auto())
    assert isinstance(hvdc.Compression.from_spec("auto"), hvdc.AutoCompression)
