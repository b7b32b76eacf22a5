"""Elastic jobs in TensorFlow: parameters are those of the same history in one process, step by step and without Horovod."""
import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow", reason="real ranks need Horovod with TensorFlow")

import tensorflow as tf
from elastic_jobs import history, replay, run
from elastic_tensorflow_job import COMMITTED_EVERY, EPOCH, KILLED_AT, LOSS, RANKS, SPECS, STEPS, batch_of, model_of

from horovod_compress.compressors import get_compressor
from horovod_compress.lockstep import run_step


@pytest.fixture(scope="module", params=SPECS)
def job(request, tmp_path_factory):
    """(what trains, the folder of a job that has ended)"""
    folder = tmp_path_factory.mktemp(request.param)
    run(folder, "elastic_tensorflow_job.py", request.param)
    return request.param, folder


def test_ranks_die_join_and_leave(job):
    """What the others are about. The dead rank's last steps were not committed."""
    began = [(each["step"], each["size"]) for each in history(job[1])]
    assert began == [(0, 2), (KILLED_AT // COMMITTED_EVERY * COMMITTED_EVERY, 1), *((step, sum(ranks)) for step, ranks in RANKS.items())]


def test_replicas_are_identical(job):
    kind, folder = job
    ends = [np.load(folder / f"end.{rank}.npz") for rank in range(2)]
    for end in ends:
        assert int(end["steps"]) == STEPS
        assert kind == "tape" or int(end["epoch"]) == STEPS // EPOCH
        for name in end.files:
            np.testing.assert_array_equal(end[name], ends[0][name])


def test_parameters_are_those_of_the_same_history_in_one_process(job):
    kind, folder = job
    end = np.load(folder / "end.0.npz")
    for i, values in enumerate(replayed(SPECS[kind], history(folder)).get_weights()):
        error = np.abs(end[f"arr_{i}"] - values).max() / np.abs(values).max()
        assert error <= 1e-6, f"variable {i} differs by {error:.1e}"


def replayed(spec, history):
    """The model after all steps."""
    model, compressor = model_of(), get_compressor(spec)
    optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.0 if compressor.corrects_momentum else 0.9)
    compressor = compressor.bound(0.9, False) if compressor.corrects_momentum else compressor
    variables = {variable.name.split(":")[0]: variable for variable in model.trainable_variables}

    def train_step(exchanges, step):
        grads = []
        for rank in range(len(exchanges)):
            x, y = batch_of(step, rank)
            with tf.GradientTape() as tape:
                loss = LOSS(y, model(x))
            grads.append({name: grad.numpy().flatten() for name, grad in tape.gradient(loss, variables).items()})
        result = run_step(exchanges, grads)[0]
        optimizer.apply_gradients((result[name].reshape(variable.shape), variable) for name, variable in variables.items())

    replay(history, STEPS, compressor, {name: variable.shape for name, variable in variables.items()}, train_step)
    return model
