"""Questions that users put to a compression at any time, on one rank alone: none hangs, or changes
a step."""

import functools

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from checks import registry
from public_reads import READS
from tensorflow import keras

import horovod_compress.tensorflow as hvdc

from .training import told

CASES, case = registry()

SPEC = "dgc:ratio=0.1,min_numel=0"
MOMENTS = ("before the first step", "between gradient() and apply_gradients()", "between steps")
# What is refused while a graph exchanges, which may be over or not.
AMID = {"record", "state_dict"}
ALL = {
    **{name: lambda compression, _, read=read: read(compression) for name, read in READS.items()},
    "is_first": lambda compression, _: compression.is_first,
    "compression_of": lambda _, optimizer: hvdc.compression_of(optimizer),
}


class Asked:
    """Asks all questions at one moment, on one rank. Keeps those that were refused."""

    def __init__(self, moment, rank):
        self.moment, self.rank, self.refused = moment, rank, set()

    def at(self, moment, compression, optimizer):
        for question in ALL if (moment, hvd.rank()) == (self.moment, self.rank) else ():
            try:
                ALL[question](compression, optimizer)
            except (RuntimeError, TypeError):
                self.refused.add(question)


def of_tape(variable, at, process_set=hvd.global_process_set, in_graph=False, **options):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    compression = hvdc.Compression.from_spec(SPEC, **options)

    def ask():
        at(MOMENTS[1], compression, optimizer)
        return np.int32(0)

    def step(gradient):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * gradient)
        tape = hvd.DistributedGradientTape(tape, compression=compression, process_set=process_set)
        gradients = tape.gradient(loss, [variable])
        tf.numpy_function(ask, [], tf.int32)
        optimizer.apply_gradients(zip(gradients, [variable]))

    return compression, optimizer, tf.function(step) if in_graph else step


def of_horovods(variable, at):
    compression = hvdc.Compression.from_spec(SPEC)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), compression=compression
    )

    def step(gradient):
        optimizer.minimize(lambda: tf.reduce_sum(variable * gradient), [variable])

    return compression, optimizer, step


def of_updates(variable, at):
    optimizer = hvdc.UpdateOptimizer(keras.optimizers.Adam(0.01), SPEC, every=2)

    def step(gradient):
        optimizer.minimize(lambda: tf.reduce_sum(variable * gradient), [variable])

    return optimizer.compression, optimizer, step


def trained(make, asked, steps=3):
    """(parameters, state) after some steps, in eager code, of an optimizer that is asked."""
    variable = tf.Variable(tf.ones((40, 50)), name="v")
    compression, optimizer, step = make(variable, asked.at)
    asked.at(MOMENTS[0], compression, optimizer)
    for i in range(steps):
        step(told(i, ["matrix"])["matrix"])
        asked.at(MOMENTS[2], compression, optimizer)
    return variable.numpy(), compression.state_dict()["tensors"]


@case(2)
def no_question_on_one_rank_hangs_or_changes_a_step():
    for make, moments, amid in (
        (of_tape, MOMENTS, set()),
        (functools.partial(of_tape, in_graph=True, discardable=True), MOMENTS[1:2], AMID),
        (of_horovods, MOMENTS[::2], set()),
        (of_updates, MOMENTS[::2], set()),
    ):
        unasked = trained(make, Asked("never", 0))
        for i, moment in enumerate(moments):
            asked = Asked(moment, i % 2)
            np.testing.assert_equal(trained(make, asked), unasked, moment)
            # There is no option `at`.
            expected = {"switch_at"} if hvd.rank() == asked.rank else set()
            assert asked.refused - amid == expected, (moment, asked.refused)


@case(2)
def a_question_does_not_choose_the_process_set():
    """Horovod's tape does, which comes later."""
    alone = hvd.add_process_set([1])
    if alone.included():
        make = functools.partial(of_tape, process_set=alone)
        np.testing.assert_equal(trained(make, Asked(MOMENTS[0], 1)), trained(make, Asked("", 1)))
    hvd.remove_process_set(alone)
