"""One rank of an elastic job in TensorFlow, as a user would write it: it dies, asks for other
hosts, and goes on. test_elastic_tensorflow.py starts it and replays what it was about: a Keras
model under `fit`, or a loop of one's own with a tape."""

import os
import pathlib
import signal
import sys

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from elastic_jobs import on_the_host_that_dies, tell, wait_for_hosts

SPECS = {
    "fit": "dgc:ratio=0.01,min_numel=100",
    "tape": "adacomp:min_numel=100",
    "fit_switching": "topk:ratio=0.02,min_numel=100",
}
SWITCHES = {
    6: "dgc:ratio=0.02,min_numel=100",
    13: "none",
    18: "adacomp:min_numel=100",
    22: "none",
    28: "dgc:ratio=0.02,min_numel=100",
    36: "topk",
    # By step: one after the last commit before a rank dies, and one right before others join.
}
STEPS, EPOCH, COMMITTED_EVERY, KILLED_AT = 40, 8, 4, 14
RANKS = {22: (1, 0, 2), 34: (1, 0, 1)}  # by step, on each host
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def model_of():
    tf.keras.utils.set_random_seed(1)
    return tf.keras.Sequential(
        [
            tf.keras.layers.Dense(40, "tanh", input_shape=(24,), name="first"),
            tf.keras.layers.Dense(6, name="last"),
        ]
    )


def batch_of(step, rank):
    """The batch of one rank, which is known to all."""
    generator = np.random.default_rng([step, rank])
    return generator.normal(size=(8, 24)).astype(np.float32), generator.integers(0, 6, 8)


def batches(step):
    while True:
        yield batch_of(step, hvd.rank())
        step += 1


def main(folder, kind):
    import horovod_compress.tensorflow as hvdc

    hvd.init()
    model, optimizer = model_of(), tf.keras.optimizers.SGD(0.05, momentum=0.9)
    compression = hvdc.Compression.from_spec(SPECS[kind], optimizer if kind == "tape" else None)
    parts = hvdc, model, optimizer, compression, folder
    state = (
        tape_state(*parts)
        if kind == "tape"
        else fit_state(*parts, SWITCHES if kind == "fit_switching" else {})
    )
    np.savez(
        folder / f"end.{hvd.rank()}.npz", *model.get_weights(), steps=state.step, epoch=state.epoch
    )


def between_steps(state, folder):
    """What happens after a step and before the next one."""
    if state.step in RANKS:
        wait_for_hosts(state, folder, hvd, RANKS[state.step])
    if state.step == KILLED_AT and on_the_host_that_dies(folder):
        # The other rank is in its next step meanwhile.
        os.kill(os.getpid(), signal.SIGKILL)


# -- with Keras


class Steps(tf.keras.callbacks.Callback):
    """Counts steps, because the callbacks of Horovod count from where `fit` was called last."""

    def __init__(self, state, folder, switches):
        super().__init__()
        self.state, self.folder, self.switches = state, folder, switches

    def on_train_batch_end(self, batch, logs=None):
        self.state.step += 1
        if self.state.step in self.switches:
            self.state.compression.switch(self.switches[self.state.step])
        between_steps(self.state, self.folder)
        self.model.stop_training = self.state.step == STEPS


def fit_state(hvdc, model, optimizer, compression, folder, switches):
    model.compile(hvd.DistributedOptimizer(optimizer, compression=compression), LOSS)
    state = hvdc.elastic.TensorFlowKerasState(
        model, compression=compression, step=0, epoch=0, batch=0
    )
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        Steps(state, folder, switches),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=COMMITTED_EVERY),
    ]

    @hvdc.elastic.run
    def train(state):
        tell(folder, hvd, state.step)
        # One epoch at a time, of which a part may be over.
        while state.step < STEPS:
            model.fit(
                batches(state.step),
                steps_per_epoch=EPOCH - state.step % EPOCH,
                callbacks=callbacks,
                verbose=0,
            )

    train(state)
    return state


# -- with a tape


def tape_state(hvdc, model, optimizer, compression, folder):
    optimizer.build(model.trainable_variables)
    state = hvdc.elastic.TensorFlowState(
        [*model.variables, *optimizer.variables], compression=compression, step=0, epoch=0
    )

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
        tape = hvd_tensorflow.DistributedGradientTape(tape, compression=compression)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        )

    @hvdc.elastic.run
    def train(state):
        tell(folder, hvd, state.step)
        for x, y in batches(state.step):
            if state.step == STEPS:
                return
            train_step(x, y)
            state.step += 1
            if state.step % COMMITTED_EVERY == 0:
                state.commit()
            between_steps(state, folder)

    train(state)
    return state


if __name__ == "__main__":
    import horovod.tensorflow as hvd_tensorflow

    main(pathlib.Path(sys.argv[1]), sys.argv[2])
