"""What real ranks are asked to prove of the TensorFlow adapter; test_tensorflow.py asks. See cases.py."""
import os
import resource
import sys
import tempfile
import threading

import alike
import horovod.tensorflow as hvdt
import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from checks import raises, registry
from tensorflow import keras

import horovod_compress.tensorflow as hvdc
from horovod_compress import MismatchError, kernels, simulate

CASES, case = registry()
SGD = {"new": keras.optimizers.SGD, "legacy": keras.optimizers.legacy.SGD}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def start():
    """The rank, ready to run cases."""
    assert "torch" not in sys.modules
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init(process_sets="dynamic")
    return hvd.rank()


# -- a model, data that differs between ranks, and training as users write it -------------------------------------------


def model_of(seed=0):
    """A convolution, normalization, a layer that is used twice, and dense layers, 9 thousand parameters; the same names each time."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input((8, 8, 1))
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


def fit(model, optimizer, steps=20, callbacks=(), seed=0, **options):
    x, y = data(12 * steps, seed)
    model.compile(optimizer, LOSS)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    return model.fit(x, y, batch_size=12, shuffle=False, verbose=0, callbacks=callbacks, **options).history["loss"]


def trained(spec, kind="new", steps=20, seed=0, sgd=None, wrap=None, **options):
    """(model, compression) after so many steps; spec None: plain Horovod."""
    model = model_of(seed)
    optimizer = SGD[kind](0.05, **(sgd or {}))
    compression = hvdt.Compression.none if spec is None else hvdc.Compression.from_spec(spec, optimizer)
    fit(model, hvd.DistributedOptimizer(optimizer, compression=compression, **(wrap or {})), steps, **options)
    return model, compression


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


# -- the same as PyTorch ----------------------------------------------------------------------------------------------


@case()
def told_gradients_to_a_file():
    """For test_tensorflow.py, which compares them with PyTorch's."""
    results, sent = {}, {}
    for spec in alike.SPECS:
        compression = hvdc.Compression.from_spec(spec)
        step = exchanged(compression)
        results[spec] = [{n: g.numpy() for n, g in step(told(i)).items()} for i in range(alike.STEPS)]
        sent[spec] = compression.stats()["bytes_sent"]
    alike.write(f"{sys.argv[2]}.{hvd.rank()}.npz", results, sent)


@case()
def a_compressor_of_another_package():
    """For test_other_packages.py, which installs one."""
    compression = hvdc.Compression.cyclic(every=4)
    step = exchanged(compression)
    for i, means in enumerate(alike.cyclic_means(4, hvd.size())):
        found = step(told(i))
        for name, mean in means.items():
            np.testing.assert_allclose(found[name].numpy(), mean, atol=1e-6)
    assert compression.stats()["ratio"] > 2


def simulated(spec, steps=alike.STEPS):
    return simulate(spec, [[alike.gradients(rank, step) for rank in range(hvd.size())] for step in range(steps)])


@case(2, 3)
def a_tape_gives_what_simulate_gives():
    """In graphs and eagerly, averages and sums, in groups and not, with predivision; clipped by the norm of all gradients."""
    for spec, in_graph, options in (
        ("topk", False, {}), ("multiscale", False, {}), ("adacomp", True, {"op": hvdt.Sum}), ("maxnorm", True, {"op": hvdt.Sum, "groups": 1}),
        ("powersgd", True, {"groups": 2}), ("topk", True, {"gradient_predivide_factor": 4.0}), ("dgc:momentum=0.9,clip_norm=20", True, {}),
    ):
        expected = simulated(spec)
        step = exchanged(hvdc.Compression.from_spec(spec), in_graph=in_graph, tape_options=options)
        for i, mean in enumerate(expected.mean):
            for name, gradient in step(told(i)).items():
                wanted = mean[name] * (hvd.size() if options.get("op") == hvdt.Sum else 1)
                error = np.abs(gradient.numpy() - wanted).max()
                assert error <= 1e-5 * np.abs(wanted).max(), f"{spec} {options}: {name} differs by {error} in step {i}"


@case(2, 4, 8)
def clip_norm_limits_the_update():
    """Independent gradients far above the limit give a result of norm clip_norm, whatever Horovod does with the sum."""
    noise = {name: np.random.default_rng(hvd.rank()).standard_normal(shape, np.float32) for name, shape in alike.SHAPES.items()}
    norm = np.sqrt(sum(np.square(array).sum() for array in noise.values()))
    for options in ({}, {"op": hvdt.Sum}, {"gradient_predivide_factor": 4.0}):
        for in_graph in (True, False) if hvd.size() == 2 else (True,):
            compression = hvdc.Compression.dgc(ratio=1, momentum=0, clip_norm=1)
            step = exchanged(compression, in_graph=in_graph, tape_options=options)
            result = step({name: tf.constant(10 * hvd.size() / norm * array) for name, array in noise.items()})
            found = np.sqrt(sum(np.square(array.numpy()).sum() for array in result.values()))
            assert 0.9 < found < 1.1, f"{options}, in_graph={in_graph}: {found}"


@case(8)
def payloads_that_would_move_more_than_dense_ones_go_dense():
    """9 bits an element from 8 ranks move more than a ring allreduce of 32."""
    compression = hvdc.Compression.natural()
    step = exchanged(compression)
    for i in range(3):
        result = step(told(i))
        for name in alike.SHAPES:
            mean = sum(alike.gradients(rank, i)[name].astype(np.float64) for rank in range(hvd.size())) / hvd.size()
            np.testing.assert_allclose(result[name].numpy(), mean, atol=1e-6)
    stats = compression.stats()
    assert stats["bytes_sent"] == stats["dense_bytes"], stats


@case(2)
def residuals_follow_the_learning_rate():
    """efsignsgd with a schedule and with a rate that is set, of both kinds of optimizers and with a tape: as `simulate`, which is as
    published."""
    names, rates = ("matrix", "kernel"), [0.1, 0.2, 0.02, 0.5, 0.05]
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0, 1, 2, 3], rates)
    gradients = [[{n: alike.gradients(rank, step)[n] for n in names} for rank in range(2)] for step in range(5)]
    means = [simulate("efsignsgd:min_numel=0", gradients, **lr).mean for lr in ({"lr": rates}, {})]
    expected, plain = (
        {n: -sum(rate * mean[n].astype(np.float64) for rate, mean in zip(rates, its)) for n in names} for its in means
    )
    for kind, scheduled, taped in (("new", True, False), ("legacy", True, True), ("new", False, True), ("legacy", False, False)):
        variables = {name: tf.Variable(tf.zeros(alike.SHAPES[name]), name=name) for name in names}
        bound = SGD[kind](schedule if scheduled else rates[0])
        compression = hvdc.Compression.from_spec("efsignsgd:min_numel=0", bound)
        optimizer = bound if taped else hvd.DistributedOptimizer(bound, compression=compression)
        if kind == "new":
            optimizer.build(list(variables.values()))

        @tf.function
        def step(given):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(variables[n] * given[n]) for n in names])
            if taped:
                tape = hvdt.DistributedGradientTape(tape, compression=compression)
                optimizer.apply_gradients(zip(tape.gradient(loss, list(variables.values())), variables.values()))
            else:
                optimizer.minimize(loss, list(variables.values()), tape=tape)

        for i, rate in enumerate(rates):
            if not scheduled:
                optimizer.learning_rate = rate
            step(told(i, names))
        for name, variable in variables.items():
            what = f"{kind} {'schedule' if scheduled else 'rate'} {'tape' if taped else 'optimizer'} {name}"
            error = np.abs(variable.numpy() - expected[name]).max()
            assert error <= 1e-4 * np.abs(expected[name]).max(), f"{what}: off by {error}"
            assert np.abs(plain[name] - expected[name]).max() > 0.01 * np.abs(expected[name]).max()


# -- training -----------------------------------------------------------------------------------------------------------

TRAINED = ("dgc:ratio=0.02", "adacomp", "variance", "maxnorm", "multiscale", "powersgd")


@case(2)
def fit_learns_and_resumes_bit_for_bit():
    """Three epochs as with plain Horovod; the state that a callback saved after two, restored, gives the third once more."""
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
                on_epoch_end=lambda epoch, logs: saved.append([model.get_weights(), [v.numpy() for v in optimizer.variables()]])
            )
            losses = fit(model, optimizer, 40, [hvdc.StateCheckpoint(compression, path), keep], epochs=3)
            assert losses[2] < losses[0] - 0.5 * (plain[0] - plain[2]), f"{spec}: {losses}, plain {plain}"
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
            restore = hvdc.StateCheckpoint(compression, os.path.join(folder, "other"), restore=path.format(epoch=2))
            fit(again, optimizer, 40, [restore], epochs=1)
            assert (flat(again) == flat(model)).all(), spec


@case(2)
def dense_limit():
    """With every element sent, parameters are those of plain Horovod: momentum is taken over, and applied once."""
    for kind in SGD:
        for nesterov in (False, True):
            decays = ({}, {"weight_decay": 0.01}) if kind == "new" else ({},)  # the legacy optimizer has none
            for decay in decays:
                sgd = {"momentum": 0.9, "nesterov": nesterov, **decay}
                plain = trained(None, kind, sgd=sgd)[0]
                for spec in ("dgc:ratio=1,masking=false", "dgc:ratio=1,masking=false,min_numel=0"):
                    assert_close(trained(spec, kind, sgd=sgd)[0], plain)


@case(2)
def options_of_horovods_optimizer():
    for wrap in ({"num_groups": 2}, {"backward_passes_per_step": 2}, {"gradient_predivide_factor": 2.0}, {"op": hvdt.Sum}):
        for kind in SGD:
            sgd = {"momentum": 0.9}
            assert_close(trained("dgc:ratio=1,masking=false", kind, sgd=sgd, wrap=wrap)[0], trained(None, kind, sgd=sgd, wrap=wrap)[0])
    variables = model_of().trainable_variables
    wrap = {"groups": [variables[2:5], variables[:1]]}
    model, optimizer = model_of(), SGD["new"](0.05)
    variables = model.trainable_variables
    compression = hvdc.Compression.topk(optimizer)
    fit(model, hvd.DistributedOptimizer(optimizer, compression=compression, groups=[variables[2:5], variables[:1]]), 5)
    assert_replicas_identical(model)
    assert compression.stats()["steps"] == 5


@case(2)
def sparse_gradients():
    """As dense ones they are compressed; as IndexedSlices they keep Horovod's way, and SGD its momentum for them."""

    def run(spec, sparse_as_dense):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        words = [keras.layers.Embedding(60, 20, input_length=4), keras.layers.Flatten()]
        model = keras.Sequential([*words, keras.layers.Dense(30), keras.layers.Dense(5)])
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        compression = hvdt.Compression.none if spec is None else hvdc.Compression.from_spec(spec, optimizer)
        wrapped = hvd.DistributedOptimizer(optimizer, compression=compression, sparse_as_dense=sparse_as_dense)
        x = np.random.default_rng(hvd.rank()).integers(0, 60, (120, 4))
        model.compile(wrapped, LOSS)
        model.fit(x, x.sum(1) % 5, batch_size=12, shuffle=False, verbose=0)
        return model, compression

    for sparse_as_dense in (True, False):
        model, compression = run("dgc:ratio=1,masking=false", sparse_as_dense)
        assert_close(model, run(None, sparse_as_dense)[0])
        assert any("embedding" in name for name in compression.stats_by_tensor()) == sparse_as_dense
        assert_replicas_identical(model)


# -- functions, traces, models ------------------------------------------------------------------------------------------


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
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

        steps.append(step)
    x, y = data(12)
    for sizes in ((12, 12), (7, 5), (12, 7)):  # on one rank a function may be traced more often than on the other
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
            variables = [tf.Variable(tf.zeros(alike.SHAPES[name]), name=name) for name in ("matrix", "wide")]

        def step(i, names):
            given = told(i, names)
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v * given[v.name[:-2]]) for v in variables if v.name[:-2] in names])
            tape = hvdt.DistributedGradientTape(tape, compression=compression)
            return tape.gradient(loss, [v for v in variables if v.name[:-2] in names])

        if not restored:
            step(0, ("matrix",))
            step(1, ("matrix", "wide"))
            state = compression.state_dict()
        results.append([g.numpy() for names in (("matrix",), ("matrix", "wide")) for g in step(2, names)])
    for mine, its in zip(*results):
        assert np.array_equal(mine, its)


@case(2)
def several_steps_in_a_call_and_gradients_that_are_constant():
    """A gradient that does not depend on anything is computed once, by TensorFlow; what is exchanged of it is not."""
    expected = simulate("topk:ratio=0.01", [[{"w": np.ones((40, 50), np.float32)}] * 2] * 6).mean
    variable, compression = tf.Variable(tf.zeros((40, 50)), name="w"), hvdc.Compression.topk(ratio=0.01)

    @tf.function
    def steps(n):
        for _ in tf.range(n):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable)
            (gradient,) = hvdt.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])
            variable.assign_sub(gradient)

    steps(2)
    steps(4)
    twins = [tf.Variable(tf.zeros((40, 50)), name=f"w{i}") for i in range(2)]  # their gradients are one tensor
    both = hvdc.Compression.topk(ratio=0.01)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(twins[0] + twins[1])
        return hvdt.DistributedGradientTape(tape, compression=both).gradient(loss, twins)

    gradients = [[np.ones((40, 50), np.float32)] * 2] * 3
    wanted = simulate("topk:ratio=0.01", [[{"w0": g, "w1": g} for g in ranks] for ranks in gradients]).mean
    for mean in wanted:
        for name, gradient in zip(("w0", "w1"), step()):
            assert np.array_equal(gradient.numpy(), mean[name])
    assert np.allclose(variable.numpy(), -sum(step["w"] for step in expected), atol=1e-6)
    assert compression.stats()["steps"] == 6
    model, optimizer = model_of(), SGD["new"](0.05, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(optimizer, compression=hvdc.Compression.dgc(optimizer, ratio=1, masking=False))
    model.compile(wrapped, LOSS, steps_per_execution=5)
    x, y = data(240)
    model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
    assert_close(model, trained(None, sgd={"momentum": 0.9})[0])


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
        (gradient,) = hvdt.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])
        assert (given.numpy() == kept).all()
    assert np.count_nonzero(gradient.numpy()) <= 2 * 20 * hvd.size()


@case(2)
def one_thread_is_enough():
    """In a job with one thread between operations: nothing waits for a collective on it."""
    assert tf.config.threading.get_inter_op_parallelism_threads() in (0, 1) and os.environ["TF_NUM_INTEROP_THREADS"] == "1"
    for spec in ("dgc:momentum=0.9,ratio=0.01", "multiscale", "powersgd"):
        model, compression = trained(spec, steps=10)
        assert compression.stats()["steps"] == 10
        assert_replicas_identical(model)


@case(2)
def a_large_gradient_is_not_copied():
    """Memory of a step at its largest, with a gradient of 400 MB in a graph: the residual comes on top, and no copy."""
    shape, megabyte = (10_000, 10_000), 2**20
    variable = tf.Variable(tf.zeros(shape))

    def peak(compression):
        @tf.function
        def step(factor):
            @tf.custom_gradient
            def apply(x):
                return tf.zeros(()), lambda _: tf.fill(shape, factor)

            with tf.GradientTape() as tape:
                loss = apply(variable)
            tape = tape if compression is None else hvdt.DistributedGradientTape(tape, compression=compression)
            (gradient,) = tape.gradient(loss, [variable])
            return gradient[0, 0]

        for i in range(3):
            step(tf.constant(float(i)))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    alone = peak(None)
    more = peak(hvdc.Compression.topk(ratio=1e-4)) - alone
    assert more < 1.4 * 4 * shape[0] * shape[1], f"{more / megabyte:.0f} MB on top of {alone / megabyte:.0f}"


# -- numbers that are not finite, narrow types --------------------------------------------------------------------------


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
            assert not np.isfinite(results[poisoned].numpy()).all(), "this rank does not see the other's poison"
            after = compression.state_dict()["tensors"]  # the optimizer would have skipped the step
            for name, arrays in after.items():
                residual = arrays.get("residual")
                if residual is not None:
                    finite = 0 if name == poisoned and hvd.rank() == 1 else alike.gradients(hvd.rank(), 2)[name].ravel()
                    if spec != "powersgd" or name != poisoned:
                        assert np.allclose(residual, before[name]["residual"] + finite, atol=1e-4), (spec, name)
            step(told(3))
            assert compression.stats()["steps_undone"] == 1


@case(2)
def mixed_precision_skips_steps_and_goes_on():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        for kind in SGD:
            model = model_of()
            sgd = SGD[kind](0.02, momentum=0.9)
            compression = hvdc.Compression.dgc(sgd, ratio=0.02)
            wrapped = hvd.DistributedOptimizer(sgd, compression=compression)
            scaled = keras.mixed_precision.LossScaleOptimizer(wrapped, initial_scale=2.0**24)  # overflows at first
            losses = fit(model, scaled, 40, epochs=3)
            stats = compression.stats()
            assert 0 < stats["steps_undone"] < 20 and stats["steps"] == 120, stats
            assert losses[-1] < losses[0], losses
            assert_replicas_identical(model)
    finally:
        keras.mixed_precision.set_global_policy("float32")


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
                return hvdt.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])[0]

            narrow = [tf.cast(alike.gradients(rank, 0)["matrix"], dtype) for rank in range(2)]
            expected = simulate(spec, [[{"matrix": tf.cast(g, tf.float32).numpy()} for g in narrow]]).mean[0]["matrix"]
            result = step(narrow[hvd.rank()])
            assert result.dtype == dtype
            assert np.array_equal(result.numpy(), tf.cast(expected, dtype).numpy()), (dtype, spec)
    compression = hvdc.Compression.topk(ratio=1)
    variable = tf.Variable(tf.zeros((40, 50), tf.float16), name="matrix")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * tf.constant(40000, tf.float16))
    tape = hvdt.DistributedGradientTape(tape, compression=compression, op=hvdt.Sum)  # 80000 is infinite in float16
    assert np.isinf(tape.gradient(loss, [variable])[0].numpy()).all()
    assert compression.stats()["steps_undone"] == 1
    assert np.allclose(compression.state_dict()["tensors"]["matrix"]["residual"], 40000)
    variable = tf.Variable(tf.zeros((40, 50), tf.complex64))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable)
    with raises(TypeError, "complex64"):
        hvdt.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])


# -- process sets, one rank, moments --------------------------------------------------------------------------------------


@case(3)
def process_set():
    members = hvd.add_process_set([0, 2])
    names = ("matrix", "bias")
    expected = simulate("maxnorm", [[{n: alike.gradients(r, i)[n] for n in names} for r in (0, 2)] for i in range(3)]).mean
    compression = hvdc.Compression.maxnorm(process_set=members)
    step = exchanged(compression, names, tape_options={"process_set": members})
    for i in range(3):
        for name, gradient in step(told(i, names)).items():
            wanted = expected[i][name] if members.included() else alike.gradients(hvd.rank(), i)[name]
            assert np.allclose(gradient.numpy(), wanted, atol=1e-6), (i, name)
    with tempfile.TemporaryDirectory() as folder:  # each rank has a file of its own, whatever its number in the set is
        hvdc.StateCheckpoint(compression, os.path.join(folder, "state")).on_epoch_end(0)
        assert os.listdir(folder) == [f"state.rank{hvd.rank()}.npz"]
    hvd.remove_process_set(members)


@case(1)
def one_rank_trains_as_without_compression():
    sgd = {"momentum": 0.9, "nesterov": True}
    model, compression = trained("dgc", sgd=sgd)
    assert (flat(model) == flat(trained(None, sgd=sgd)[0])).all()
    assert compression.stats()["steps"] == 0 and compression.state_dict()["tensors"] == {}


@case(2)
def squares_of_backward_passes():
    for kind in SGD:
        model, optimizer = model_of(), SGD[kind](0.0)
        for layer in model.layers:
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.trainable = False  # would make a pass depend on those before it
        compression = hvdc.Compression.variance(optimizer, moments="microbatch", alpha=1e30, min_numel=0)
        x, y = data(24)
        squares = {}
        for half in (slice(0, 12), slice(12, 24)):
            with tf.GradientTape() as tape:
                loss = LOSS(y[half], model(x[half], training=True))
            for variable, gradient in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables)):
                name = variable.name.split(":")[0]
                squares[name] = squares.get(name, 0) + np.square(gradient.numpy()).ravel()
        for step in range(2):  # what one step has collected is gone in the next
            model.compile(hvd.DistributedOptimizer(optimizer, compression=compression, backward_passes_per_step=2), LOSS)
            model.fit(x, y, batch_size=12, shuffle=False, verbose=0)
            state = compression.state_dict()["tensors"]
            assert set(state) == set(squares) and len(state) == 8
            for name, expected in squares.items():
                both = expected * (0.999 if step == 0 else 0.999 * 1.999)  # zeta = 0.999
                assert np.abs(state[name]["v"] - both).max() <= 1e-3 * both.max(), (kind, name, step)


# -- mistakes -----------------------------------------------------------------------------------------------------------


class OwnSGD(keras.optimizers.SGD):
    def update_step(self, gradient, variable):
        super().update_step(gradient / 2, variable)


@case(2)
def mistakes_get_clear_errors():
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    for words, make in {
        "moments=per_sample needs PyTorch": lambda: hvdc.Compression.variance(sgd, moments="per_sample"),
        "moments=microbatch needs the optimizer": lambda: hvdc.Compression.variance(moments="microbatch"),
        "say transport=horovod": lambda: hvdc.Compression.topk(transport="mpi"),
        "say momentum=": lambda: hvdc.Compression.dgc(),
        "no option 'ration'": lambda: hvdc.Compression.dgc(sgd, ration=1),
        "unknown compressor 'gdc'": lambda: hvdc.Compression.from_spec("gdc", sgd),
        "bind the inner optimizer": lambda: hvdc.Compression.dgc(keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))),
        "to the optimizer itself": lambda: hvdc.Compression.dgc(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))),
        "update_step is not SGD's own": lambda: hvdc.Compression.dgc(OwnSGD(0.1, momentum=0.9)),
        "nothing else, not 'loss'": lambda: hvdc.StateCheckpoint(None, "state-{epoch}-{loss:.3f}"),
        "bound to a Keras optimizer": lambda: hvdc.Compression.dgc(model_of().trainable_variables),
        "not registered": lambda: hvdc.Compression.topk(process_set=hvd.ProcessSet([0])),
    }.items():
        with raises(ValueError, words):
            make()
    with raises(TypeError, "process_set must be one of Horovod's"):
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
            return hvdt.DistributedGradientTape(tape, compression=hvdc.Compression.topk()).gradient(loss, [unknown])

        step()
    with raises(ValueError, "jit_compile=False"):
        model = model_of()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=hvdc.Compression.topk()), LOSS, jit_compile=True)
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
        ({**state, "rank": 1 - hvd.rank()}, "rank"), ({**state, "id": "dgc"}, "id"), ({"a": 1}, "not a state_dict"),
        ({**state, "step": 3}, "steps by tensor"), ({**state, "step": {**state["step"], "bias": -1}}, "step.bias"),
    ):
        with raises(ValueError, words):
            compression.load_state_dict(broken)
    other = hvdc.Compression.topk(ratio=0.01)
    other.load_state_dict({**state, "tensors": {"other": {}}, "step": {"other": 3}})
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
    hvdc.Compression.topk()
    with raises(MismatchError, "rank 1 differs from rank 0 in kernels", "powersgd"):
        hvdc.Compression.powersgd()


@case(2)
def mismatched_ranks_are_named():
    with raises(MismatchError, "rank 1 differs from rank 0 in options.ratio"):
        hvdc.Compression.topk(ratio=0.01 + 0.01 * hvd.rank())
    compression = hvdc.Compression.topk()
    variable = tf.Variable(tf.zeros((40, 50 + hvd.rank())), name="w")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable)
    with raises(Exception, "MismatchError", "variables.w"):  # of a type that TensorFlow chooses, while it traces
        hvdt.DistributedGradientTape(tape, compression=compression).gradient(loss, [variable])


@case()
def a_state_loaded_on_one_rank_only():
    """In a job of its own, because the ranks are not in step afterwards."""
    for spec, words in (("topk:ratio=0.01", "was a state loaded on some ranks only?"), ("globalrandk", "others are not")):
        compression = hvdc.Compression.from_spec(spec)
        step = exchanged(compression, ("matrix",))
        state = compression.state_dict() if step(told(0, ("matrix",))) is None else compression.state_dict()
        step(told(1, ("matrix",)))
        if hvd.rank() == 0:
            compression.load_state_dict(state)
        with raises(tf.errors.OpError, words):
            step(told(2, ("matrix",)))


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
    sgd = SGD["new"](0.05, momentum=0.9)
    compression = hvdc.Compression.dgc(sgd)
    models = [model_of(), model_of()]  # were the first one gone, TensorFlow might trace again
    fit(models[0], hvd.DistributedOptimizer(sgd, compression=compression), 3)
    with raises(tf.errors.OpError, "make one for each model"):
        fit(models[1], hvd.DistributedOptimizer(sgd, compression=compression), 3)
    with raises(ValueError, "momentum of another optimizer"):
        compression = hvdc.Compression.dgc(SGD["new"](0.05, momentum=0.9))
        fit(model_of(), hvd.DistributedOptimizer(SGD["new"](0.05, momentum=0.9), compression=compression), 3)


@case(2)
def an_optimizer_may_write_before_gradients_come():
    """A weight decay of Keras changes variables while their gradients are still exchanged: no reason to refuse the step."""
    model, adam = model_of(), keras.optimizers.AdamW(0.01, weight_decay=0.1)
    compression = hvdc.Compression.topk(ratio=0.05)
    x, y = data(12)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x))
        tape = hvdt.DistributedGradientTape(tape, compression=compression)
        adam.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))

    for _ in range(100):
        step()
    assert_replicas_identical(model)


@case(2)
def threads_train_models_of_their_own():
    compressions = [hvdc.Compression.maxnorm(), hvdc.Compression.topk(ratio=0.05)]
    errors = []

    def work(which):
        variables = [tf.Variable(tf.ones((100, 20 + j)), name=f"model{which}_{j}") for j in range(4)]

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(v * v) for v in variables])
            with tf.name_scope(f"model{which}"):
                grads = hvdt.DistributedGradientTape(tape, compression=compressions[which]).gradient(loss, variables)
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


@case(2)
def keras_saves_the_optimizer_as_ever():
    """Momentum is the user's in its configuration, and the classes keep their names."""
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    hvdc.Compression.dgc(sgd)
    assert sgd.get_config()["momentum"] == 0.9
    assert keras.optimizers.serialize(sgd) == keras.optimizers.serialize(keras.optimizers.SGD(0.05, momentum=0.9))
    sgd = keras.optimizers.SGD(0.05, momentum=0.9)
    for _ in range(2):  # bound again: the second compression is the one in force
        compression = hvdc.Compression.dgc(sgd, ratio=1, masking=False)
    model = model_of()
    fit(model, hvd.DistributedOptimizer(sgd, compression=compression))
    assert_close(model, trained(None, sgd={"momentum": 0.9})[0])
