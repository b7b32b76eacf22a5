"""hvdc.UpdateOptimizer: what ranks' Keras optimizers would add to the variables is compressed and
exchanged, in place of gradients."""

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
from tensorflow import keras

import horovod_compress.tensorflow as hvdc
from horovod_compress import MismatchError
from horovod_compress.session import notices

from .training import (
    LOSS,
    SGD,
    assert_close,
    assert_replicas_identical,
    data,
    flat,
    make_variables,
    model_of,
    told,
    trained,
)

CASES, case = registry()
NAMES = ("matrix", "bias")


def fitted(model, optimizer, steps, callbacks=(), **options):
    """Losses, without Horovod's callback that gives all ranks what rank 0's optimizer keeps."""
    model.compile(optimizer, LOSS)
    return model.fit(
        *data(12 * steps), 12, shuffle=False, verbose=0, callbacks=[*callbacks], **options
    ).history["loss"]


def zeros():
    return {name: tf.Variable(tf.zeros(alike.SHAPES[name]), name=name) for name in NAMES}


def stepping(optimizer, variables, in_graph=True):
    """A function of gradients, by name, that takes a step with them, whatever the variables are."""

    def step(gradients):
        optimizer.apply_gradients([(gradients[name], variables[name]) for name in NAMES])

    return tf.function(step) if in_graph else step


def values(variables):
    return np.concatenate([variables[name].numpy().astype(np.float32).ravel() for name in NAMES])


def mean_of(array, name):
    return hvdt.allreduce(tf.constant(array), name=name).numpy()


def assert_alike(variables):
    mine = values(variables)
    found = hvdt.allgather(tf.constant(mine[None]), name="alike").numpy()
    assert np.isfinite(found).all() and (found == found[0]).all()
    return mine


def not_sent(compression):
    """The mean over ranks of what exchanges are still to bring."""
    exchange = compression._session.exchange
    exchange.arrays()
    kept = {
        tensor.name: np.zeros(tensor.numel, np.float32)
        if tensor.residual is None
        else tensor.residual
        for tensor in exchange.tensors
    }
    return mean_of(np.concatenate([kept[name] for name in NAMES]), "not sent")


@case(1, 2, 3)
def dense_updates_train_as_plain_horovod_does():
    """SGD's update is linear in gradients, with momentum, too."""
    for kind, options in (
        ("new", {}),
        ("new", {"momentum": 0.9, "nesterov": True}),
        ("legacy", {"momentum": 0.9}),
    ):
        plain = trained(None, kind, 10, sgd=options)[0]
        model, optimizer = model_of(), hvdc.UpdateOptimizer(SGD[kind](0.05, **options), "none")
        make_variables(optimizer, model)
        fitted(model, optimizer, 10)
        assert_close(model, plain)
        assert_replicas_identical(model)
    different = model_of(hvd.rank())
    fitted(different, hvdc.UpdateOptimizer(keras.optimizers.Adam()), 1)
    # Because all have begun as rank 0 did.
    assert_replicas_identical(different)


def adams_updates(gradients, lr, betas=(0.9, 0.999), eps=1e-7, ranks=1):
    """Adam's updates for a series of gradients, in NumPy, with the epsilon where Keras has it
    (Kingma and Ba 2015, before Section 2.1). ranks: those of hvdc.AdamW, with as many."""
    for t, (m, w) in enumerate(alike.adams_moments(gradients, betas, ranks), 1):
        yield -lr * np.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) * m / (np.sqrt(w) + eps)


@case(2, 3)
def rounds_are_those_of_local_adam():
    """Dense ones of one step, and of four with an outer optimizer (DiLoCo, arXiv 2311.08105,
    Algorithm 1), in graphs and eagerly, stated in NumPy."""
    series = [
        [
            {n: alike.gradients(rank, step)[n].astype(np.float64) for n in NAMES}
            for step in range(13)
        ]
        for rank in range(hvd.size())
    ]
    adam, whole = (
        functools.partial(keras.optimizers.Adam, 0.01),
        functools.partial(hvdc.AdamW, 0.01, weight_decay=0.0),
    )
    diloco = hvdc.Nesterov(0.7, 0.9)
    rounds = (
        (1, None, True, adam),
        (1, None, False, whole),
        (1, None, True, whole),
        (4, diloco, True, adam),
        (4, None, False, adam),
    )
    for every, outer, in_graph, make in rounds:
        ranks = hvd.size() if make is whole else 1
        updates = {
            n: [
                np.cumsum(list(adams_updates([g[n] for g in of_rank], 0.01, ranks=ranks)), 0)
                for of_rank in series
            ]
            for n in NAMES
        }
        variables = zeros()
        optimizer = hvdc.UpdateOptimizer(make(), "none", every=every, outer=outer)
        step = stepping(optimizer, variables, in_graph)
        expected, momentum = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)
        for i in range(12):
            step(told(i, NAMES))
            assert optimizer.local_steps == (i + 1) % every
            if (i + 1) % every:
                continue
            for name in NAMES:
                mean = np.mean(
                    [its[i] - (its[i - every] if i >= every else 0) for its in updates[name]],
                    axis=0,
                )
                momentum[name] = 0.9 * momentum[name] + mean
                expected[name] = expected[name] + (
                    mean if outer is None else 0.7 * (mean + 0.9 * momentum[name])
                )
                assert (
                    np.abs(variables[name].numpy() - expected[name]).max()
                    < 2e-5 * np.abs(expected[name]).max()
                ), (every, i, name)
            assert_alike(variables)


@case(2)
def adam_of_one_rank_is_keras():
    """With embeddings, whose gradients are of single rows, and made anew from its configuration.
    Where nothing is known of the signal yet, because the first gradient comes late, steps are as
    Keras's own with any number of ranks."""
    ends = []
    for optimizer in (keras.optimizers.AdamW(0.01), hvdc.AdamW(0.01, ranks=64)):
        early, late = tf.Variable([1.0, 1.0]), tf.Variable([1.0, 1.0])
        optimizer.build([early, late])
        for i in range(30):
            optimizer.apply_gradients(
                [(tf.ones(2), early)] + ([(tf.ones(2), late)] if i == 29 else [])
            )
        ends.append(late.numpy())
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-6)
    options = {
        "learning_rate": 0.01,
        "beta_1": 0.8,
        "beta_2": 0.95,
        "weight_decay": 0.02,
        "clipnorm": 1.0,
    }
    ours = keras.optimizers.deserialize(keras.optimizers.serialize(hvdc.AdamW(ranks=1, **options)))
    assert isinstance(ours, hvdc.AdamW) and ours.ranks == 1
    trained = []
    for optimizer in (keras.optimizers.AdamW(**options), ours):
        table, matrix = (
            tf.Variable(tf.reshape(tf.range(30.0), (10, 3)) / 30),
            tf.Variable(tf.ones((3, 2))),
        )
        for i in range(6):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(tf.gather(table, [i, 3, 3]) @ matrix - 1.0))
            optimizer.apply_gradients(zip(tape.gradient(loss, [table, matrix]), [table, matrix]))
        trained.append(np.concatenate([table.numpy().ravel(), matrix.numpy().ravel()]))
    np.testing.assert_allclose(trained[1], trained[0], rtol=1e-5)
    model = model_of(hvd.rank())
    losses = fitted(
        model,
        hvdc.UpdateOptimizer(hvdc.AdamW(0.01), "adacomp:min_numel=0", every=2),
        12,
        [hvdc.ShareUpdates()],
        epochs=4,
    )
    assert losses[-1] < losses[0]
    assert_replicas_identical(model)
    with tempfile.TemporaryDirectory() as folder:
        for end in (".h5", ".keras", ""):
            path = os.path.join(folder, f"model-{hvd.rank()}{end}")
            model.save(path)
            assert type(keras.models.load_model(path).optimizer) is hvdc.AdamW, end
    with raises(ValueError, "with this process set", "say ranks=1"):
        hvdc.UpdateOptimizer(hvdc.AdamW(0.01), process_set=hvd.ProcessSet([0]))
    # Of a type that TensorFlow chooses, while it traces.
    with raises(Exception, "Horovod has averaged these"):
        fitted(model_of(), hvd.DistributedOptimizer(hvdc.AdamW(0.01)), 1)
    with raises(ValueError, "has no amsgrad"):
        hvdc.AdamW(amsgrad=True)
    with raises(ValueError, "ranks must be a number of ranks"):
        hvdc.AdamW(ranks=0)


@case(2, 3)
def no_update_is_lost():
    """What has moved the variables, and what is not sent yet, is all that ranks' optimizers have
    asked for: over changes of the learning rate, an exchange without steps, a save and a load, and
    another compression."""
    for spec, every in (
        ("topk:ratio=0.02,min_numel=0", 1),
        ("topk:ratio=0.02,min_numel=0", 3),
        ("adacomp:min_numel=0", 3),
        ("dgc:ratio=0.02,min_numel=0", 1),
        ("efsignsgd:min_numel=0", 3),
    ):
        variables, local = zeros(), zeros()

        def start():
            optimizer = hvdc.UpdateOptimizer(keras.optimizers.SGD(1.0), spec, every=every)
            return optimizer, stepping(optimizer, variables)

        (optimizer, step), alone = start(), keras.optimizers.SGD(1.0)
        own = stepping(alone, local)
        for i in range(12):
            if i == 6:
                # On all ranks: nothing but what waits.
                optimizer.take_part()
                state = optimizer.compression.state_dict()
                optimizer, step = start()
                optimizer.compression.load_state_dict(state)
                alone.learning_rate.assign(0.1)
                optimizer.learning_rate.assign(0.1)
            if i == 9 and spec.startswith("topk"):
                optimizer.compression.switch("topk:ratio=0.1,min_numel=0")
            for each in (step, own):
                each(told(i, NAMES))
        mine, asked = assert_alike(variables), mean_of(values(local), "asked")
        worst = np.abs(mine + not_sent(optimizer.compression) - asked).max() / np.abs(asked).max()
        assert worst < 1e-5, (spec, every, worst)
        stats = optimizer.compression.stats()
        assert (
            stats["steps"] == 6 // every and 0 < stats["bytes_sent"] < stats["dense_bytes"] / 3
        ), (spec, stats)


@case(2, 3)
def moments_are_averaged():
    """Of optimizers old and new, and within rounds; the shared variables and ranks' own numbers of
    steps stay."""
    for make, every, kinds in (
        (keras.optimizers.Adam, 1, 2),
        (hvdc.AdamW, 3, 3),
        (keras.optimizers.legacy.Adam, 1, 2),
    ):
        optimizer, variables = (
            hvdc.UpdateOptimizer(make(0.01), "topk:ratio=0.1,min_numel=0", every=every),
            zeros(),
        )
        step = stepping(optimizer, variables)
        for index in range(4):
            step(told(index))
        before, mine = [kept.numpy() for kept in optimizer.variables()], values(variables)
        optimizer.average_state()
        moved = 0
        for i, (was, kept) in enumerate(zip(before, optimizer.variables())):
            if was.shape and "shared" not in kept.name:
                np.testing.assert_allclose(
                    kept.numpy(), mean_of(was, f"moments.{i}"), rtol=1e-6, atol=1e-12
                )
                moved += not np.array_equal(kept.numpy(), was)
            else:
                np.testing.assert_array_equal(kept.numpy(), was)
        assert moved == kinds * len(NAMES)
        np.testing.assert_array_equal(values(variables), mine)
    optimizer, variables = hvdc.UpdateOptimizer(keras.optimizers.Adam(0.01)), zeros()
    if hvd.rank():
        optimizer.build(list(variables.values()))
    with raises(MismatchError, "call average_state() later"):
        optimizer.average_state()


class Stateless(keras.optimizers.SGD):
    """Keras' own multiplies what is not finite by its momentum of 0, and keeps that."""

    def update_step(self, gradient, variable):
        variable.assign_sub(tf.cast(self.learning_rate, variable.dtype) * gradient)


@case(2)
def an_update_that_is_not_finite_moves_nothing():
    for every, outer in ((1, None), (2, hvdc.Nesterov())):
        variables = zeros()
        optimizer = hvdc.UpdateOptimizer(
            Stateless(1.0), "topk:ratio=0.05,min_numel=0", every=every, outer=outer
        )
        step = stepping(optimizer, variables)
        for i in range(8):
            before, gradients = values(variables), told(i, NAMES)
            if i == 3 and hvd.rank() == 1:
                poisoned = gradients["matrix"].numpy()
                poisoned[0, 0] = np.nan
                gradients["matrix"] = tf.constant(poisoned)
            step(gradients)
            if i == 3:
                if every == 1:
                    assert (values(variables) == before).all()
                assert_alike(variables)
        assert_alike(variables)
        optimizer.compression._session.exchange.end_step()
        assert optimizer.compression.stats()["steps_undone"] == 1


@case(2, 3)
def every_family_of_algorithms_keeps_replicas_alike_on_updates():
    """Traced and eager by turns. All algorithms do so in keras3_cases."""
    specs = [
        "none",
        "fp16",
        "bf16",
        "topk",
        "adacomp",
        "maxnorm",
        "powersgd",
        "globalrandk",
        "qsgd",
    ]
    for i, spec in enumerate(specs):
        variables = zeros()
        optimizer = hvdc.UpdateOptimizer(keras.optimizers.Adam(0.01), spec)
        step = stepping(optimizer, variables, in_graph=i % 2 == 0)
        for number in range(3):
            step(told(number, NAMES))
        assert np.abs(assert_alike(variables)).max() > 0, spec


@case(2)
def rounds_go_on_after_a_checkpoint():
    """Keras keeps what ranks share and the outer momentum, StateCheckpoint what was not sent: the
    third epoch comes out as without a break, and at the end of each epoch all ranks have the same
    variables."""

    def start(callbacks, epochs, path, restore=None, before=lambda optimizer, model: None):
        optimizer = hvdc.UpdateOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.5),
            "topk:ratio=0.05,min_numel=0",
            every=3,
            outer=hvdc.Nesterov(),
        )
        model = model_of()
        before(optimizer, model)
        state = hvdc.StateCheckpoint(optimizer.compression, path, restore=restore)
        losses = fitted(
            model, optimizer, 10, [hvdc.ShareUpdates(), state, *callbacks], epochs=epochs
        )
        assert_replicas_identical(model)
        return model, optimizer, losses

    with tempfile.TemporaryDirectory() as folder:
        path, saved, alike_at = os.path.join(folder, "state-{epoch}"), [], []

        class Keep(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                assert_replicas_identical(self.model)
                alike_at.append(epoch)
                saved.append(
                    [self.model.get_weights(), [v.numpy() for v in self.model.optimizer.variables]]
                )

        model, optimizer, losses = start([Keep()], 3, path)
        assert alike_at == [0, 1, 2] and losses[2] < losses[0]
        # Of ten steps three exchanges, and one at the end of the epoch.
        assert optimizer.compression.stats()["steps"] == 3 * 4

        def restore(optimizer, model):
            model.set_weights(saved[1][0])
            optimizer.build(model.trainable_variables)
            for variable, value in zip(optimizer.variables, saved[1][1]):
                variable.assign(value)

        again, *_ = start([], 1, os.path.join(folder, "other"), path.format(epoch=2), restore)
        assert (flat(again) == flat(model)).all()


@case(2)
def a_state_that_rank_0_alone_has_loaded():
    """In the middle of a round, as scripts for Horovod resume, with its broadcast of the
    optimizer's variables and without: all ranks go on in the same round."""

    def start():
        variables = zeros()
        sgd = keras.optimizers.SGD(0.05, momentum=0.5)
        optimizer = hvdc.UpdateOptimizer(sgd, "none", every=3, outer=hvdc.Nesterov())
        optimizer.build(list(variables.values()))
        return variables, optimizer, stepping(optimizer, variables)

    variables, optimizer, step = start()
    for i in range(7):
        step(told(i, NAMES))
    saved = [v.numpy() for v in (*variables.values(), *optimizer.variables)]
    for broadcast in (False, True):
        variables, optimizer, step = start()
        for variable, value in zip((*variables.values(), *optimizer.variables), saved):
            if hvd.rank() == 0:
                variable.assign(value)
        if broadcast:
            hvdt.broadcast_variables(optimizer.variables, root_rank=0)
        for i in range(5):
            step(told(i, NAMES))
        assert optimizer.local_steps == 0 and int(optimizer.iterations) == 12
        assert_alike(variables)
        # Which would differ with the outer momentum.
        for i in range(3):
            step(told(i, NAMES))
        assert_alike(variables)


@case(2)
def horovods_callback_that_broadcasts_is_no_deadlock():
    for every in (1, 3):
        model = model_of(hvd.rank())
        optimizer = hvdc.UpdateOptimizer(keras.optimizers.Adam(0.01), "topk:ratio=0.1", every=every)
        fitted(model, optimizer, 6, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        assert_replicas_identical(model)


class Averaging(keras.optimizers.SGD):
    """SGD with an average of the variables, which it swaps with them."""

    def build(self, var_list):
        super().build(var_list)
        if not hasattr(self, "averages"):
            kept = self.add_variable_from_reference
            self.averages = [kept(v, "average", initial_value=v) for v in var_list]

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        pairs = list(grads_and_vars)
        result = super().apply_gradients(pairs, *args, **kwargs)
        for average, (_, variable) in zip(self.averages, pairs):
            average.assign_add(0.5 * (variable - average))
        return result

    def swap(self, variables):
        for average, variable in zip(self.averages, variables):
            value = variable.numpy()
            variable.assign(average)
            average.assign(value)

    def rate(self):
        return float(self.learning_rate)


@case(2)
def an_optimizer_that_swaps_variables_shows_their_mean():
    """It is linear in gradients, so what is shown is that of one optimizer with mean gradients."""
    for in_graph in (True, False):
        variables, optimizer = zeros(), hvdc.UpdateOptimizer(Averaging(0.1), "none")
        expected, average = dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)
        optimizer.build(list(variables.values()))
        step = stepping(optimizer, variables, in_graph)
        for i in range(4):
            step(told(i, NAMES))
            for name in NAMES:
                mean = mean_of(told(i, NAMES)[name], f"mean of {name}")
                expected[name] = expected[name] - 0.1 * mean
                average[name] = 0.5 * (average[name] + expected[name])
        if hvd.rank() == 0:
            # Which changes nothing, and waits for nobody.
            assert optimizer.rate() > 0.09
        for shown in (average, expected):
            optimizer.swap(list(variables.values()))
            assert_alike(variables)
            for name in NAMES:
                assert np.abs(variables[name].numpy() - shown[name]).max() < 1e-5, name


@case(2)
def a_model_in_half_precision_with_a_layer_that_has_no_gradients():
    """Its loss scale is inside, of which nothing is told; rounds of two steps; and all variables,
    those without gradients too, are alike on all ranks."""
    notices._warned.clear()
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = model_of(hvd.rank())
        unused = keras.layers.Dense(3)
        unused.build((None, 3))
        model.unused = unused  # Keras warns of it
        scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.Adam(0.01))
        optimizer = hvdc.UpdateOptimizer(scaled, "topk:ratio=0.1,min_numel=0", every=2)
        with warnings.catch_warnings(record=True) as told_of:
            warnings.simplefilter("always")
            losses = fitted(model, optimizer, 12, [hvdc.ShareUpdates()], epochs=4)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert not any("LossScaleOptimizer" in str(each.message) for each in told_of)
    assert any("unused" in v.name or v is unused.kernel for v in model.trainable_variables)
    assert_replicas_identical(model)
    assert losses[-1] < losses[0] and optimizer.compression.stats()["steps"] == 4 * 6


@case(2)
def a_loss_scale_that_finds_infinities_on_one_rank():
    """That rank takes part with nothing, and the other's step counts. Around an UpdateOptimizer a
    scaler would have ranks wait: an error."""
    variables = zeros()
    inner = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), dynamic=True, initial_scale=4.0, dynamic_growth_steps=100
    )
    optimizer = hvdc.UpdateOptimizer(inner, "none")

    @tf.function
    def step(gradients):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(
                tf.add_n([tf.reduce_sum(variables[name] * gradients[name]) for name in NAMES])
            )
        pairs = zip(
            optimizer.get_unscaled_gradients(
                tape.gradient(loss, [variables[name] for name in NAMES])
            ),
            variables.values(),
        )
        optimizer.apply_gradients(pairs)

    expected = 0.0
    for i in range(3):
        gradients = told(i, NAMES)
        if i == 1 and hvd.rank() == 1:
            gradients["bias"] = gradients["bias"] * np.inf
        step(gradients)
        for rank in [0] if i == 1 else [0, 1]:
            expected -= (
                np.concatenate([alike.gradients(rank, i)[name].ravel() for name in NAMES]) / 2
            )
    assert np.abs(assert_alike(variables) - expected).max() < 1e-5
    assert hvdt.allgather_object(float(optimizer.loss_scale)) == [4.0, 2.0]
    outside = keras.mixed_precision.LossScaleOptimizer(
        hvdc.UpdateOptimizer(keras.optimizers.SGD(1.0), "none")
    )
    with raises(ValueError, "UpdateOptimizer(keras.mixed_precision.LossScaleOptimizer"):
        stepping(outside, zeros())(told(0, NAMES))


@case(3)
def updates_within_a_process_set():
    pair = hvd.add_process_set([1, 2])
    variables = {
        name: tf.Variable(tf.fill(alike.SHAPES[name], float(hvd.rank())), name=name)
        for name in NAMES
    }
    step = stepping(
        hvdc.UpdateOptimizer(keras.optimizers.SGD(1.0), "none", process_set=pair), variables
    )
    step(told(0, NAMES))
    ranks, first = ([1, 2], 1) if hvd.rank() else ([0], 0)
    expected = first - np.mean(
        [
            np.concatenate([alike.gradients(rank, 0)[name].ravel() for name in NAMES])
            for rank in ranks
        ],
        axis=0,
    )
    assert np.abs(values(variables) - expected).max() < 1e-5
    hvd.remove_process_set(pair)


@case(2)
def what_an_update_optimizer_refuses():
    sgd = keras.optimizers.SGD
    for spec, words in (
        ("dgc:momentum=0.5", "momentum is inside its updates"),
        ("topk:clip_norm=1", "clip_norm"),
        ("variance:moments=microbatch", "minibatch only"),
        ("topk:exchange=split", "exchange=split needs PyTorch"),
        ("nonsense", "nonsense"),
    ):
        with raises(ValueError, words):
            hvdc.UpdateOptimizer(sgd(0.1), spec)
    with raises(ValueError, "1 or more"):
        hvdc.UpdateOptimizer(sgd(0.1), every=0)
    with raises(TypeError, "Nesterov(lr, momentum)"):
        hvdc.UpdateOptimizer(sgd(0.1), outer=0.7)
    with raises(TypeError, "a Keras optimizer"):
        hvdc.UpdateOptimizer("adam")
    with raises(ValueError, "exchanges already"):
        hvdc.UpdateOptimizer(hvd.DistributedOptimizer(sgd(0.1)))
    with raises(ValueError, "exchanges already"):
        hvdc.UpdateOptimizer(hvdc.UpdateOptimizer(sgd(0.1)))
    with raises(ValueError, "a copy of an UpdateOptimizer"):
        stepping(hvd.DistributedOptimizer(hvdc.UpdateOptimizer(sgd(0.1))), zeros())(told(0, NAMES))
    with raises(ValueError, "use_ema averages this rank's own variables"):
        hvdc.UpdateOptimizer(keras.optimizers.Adam(use_ema=True))
    with raises(ValueError, "keeps no variables"):
        hvdc.UpdateOptimizer(keras.optimizers.legacy.SGD(0.1), every=2)
    with raises(RuntimeError, "after the first step"):
        hvdc.UpdateOptimizer(sgd(0.1)).take_part()
    with raises(MismatchError, "differs from rank 0 in every"):
        stepping(hvdc.UpdateOptimizer(sgd(0.1), every=2 + hvd.rank()), zeros(), in_graph=False)(
            told(0, NAMES)
        )
