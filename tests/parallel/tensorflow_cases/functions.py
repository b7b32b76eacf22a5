"""Graphs and their traces, models, threads and memory."""

import itertools
import os
import resource
import threading

import alike
import horovod.tensorflow as hvdt
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from checks import raises, registry
from tensorflow import keras

import horovod_compress.tensorflow as hvdc
from horovod_compress import simulate
from horovod_compress.tools.models import MODELS

from .training import (
    LOSS,
    SGD,
    assert_close,
    assert_replicas_identical,
    data,
    fit,
    flat,
    make_variables,
    model_of,
    told,
    trained,
)

CASES, case = registry()


@case(2)
def traces_share_a_state_and_models_do_not():
    compressions = [hvdc.Compression.topk(ratio=0.02) for _ in range(2)]
    models = [model_of(), model_of(1)]
    before = [flat(model) for model in models]
    steps = []
    for model, compression in zip(models, compressions):
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

        @tf.function
        def step(x, y, model=model, compression=compression, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = LOSS(y, model(x, training=True))
            tape = hvdt.DistributedGradientTape(tape, compression=compression)
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            )

        steps.append(step)
    x, y = data(12)
    # On one rank a function may be traced more often than on the other.
    for sizes in ((12, 12), (7, 5), (12, 7)):
        n = sizes[hvd.rank()]
        for step in steps:
            step(x[:n], y[:n])
    assert steps[0].experimental_get_tracing_count() >= 2
    for model, compression, start in zip(models, compressions, before):
        state = compression.state_dict()
        assert set(state["step"].values()) == {3} and compression.stats()["steps"] == 3
        assert set(state["tensors"]) == {v.name.split(":")[0] for v in model.trainable_variables}
        assert (flat(model) != start).any()
        assert_replicas_identical(model)
    residuals = [compression.stats()["residual_norm"] for compression in compressions]
    assert residuals[0] != residuals[1] and min(residuals) > 0


@case(2)
def a_state_is_restored_as_variables_become_known():
    results, state = [], None
    for restored in (False, True):
        compression = hvdc.Compression.topk(ratio=0.01)
        if restored:
            compression.load_state_dict(state)
            assert compression.state_dict()["step"] == {"matrix": 2, "wide": 1}
        if not restored:
            variables = [
                tf.Variable(tf.zeros(alike.SHAPES[name]), name=name) for name in ("matrix", "wide")
            ]

        def step(i, names):
            given = told(i, names)
            with tf.GradientTape() as tape:
                loss = tf.add_n(
                    [
                        tf.reduce_sum(v * given[v.name[:-2]])
                        for v in variables
                        if v.name[:-2] in names
                    ]
                )
            tape = hvdt.DistributedGradientTape(tape, compression=compression)
            return tape.gradient(loss, [v for v in variables if v.name[:-2] in names])

        if not restored:
            step(0, ("matrix",))
            step(1, ("matrix", "wide"))
            state = compression.state_dict()
        results.append(
            [g.numpy() for names in (("matrix",), ("matrix", "wide")) for g in step(2, names)]
        )
    for mine, its in zip(*results):
        assert np.array_equal(mine, its)


@case(2)
def several_steps_in_a_call_and_gradients_that_are_constant():
    """A gradient that does not depend on anything is computed once, by TensorFlow; what is
    exchanged of it is not."""
    expected = simulate("topk:ratio=0.01", [[{"w": np.ones((40, 50), np.float32)}] * 2] * 6).mean
    variable, compression = (
        tf.Variable(tf.zeros((40, 50)), name="w"),
        hvdc.Compression.topk(ratio=0.01),
    )

    @tf.function
    def steps(n):
        for _ in tf.range(n):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable)
            (gradient,) = hvdt.DistributedGradientTape(tape, compression=compression).gradient(
                loss, [variable]
            )
            variable.assign_sub(gradient)

    steps(2)
    steps(4)
    # Their gradients are one tensor.
    twins = [tf.Variable(tf.zeros((40, 50)), name=f"w{i}") for i in range(2)]
    both = hvdc.Compression.topk(ratio=0.01)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(twins[0] + twins[1])
        return hvdt.DistributedGradientTape(tape, compression=both).gradient(loss, twins)

    gradients = [[np.ones((40, 50), np.float32)] * 2] * 3
    wanted = simulate(
        "topk:ratio=0.01", [[{"w0": g, "w1": g} for g in ranks] for ranks in gradients]
    ).mean
    for mean in wanted:
        for name, gradient in zip(("w0", "w1"), step()):
            assert np.array_equal(gradient.numpy(), mean[name])
    assert np.allclose(variable.numpy(), -sum(step["w"] for step in expected), atol=1e-6)
    assert compression.stats()["steps"] == 6
    model, optimizer = model_of(), SGD["new"](0.05, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(
        optimizer, compression=hvdc.Compression.dgc(optimizer, ratio=1, masking=False)
    )
    make_variables(wrapped, model)
    model.compile(wrapped, LOSS, steps_per_execution=5)
    x, y = data(240)
    model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    assert_close(model, trained(None, sgd={"momentum": 0.9})[0])


def normal(rng, like):
    """A tensor of random numbers."""
    return tf.constant(rng.standard_normal(like.shape), tf.float32)


@case(2)
def tapes_in_one_function_take_turns():
    """Three with one compression, two of which have the same variables: as in eager code, bit for
    bit, also in functions that a function calls."""
    for nested in (False, True):
        results = []
        for traced in (False, True):
            compression = hvdc.Compression.topk(ratio=0.1, min_numel=0)
            variables = [tf.Variable(tf.zeros((40, 50 + i)), name=f"v{i}") for i in range(4)]
            sets = variables[:2], variables[2:]

            def gradients_of(given, k, compression=compression, sets=sets):
                with tf.GradientTape() as tape:
                    loss = tf.add_n([tf.reduce_sum(v * g) for v, g in zip(sets[k], given)])
                tape = hvdt.DistributedGradientTape(tape, compression=compression)
                return tape.gradient(loss, sets[k])

            each = tf.function(gradients_of) if traced and nested else gradients_of

            def step(given, each=each):
                return [each(gradients, k) for gradients, k in zip(given, (0, 1, 0))]

            run = tf.function(step) if traced else step
            rng = np.random.default_rng(hvd.rank())
            for _ in range(3):
                given = [[normal(rng, v) for v in sets[k]] for k in (0, 1, 0)]
                results.append(tf.nest.flatten(run(given)))
            assert set(compression.state_dict()["step"].values()) == {3, 6}
        for wanted, found in zip(results[:3], results[3:]):
            for a, b in zip(wanted, found):
                np.testing.assert_array_equal(a.numpy(), b.numpy())


@case(2)
def optimizers_that_aggregate_in_one_function():
    """Two of Horovod's with one compression, which exchange in a branch each, every second call."""
    sides = [tf.Variable(tf.ones((40, 50 + i)), name=f"side{i}") for i in range(2)]
    compression = hvdc.Compression.topk(keras.optimizers.SGD(1.0), ratio=0.1, min_numel=0)
    wrap = {"compression": compression, "backward_passes_per_step": 2}
    optimizers = [hvd.DistributedOptimizer(SGD["new"](1.0), **wrap) for _ in sides]
    for side, optimizer in zip(sides, optimizers):
        optimizer.build([side])

    @tf.function
    def step(*given):
        for side, optimizer, gradient in zip(sides, optimizers, given):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(side * gradient)
            optimizer.minimize(loss, [side], tape=tape)

    rng = np.random.default_rng(hvd.rank())
    for _ in range(4):
        step(*(normal(rng, side) for side in sides))
    for side in sides:
        every = hvdt.allgather_object(side.numpy())
        assert (side.numpy() != 1).any() and all((each == every[0]).all() for each in every)
    assert set(compression.state_dict()["step"].values()) == {2}


@case(2)
def eager_gradients_stay_what_they_were():
    compression = hvdc.Compression.topk(ratio=0.01)
    variable = tf.Variable(tf.zeros((40, 50)), name="w")
    given = told(0)["matrix"]
    kept = given.numpy().copy()

    @tf.custom_gradient
    def times(x):
        return tf.zeros(()), lambda _: given

    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = times(variable)
        (gradient,) = hvdt.DistributedGradientTape(tape, compression=compression).gradient(
            loss, [variable]
        )
        assert (given.numpy() == kept).all()
    assert np.count_nonzero(gradient.numpy()) <= 2 * 20 * hvd.size()


@case(2)
def one_thread_is_enough():
    """In a job with one thread between operations: nothing waits for a collective on it."""
    assert (
        tf.config.threading.get_inter_op_parallelism_threads() in (0, 1)
        and os.environ["TF_NUM_INTEROP_THREADS"] == "1"
    )
    for spec in ("dgc:momentum=0.9,ratio=0.01", "multiscale", "powersgd"):
        model, compression = trained(spec, steps=10)
        assert compression.stats()["steps"] == 10
        assert_replicas_identical(model)


@case(2)
def a_large_gradient_is_not_copied():
    """Memory of a step at its largest, with a gradient of 200 MB in a graph: the residual comes on
    top, and no copy."""
    shape, megabyte = (7_000, 7_000), 2**20
    variable = tf.Variable(tf.zeros(shape))

    def peak(compression):
        @tf.function
        def step(factor):
            @tf.custom_gradient
            def apply(x):
                return tf.zeros(()), lambda _: tf.fill(shape, factor)

            with tf.GradientTape() as tape:
                loss = apply(variable)
            tape = (
                tape
                if compression is None
                else hvdt.DistributedGradientTape(tape, compression=compression)
            )
            (gradient,) = tape.gradient(loss, [variable])
            return gradient[0, 0]

        for i in range(3):
            step(tf.constant(float(i)))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    alone = peak(None)
    more = peak(hvdc.Compression.topk(ratio=1e-4)) - alone
    assert more < 1.4 * 4 * shape[0] * shape[1], (
        f"{more / megabyte:.0f} MB on top of {alone / megabyte:.0f}"
    )


@case(2)
def other_variables_of_the_same_shapes_are_noticed():
    """TensorFlow does not trace again for them, eagerly or in another model."""
    compression = hvdc.Compression.topk(ratio=0.01)
    blocks = [tf.Variable(tf.fill((40, 50), float(i))) for i in range(2)]

    def step(variable):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * told(0)["matrix"])
        hvdt.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])

    step(blocks[0])
    step(blocks[0])
    with raises(tf.errors.OpError, "make one for each model"):
        step(blocks[1])
    compression, empty = hvdc.Compression.topk(ratio=0.01), tf.Variable(tf.zeros((0, 3)))

    def step_with_an_empty_one(variable):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * told(0)["matrix"]) + tf.reduce_sum(empty)
        tape = hvdt.DistributedGradientTape(tape, compression=compression)
        tape.gradient(loss, [variable, empty])

    step_with_an_empty_one(blocks[0])
    with raises(tf.errors.OpError, "make one for each model"):
        step_with_an_empty_one(blocks[1])
    sgd = SGD["new"](0.05, momentum=0.9)
    compression = hvdc.Compression.dgc(sgd)
    # Were the first one gone, TensorFlow might trace again.
    models = [model_of(), model_of()]
    fit(models[0], hvd.DistributedOptimizer(sgd, compression=compression), 3)
    with raises(tf.errors.OpError, "make one for each model"):
        fit(models[1], hvd.DistributedOptimizer(sgd, compression=compression), 3)
    with raises(ValueError, "momentum of another optimizer"):
        compression = hvdc.Compression.dgc(SGD["new"](0.05, momentum=0.9))
        fit(
            model_of(),
            hvd.DistributedOptimizer(SGD["new"](0.05, momentum=0.9), compression=compression),
            3,
        )


@case(2)
def an_optimizer_may_write_before_gradients_come():
    """A weight decay of Keras changes variables while their gradients are still exchanged: no
    reason to refuse the step."""
    model, adam = model_of(), keras.optimizers.AdamW(0.01, weight_decay=0.1)
    compression = hvdc.Compression.topk(ratio=0.05)
    x, y = data(12)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x))
        tape = hvdt.DistributedGradientTape(tape, compression=compression)
        adam.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        )

    for _ in range(100):
        step()
    assert_replicas_identical(model)


@case(2)
def threads_train_models_of_their_own():
    # Bound here, because threads may trace in another order on another rank.
    compressions = [
        make(keras.optimizers.SGD()) for make in (hvdc.Compression.maxnorm, hvdc.Compression.topk)
    ]
    errors = []

    def work(which):
        variables = [
            tf.Variable(tf.ones((100, 20 + j)), name=f"model{which}_{j}") for j in range(4)
        ]

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v * v) for v in variables])
            with tf.name_scope(f"model{which}"):
                grads = hvdt.DistributedGradientTape(
                    tape, compression=compressions[which]
                ).gradient(loss, variables)
            for variable, grad in zip(variables, grads):
                variable.assign_sub(0.001 * grad)

        try:
            for _ in range(30):
                step()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert [compression.stats()["steps"] for compression in compressions] == [30, 30]


@case()
def gathers_with_steps_that_are_told():
    """Steps with ResNet-50's first gradients, after each of which a rank says so: where Horovod
    logs, for lines of two streams come in any order. They are two groups, of which one is
    gathered."""
    shapes = dict(itertools.islice(MODELS["resnet50"]().items(), 40))
    variables = [
        tf.Variable(tf.zeros(shape), name=name.replace(".", "_")) for name, shape in shapes.items()
    ]
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    compression = hvdc.Compression.dgc(optimizer, ratio=0.001)
    given = [
        [tf.random.stateless_normal(shape, (hvd.rank(), which)) for shape in shapes.values()]
        for which in range(2)
    ]

    @tf.function
    def step(gradients):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [
                    tf.reduce_sum(variable * gradient)
                    for variable, gradient in zip(variables, gradients)
                ]
            )
        tape = hvdt.DistributedGradientTape(tape, compression=compression)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    types = [op.type for op in step.get_concrete_function(given[0]).graph.get_operations()]
    # The call begins, ranks are counted; groups are submitted and finished.
    assert sum(each.startswith("PyFunc") for each in types) == 2 + 2 * 2
    assert [types.count(f"HorovodAll{each}") for each in ("gather", "reduce")] == [1, 1 + 2]
    for number in range(30):
        step(given[number % 2])
        print(f"step {number} of rank {hvd.rank()}", flush=True)
