"""Numbers that are not finite, and narrow and wide types."""

import warnings

import alike
import horovod.tensorflow as hvdt
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from checks import raises, registry
from tensorflow import keras

import horovod_compress.tensorflow as hvdc
from horovod_compress import get_compressor, simulate
from horovod_compress.session import notices
from horovod_compress.tensorflow.exchange import GraphExchange

from .training import SGD, assert_replicas_identical, exchanged, fit, model_of, told

CASES, case = registry()


@case(2)
def not_finite_gradients_lose_nothing():
    for spec in ("topk:ratio=0.01", "adacomp", "maxnorm:ratio=0.1", "powersgd"):
        for poisoned in ("matrix", "bias"):
            compression = hvdc.Compression.from_spec(spec)
            step = exchanged(compression)
            for i in range(2):
                step(told(i))
            before = compression.state_dict()["tensors"]
            gradients = told(2)
            if hvd.rank() == 1:
                gradients[poisoned] *= np.inf
            results = step(gradients)
            assert not np.isfinite(results[poisoned].numpy()).all(), (
                "this rank does not see the other's poison"
            )
            # The optimizer would have skipped the step.
            after = compression.state_dict()["tensors"]
            for name, arrays in after.items():
                residual = arrays.get("residual")
                if residual is not None:
                    finite = (
                        0
                        if name == poisoned and hvd.rank() == 1
                        else alike.gradients(hvd.rank(), 2)[name].ravel()
                    )
                    if spec != "powersgd" or name != poisoned:
                        assert np.allclose(
                            residual, before[name]["residual"] + finite, atol=1e-4
                        ), (spec, name)
            step(told(3))
            assert compression.stats()["steps_undone"] == 1


@case(2)
def sparse_gradients_that_are_not_finite_undo_the_step():
    """Those that Horovod gathers by itself, which a LossScaleOptimizer finds on all ranks."""
    names, shapes = ("table", "matrix", "empty"), ((9, 4), (40, 50), (0, 3))
    variables = [tf.Variable(tf.ones(shape), name=n) for n, shape in zip(names, shapes)]
    compression = hvdc.Compression.topk(ratio=0.01, min_numel=0)
    wrapped = hvd.DistributedOptimizer(SGD["new"](0.1), compression=compression)
    scaled = keras.mixed_precision.LossScaleOptimizer(wrapped, initial_scale=4.0)

    @tf.function
    def step(factor, gradient):
        table, matrix, empty = variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1, 2])) * factor + tf.reduce_sum(empty)
            loss += tf.reduce_sum(matrix * gradient)
        scaled.minimize(loss, variables, tape=tape)

    for i, factor in enumerate((1.0, np.inf if hvd.rank() else 1.0, 1.0)):
        before = [variable.numpy() for variable in variables]
        step(tf.constant(factor), told(i)["matrix"])
        kept = all((a == b.numpy()).all() for a, b in zip(before, variables))
        assert kept == (i == 1), i
        assert compression.stats()["steps_undone"] == (i > 0), i
    assert float(scaled.loss_scale) == 2.0
    assert all(np.isfinite(variable.numpy()).all() for variable in variables)


@case(2)
def mixed_precision_skips_steps_and_goes_on():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        for kind in SGD:
            model = model_of()
            sgd = SGD[kind](0.02, momentum=0.9)
            compression = hvdc.Compression.dgc(sgd, ratio=0.02)
            wrapped = hvd.DistributedOptimizer(sgd, compression=compression)
            # Overflows at first.
            scaled = keras.mixed_precision.LossScaleOptimizer(wrapped, initial_scale=2.0**24)
            losses = fit(model, scaled, 40, epochs=3)
            stats = compression.stats()
            assert 0 < stats["steps_undone"] < 20 and stats["steps"] == 120, stats
            assert losses[-1] < losses[0], losses
            assert_replicas_identical(model)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@case(2)
def a_change_of_loss_scale_changes_nothing():
    """Powers of two: bit for bit what training without a LossScaleOptimizer gives, state
    included."""
    for kind, spec in (("new", "dgc:ratio=0.02,clip_norm=0.5"), ("legacy", "variance:tau=0.001")):
        trained = []
        for scaled in (False, True):
            model, sgd = model_of(), SGD[kind](0.02, momentum=0.9)
            compression = hvdc.Compression.from_spec(spec, sgd)
            optimizer = hvd.DistributedOptimizer(sgd, compression=compression)
            if scaled:
                optimizer = keras.mixed_precision.LossScaleOptimizer(
                    optimizer, initial_scale=2.0**4, dynamic_growth_steps=3
                )
            fit(model, optimizer, 10)
            state = compression.state_dict()["tensors"]
            trained.append(
                (
                    [variable.numpy() for variable in model.trainable_variables],
                    [a for each in state.values() for a in each.values()],
                )
            )
        assert float(optimizer.loss_scale) == 2.0**7
        for expected, found in zip(*trained):
            assert len(expected) == len(found)
            for i, pair in enumerate(zip(expected, found)):
                assert np.array_equal(*pair), (kind, spec, i, np.abs(pair[0] - pair[1]).max())


@case(2)
def a_tape_follows_the_loss_scale_that_it_is_given():
    variable = tf.Variable(tf.zeros((40, 50)))
    scaler = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0, dynamic_growth_steps=1
    )
    compression = hvdc.Compression.topk(ratio=0.01, grad_scaler=scaler)

    @tf.function
    def step(gradient):
        with tf.GradientTape() as tape:
            loss = scaler.get_scaled_loss(tf.reduce_sum(variable * gradient))
        scaled = hvdt.DistributedGradientTape(tape, compression=compression).gradient(
            loss, [variable]
        )
        gradients = scaler.get_unscaled_gradients(scaled)
        scaler.apply_gradients(zip(gradients, [variable]))
        return gradients[0]

    gradients = [
        [{"Variable": alike.gradients(rank, i)["matrix"]} for rank in range(2)] for i in range(6)
    ]
    expected = simulate("topk:ratio=0.01", gradients)
    for i in range(6):
        assert np.array_equal(
            step(gradients[i][hvd.rank()]["Variable"]).numpy(), expected.mean[i]["Variable"]
        ), i
    assert float(scaler.loss_scale) == 2.0**7
    (state,) = compression.state_dict()["tensors"].values()
    assert np.array_equal(state["residual"], expected.state[hvd.rank()]["Variable"]["residual"])
    with raises(RuntimeError, "the loss scale has come to"):
        GraphExchange(get_compressor("topk"), 0, 2).begin(0, 2, 2.0**61)
    with raises(TypeError, "grad_scaler must be"):
        hvdc.Compression.topk(grad_scaler=4.0)
    # One that does not know the scale.
    notices._warned.clear()
    compression = hvdc.Compression.topk(ratio=0.01)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        tf.function(step.python_function)(gradients[0][0]["Variable"])
    assert ["LossScaleOptimizer is in reach" in str(each.message) for each in heard] == [True]


@case(2)
def damaged_states_are_refused():
    """At once, also where variables are not known yet."""
    known, new = (GraphExchange(get_compressor("topk:min_numel=0"), 0, 2) for _ in "ab")
    known.add("w", (3, 4), known.tensors.compressor)
    state = known.state_dict()
    state["tensors"]["w"]["residual"][5] = np.nan
    for exchange in known, new:
        with raises(ValueError, "w.residual has elements that are nan"):
            exchange.load_state_dict(state)
        for shapes in (None, 5, {"w": 5}, {"w": ["3"]}):
            with raises(ValueError, "shapes is", "lengths by tensor here"):
                exchange.load_state_dict({**known.state_dict(), "shapes": shapes})


@case(2)
def a_gradient_of_a_call_that_is_forgotten():
    """Many calls have begun since, or the compression was switched."""
    compressor, grad = get_compressor("topk:min_numel=0"), np.ones(12, np.float32)
    exchange = GraphExchange(compressor, 0, 2)
    exchange.add("w", (3, 4), compressor)
    first, *_, last = (exchange.begin(0, 2) for _ in range(101))
    with raises(RuntimeError, "w: its gradient came after 100 later calls"):
        exchange.submit(("w",), first, [grad.copy()])
    exchange.submit(("w",), last, [grad.copy()])
    exchange.rollback()
    exchange.switch(compressor, {"w": ((3, 4), compressor)}, {})
    with raises(RuntimeError, "w: its gradient came", "or after compression.switch()"):
        exchange.submit(("w",), last, [grad.copy()])


@case(2)
def variables_of_other_types():
    for dtype in (tf.float16, tf.bfloat16, tf.float64):
        for spec in ("topk:ratio=0.1", "multiscale"):
            compression = hvdc.Compression.from_spec(spec)
            variable = tf.Variable(tf.zeros((40, 50), dtype), name="matrix")

            @tf.function
            def step(gradient):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(variable * gradient)
                return hvdt.DistributedGradientTape(tape, compression=compression).gradient(
                    loss, [variable]
                )[0]

            narrow = [tf.cast(alike.gradients(rank, 0)["matrix"], dtype) for rank in range(2)]
            expected = simulate(
                spec, [[{"matrix": tf.cast(g, tf.float32).numpy()} for g in narrow]]
            ).mean[0]["matrix"]
            result = step(narrow[hvd.rank()])
            assert result.dtype == dtype
            assert np.array_equal(result.numpy(), tf.cast(expected, dtype).numpy()), (dtype, spec)
    compression = hvdc.Compression.topk(ratio=1)
    variable = tf.Variable(tf.zeros((40, 50), tf.float16), name="matrix")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * tf.constant(40000, tf.float16))
    # 80000 is infinite in float16.
    tape = hvdt.DistributedGradientTape(tape, compression=compression, op=hvdt.Sum)
    assert np.isinf(tape.gradient(loss, [variable])[0].numpy()).all()
    assert compression.stats()["steps_undone"] == 1
    assert np.allclose(compression.state_dict()["tensors"]["matrix"]["residual"], 40000)
    variable = tf.Variable(tf.zeros((40, 50), tf.complex64))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable)
    with raises(TypeError, "complex64"):
        hvdt.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])


@case(2)
def float64_is_carried_by_none_and_warned_of_by_others():
    """Gradients and updates. Rank 1's gradients are three times rank 0's, the mean twice those."""
    sizes = np.repeat(np.array([1e-300, 1e-60, 1.0, 1 + 1e-12, 1e60, 1e300])[:, None], 4, 1)
    gradient = tf.constant(sizes * (1 + 2 * hvd.rank()))
    for spec, warns in (
        ("none", 0),
        ("topk:ratio=1,min_numel=0", 1),
        ("fp16", 1),
        ("maxnorm:min_numel=0", 1),
    ):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            variables = [tf.Variable(tf.ones((6, 4), tf.float64), name=name) for name in ("a", "b")]
            compression = hvdc.Compression.from_spec(spec)

            @tf.function
            def step():
                with tf.GradientTape() as tape:
                    loss = tf.add_n([tf.reduce_sum(variable * gradient) for variable in variables])
                return hvdt.DistributedGradientTape(tape, compression=compression).gradient(
                    loss, variables
                )

            results = [step() for _ in range(2)][-1]
            optimizer = hvdc.UpdateOptimizer(
                SGD["new"](1.0),
                spec,
                **({"outer": hvdc.Nesterov(1.0, 0.0)} if spec == "none" else {}),
            )

            @tf.function
            def update():
                optimizer.apply_gradients([(gradient, variable) for variable in variables])

            update()
        told = [str(each.message) for each in said if "float64" in str(each.message)]
        assert len(told) == 2 * warns, (spec, told)
        if not warns:
            for result, variable in zip(results, variables):
                np.testing.assert_allclose(result.numpy(), 2 * sizes, rtol=1e-14)
                np.testing.assert_allclose(variable.numpy(), 1 - 2 * sizes, rtol=1e-14)
