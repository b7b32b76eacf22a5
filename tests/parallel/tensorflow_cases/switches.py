"""Another compression from one step to the next: nothing is lost, momentum counts once, and
functions are traced again where they have to be."""

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
from horovod_compress import MismatchError
from horovod_compress.engine.debt import DEBT, debt_of

from .training import (
    SGD,
    assert_close,
    assert_replicas_identical,
    data,
    exchanged,
    fit,
    flat,
    model_of,
    told,
)

CASES, case = registry()


def switching(specs):
    """A callback that goes on with these, by epoch."""

    class Switch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch in specs:
                hvdc.compression_of(self.model.optimizer).switch(specs[epoch])

    return Switch()


def owed(compression, name):
    """The mean over ranks of what results are still to bring."""
    exchange = getattr(compression, "the_only", lambda: compression)()._session.exchange
    exchange.arrays()
    tensor = exchange.tensors[name]
    found = [
        part
        for part in (
            debt_of(tensor.compressor, tensor.state),
            tensor.state.arrays.get(DEBT),
        )
        if part is not None
    ]
    mine = np.sum(found, axis=0) if found else np.zeros(tensor.numel, np.float32)
    return (
        hvdt.allreduce(tf.constant(mine), name=f"owed.{name}").numpy().reshape(alike.SHAPES[name])
    )


@case(2, 3)
def nothing_is_lost_over_switches():
    """Whatever its operations are: the function is traced again by itself, also where eager code
    has Horovod make it, and only where it must be."""
    specs = {
        "topk:ratio=0.02": 3,
        "adacomp": 3,
        "maxnorm:bits=4": 1,
        "none": 2,
        "powersgd:min_rate=1": 3,
        "dgc:ratio=0.05,momentum=0": 3,
        "efsignsgd": 3,
        # What is owed comes to tensors that Horovod reduces by itself else.
        "topk:exclude=*": 2,
        "topk:ratio=0.5": 2,
        "topk:ratio=0.02,min_numel=0": 2,
        "adacomp:min_numel=0": 2,
    }
    for in_graph in (True, False):
        compression = hvdc.Compression.topk(ratio=0.02)
        step, come = (
            exchanged(compression, in_graph=in_graph),
            {name: np.zeros(shape) for name, shape in alike.SHAPES.items()},
        )
        steps = 0
        for spec, count in specs.items():
            if steps:
                compression.switch(spec)
            # Quantizers drop what they round away, from their second step on.
            for _ in range(count):
                for name, result in step(told(steps)).items():
                    mean = np.mean(
                        [alike.gradients(rank, steps)[name] for rank in range(hvd.size())],
                        axis=0,
                        dtype=np.float64,
                    )
                    come[name] += mean - result.numpy()
                steps += 1
            assert compression.config["id"] == spec.partition(":")[0]
        for name, rest in come.items():
            error = np.abs(rest - owed(compression, name)).max()
            assert error < 1e-3, (in_graph, name, error)
        assert set(compression.state_dict()["step"].values()) == {steps}


@case(2)
def functions_are_traced_again_where_their_operations_change():
    """Only there."""
    compression = hvdc.Compression.topk(ratio=0.02)
    count, step = [], exchanged(compression)
    python_function = step.python_function
    step = tf.function(lambda gradients: count.append(1) or python_function(gradients))
    for i, (spec, traces) in enumerate(
        {
            "topk:ratio=0.1": 1,
            "adacomp": 1,
            "dgc:momentum=0": 1,
            "qsgd": 1,
            "maxnorm": 2,
            "maxnorm:bits=4": 2,
            "dgc:clip_norm=1,momentum=0": 3,
            "dgc:clip_norm=2,momentum=0": 3,
            "fp16": 4,
            "bf16": 5,
            "globalrandk": 6,
            "topk": 7,
        }.items()
    ):
        if i:
            compression.switch(spec)
        step(told(2 * i))
        step(told(2 * i + 1))
        assert len(count) == traces, (spec, count)


@case(2)
def momentum_counts_once_over_switches_in_fit():
    """In the dense limit a run over several switches is plain Horovod's, and what SGD's own
    momentum has gathered lives on. One is bound by hand."""
    dgc, topk = "dgc:ratio=1,masking=false", "topk:ratio=1"
    for kind, specs in (
        ("new", ("none", dgc, "none", topk, dgc, topk, "none")),
        ("legacy", ("none", dgc, topk)),
    ):
        reference, specs = model_of(), dict(enumerate(specs))
        fit(
            reference, hvd.DistributedOptimizer(SGD[kind](0.02, momentum=0.9)), 4, epochs=len(specs)
        )
        model, optimizer = model_of(), SGD[kind](0.02, momentum=0.9)
        compression = hvdc.Compression.from_spec("none", optimizer if kind == "new" else None)
        fit(
            model,
            hvd.DistributedOptimizer(optimizer, compression=compression),
            4,
            [switching(specs)],
            epochs=len(specs),
        )
        assert_close(model, reference, 2e-5)
        assert_replicas_identical(model)


@case(2)
def momentum_counts_once_where_results_are_sums():
    specs = dict(
        enumerate(
            ("dgc:ratio=1,masking=false", "none", "dgc:ratio=1,masking=false", "topk:ratio=1")
        )
    )
    reference, model = model_of(), model_of()
    fit(
        reference,
        hvd.DistributedOptimizer(SGD["new"](0.005, momentum=0.9), op=hvdt.Sum),
        4,
        epochs=len(specs),
    )
    compression = hvdc.Compression.from_spec(specs.pop(0))
    fit(
        model,
        hvd.DistributedOptimizer(
            SGD["new"](0.005, momentum=0.9), op=hvdt.Sum, compression=compression
        ),
        4,
        [switching(specs)],
        epochs=4,
    )
    assert_close(model, reference, 2e-5)


@case(2)
def momentum_of_sums_after_a_state_was_loaded():
    """Horovod's op is not known yet then; that of small tensors, which dgc leaves dense, would come
    twice."""

    def start(op):
        model, compression = model_of(), hvdc.Compression.from_spec("dgc:ratio=1")
        optimizer = hvd.DistributedOptimizer(
            SGD["new"](0.005, momentum=0.9), op=op, compression=compression
        )
        optimizer.build(model.trainable_variables)
        return model, optimizer, hvdc.compression_of(optimizer)

    model, optimizer, compression = start(hvdt.Sum)
    fit(model, optimizer, 4)
    for op in (hvdt.Average, hvdt.Sum):
        again, its_optimizer, its = start(op)
        its.load_state_dict(compression.state_dict())
        its.switch("topk:ratio=1")
        if op == hvdt.Average:
            fit(again, its_optimizer, 1)
        else:
            with raises(RuntimeError, "does not average", "call switch() after the first step"):
                fit(again, its_optimizer, 1)


@case(2)
def functions_that_call_one_which_is_traced_already():
    """A second function of the same optimizer does not trace Horovod's own again; it follows a
    switch all the same."""
    variable = tf.Variable(tf.zeros((40, 50)))
    compression = hvdc.Compression.from_spec("topk:ratio=1")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), compression=compression)
    optimizer.build([variable])

    def step(told):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * told)
        optimizer.minimize(loss, [variable], tape=tape)

    first, second = tf.function(step), tf.function(lambda told: step(2 * told))
    for i in range(6):
        (first if i % 2 else second)(told(i)["matrix"])
        if i in (2, 4):
            compression.switch(("maxnorm:bits=8,min_numel=0", "topk:ratio=1")[i == 4])
    values = hvdt.allgather(variable[None], name="values").numpy()
    assert (values[0] == values[1]).all() and np.isfinite(values).all() and np.abs(values).max() > 0


@case(2)
def a_function_that_applies_what_another_brings():
    """Momentum is taken over in both at once."""
    for in_graph in (True, False):
        variables = [tf.Variable(tf.zeros((40, 50)), name=f"w{i}") for i in range(2)]
        optimizers = [keras.optimizers.SGD(0.1, momentum=0.9) for _ in range(2)]
        compression = hvdc.Compression.topk(optimizers[1], ratio=1)
        steps = [hvdt.Compression.none, compression]
        for optimizer, variable in zip(optimizers, variables):
            optimizer.build([variable])

        def gradient(i, told):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variables[i] * told)
            return hvdt.DistributedGradientTape(tape, compression=steps[i]).gradient(
                loss, [variables[i]]
            )

        def apply(i, gradients):
            optimizers[i].apply_gradients(zip(gradients, [variables[i]]))

        if in_graph:
            gradient, apply = tf.function(gradient), tf.function(apply)
        for step in range(12):
            if step % 3 == 0:
                compression.switch(("dgc:ratio=1,masking=false", "topk:ratio=1")[step // 3 % 2])
            for i in range(2):
                apply(i, gradient(i, told(step)["matrix"]))
        np.testing.assert_allclose(variables[1].numpy(), variables[0].numpy(), atol=1e-5)


@case(2)
def states_resume_before_and_after_a_switch():
    """Bit for bit, also where the switch comes right after a state was loaded, before any variable
    is known."""
    specs = {1: "dgc:ratio=0.05", 2: "maxnorm:bits=4", 3: "topk:ratio=0.1"}
    with tempfile.TemporaryDirectory() as folder:
        path, weights = os.path.join(folder, "state"), []

        def run(first, restore, seed=0):
            spec = next(
                (spec for epoch, spec in reversed(specs.items()) if epoch < first),
                "topk:ratio=0.02",
            )
            model, compression = model_of(seed), hvdc.Compression.from_spec(spec)
            optimizer = hvd.DistributedOptimizer(
                keras.optimizers.SGD(0.05, momentum=0.9), compression=compression
            )
            optimizer.build(model.trainable_variables)
            if restore:
                model.set_weights(weights[first - 1][0])
                for variable, value in zip(optimizer.variables(), weights[first - 1][1]):
                    variable.assign(value)

            def keep(epoch, logs):
                weights.append(
                    (model.get_weights(), [variable.numpy() for variable in optimizer.variables()])
                )

            state = hvdc.StateCheckpoint(
                compression, path + "{epoch}", restore=f"{path}{first}" if restore else None
            )
            fit(
                model,
                optimizer,
                4,
                [state, keras.callbacks.LambdaCallback(on_epoch_end=keep), switching(specs)],
                epochs=5,
                initial_epoch=first,
            )
            return flat(model)

        expected, taken = run(0, False), len(weights)
        for first in (1, 2, 3, 4):
            del weights[taken:]
            np.testing.assert_array_equal(run(first, True, seed=9), expected, str(first))


@case(2)
def portable_states_over_switches():
    compression, again = hvdc.Compression.topk(ratio=0.02), hvdc.Compression.topk(ratio=0.02)
    step = exchanged(compression)
    for i in range(3):
        step(told(i))
    compression.switch("none")
    state, mean = compression.state_dict(portable=True), owed(compression, "matrix")
    again.handshake()
    again_step = exchanged(again)
    again_step(told(3))
    again.switch("none")
    again.load_state_dict(state)
    np.testing.assert_allclose(owed(again, "matrix"), mean, atol=1e-6)
    np.testing.assert_allclose(
        again_step(told(4))["matrix"].numpy(), step(told(4))["matrix"].numpy(), atol=1e-6
    )
    assert not np.any(owed(again, "matrix"))


@case(2)
def a_scale_and_discarded_steps_over_switches():
    """A step that is not finite comes right after a switch; what waits until a step succeeds comes
    under another loss scale."""
    compression = hvdc.Compression.topk(ratio=0.02, discardable=True)
    step = exchanged(compression)
    for i in range(3):
        step(told(i))
    compression.switch("none")
    before = owed(compression, "matrix")
    assert np.any(before)
    step({name: gradient * np.inf for name, gradient in told(3).items()})
    np.testing.assert_array_equal(owed(compression, "matrix"), before)
    step(told(3))
    compression.discard()
    np.testing.assert_array_equal(owed(compression, "matrix"), before)
    expected = before + np.mean([alike.gradients(rank, 3)["matrix"] for rank in range(2)], axis=0)
    np.testing.assert_allclose(step(told(3))["matrix"].numpy(), expected, atol=1e-6)
    assert not np.any(owed(compression, "matrix"))
    models = []
    for growth in (10**9, 4):
        model = model_of()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9), compression=hvdc.Compression.topk(ratio=0.05)
        )
        optimizer = keras.mixed_precision.LossScaleOptimizer(
            optimizer, initial_scale=2.0**8, dynamic_growth_steps=growth
        )
        fit(
            model,
            optimizer,
            4,
            [switching({1: "none", 2: "dgc:ratio=0.05", 3: "topk:ratio=0.05"})],
            epochs=4,
        )
        models.append(model)
    assert_close(*models, tolerance=1e-5)
    assert_replicas_identical(model)


@case(2)
def moments_of_passes_come_and_go_with_switches():
    model, optimizer = model_of(), keras.optimizers.Adam(0.01)
    compression = hvdc.Compression.variance(optimizer, moments="microbatch", min_numel=0)
    wrapped = hvd.DistributedOptimizer(
        optimizer, compression=compression, backward_passes_per_step=2
    )
    fit(
        model,
        wrapped,
        8,
        [switching({1: "topk:ratio=0.1", 2: "variance:moments=microbatch,alpha=2,min_numel=0"})],
        epochs=3,
    )
    assert compression.config["alpha"] == 2 and compression.stats()["steps"] == 12
    assert_replicas_identical(model)
    other = hvdc.Compression.topk(keras.optimizers.Adam())
    with raises(ValueError, "make the compression with it"):
        other.switch("variance:moments=microbatch")
    models, to_dgc = [model_of(), model_of()], switching({1: "dgc:ratio=1,masking=false"})
    for model, callbacks in zip(models, ([], [to_dgc])):
        optimizer, options = SGD["new"](0.02, momentum=0.9), {}
        if callbacks:
            dense = hvdc.Compression.variance(optimizer, moments="microbatch", min_numel=10**9)
            options["compression"] = dense
        wrapped = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2, **options)
        fit(model, wrapped, 8, callbacks, epochs=3)
    assert_close(*models, tolerance=2e-5)


class OwnSGD(keras.optimizers.SGD):
    def update_step(self, gradient, variable):
        super().update_step(gradient / 2, variable)


@case(2)
def what_cannot_be_switched_is_refused():
    """With nothing changed: training goes on."""
    model, optimizer = model_of(), keras.optimizers.SGD(0.05, momentum=0.9)
    compression = hvdc.Compression.dgc(optimizer, ratio=0.05)
    fit(model, hvd.DistributedOptimizer(optimizer, compression=compression), 4)
    before, traces = compression.state_dict(), compression._graph.traces.generation
    fails = {
        "gdc": "unknown compressor",
        "dgc:transport=mpi": "transport=horovod",
        "dgc:nothing=1": "no option 'nothing'",
    }
    for spec, words in fails.items():
        with raises(ValueError, words):
            compression.switch(spec)
    with raises(
        MismatchError, "rank 1 differs from rank 0 in options.ratio", "between the same two steps"
    ):
        compression.switch(f"topk:ratio=0.{1 + hvd.rank()}")
    after = compression.state_dict()
    assert compression.config["id"] == "dgc"
    assert compression._graph.traces.generation == traces
    for name, arrays in before["tensors"].items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(after["tensors"][name][key], array)
    model.fit(*data(24), batch_size=12, verbose=0)
    assert_replicas_identical(model)
    with raises(RuntimeError, "hvdc.compression_of(optimizer).switch"):
        hvdc.Compression.topk().switch("none")
    with raises(ValueError, "dgc needs the optimizer"):
        unknown = hvdc.Compression.topk()
        exchanged(unknown, ("matrix",))(told(0, ("matrix",)))
        unknown.switch("dgc")
    with raises(ValueError, "update_step is not SGD's own"):
        hvdc.Compression.topk(OwnSGD(0.1, momentum=0.9)).switch("dgc")
    # Whose momentum nothing has arranged to leave to dgc.
    unbound, model = hvdc.Compression.none().bind(None), model_of()
    served = hvd.DistributedOptimizer(SGD["new"](0.1, momentum=0.9), compression=unbound)
    fit(model, served, 1)
    unbound.switch("dgc")
    with raises(ValueError, "momentum of another optimizer than the one it serves"):
        fit(model, served, 1)


@case(2)
def a_trace_that_is_held_over_a_switch_is_refused():
    compression = hvdc.Compression.topk(ratio=0.02)
    step = exchanged(compression, ("matrix",))
    concrete = step.get_concrete_function(told(0, ("matrix",)))
    concrete(told(0, ("matrix",)))
    compression.switch("adacomp")
    concrete(told(1, ("matrix",)))
    compression.switch("none")
    with raises(
        tf.errors.OpError,
        "was traced before compression.switch()",
        "model.make_train_function(force=True)",
    ):
        concrete(told(2, ("matrix",)))
    step(told(2, ("matrix",)))
    assert set(compression.state_dict()["step"].values()) == {3}
