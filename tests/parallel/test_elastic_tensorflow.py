"""Elastic jobs in TensorFlow: parameters are those of the same history in one process, step by step
and without Horovod."""

import numpy as np
import pytest

pytest.importorskip("horovod.tensorflow", reason="real ranks need Horovod with TensorFlow")

import tensorflow as tf
from elastic_jobs import bound, history, replay, run, switch
from elastic_tensorflow_job import (
    COMMITTED_EVERY,
    EPOCH,
    KILLED_AT,
    LOSS,
    RANKS,
    SPECS,
    STEPS,
    SWITCHES,
    batch_of,
    model_of,
)

from horovod_compress.engine.lockstep import run_step

pytestmark = pytest.mark.extended


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[pytest.mark.release] if kind == "fit" else []) for kind in SPECS
    ],
)
def job(request, tmp_path_factory):
    """(what trains, the folder of a job that has ended)"""
    folder = tmp_path_factory.mktemp(request.param)
    run(folder, "elastic_tensorflow_job.py", request.param)
    return request.param, folder


def test_ranks_die_join_and_leave(job):
    """What the others are about. The dead rank's last steps were not committed."""
    began = [(each["step"], each["size"]) for each in history(job[1])]
    assert began == [
        (0, 2),
        (KILLED_AT // COMMITTED_EVERY * COMMITTED_EVERY, 1),
        *((step, sum(ranks)) for step, ranks in RANKS.items()),
    ]


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
    for i, values in enumerate(replayed(kind, history(folder)).get_weights()):
        error = np.abs(end[f"arr_{i}"] - values).max() / np.abs(values).max()
        assert error <= 1e-6, f"variable {i} differs by {error:.1e}"


def replayed(kind, history):
    """The model after all steps. What SGD's momentum has gathered before a switch moves variables
    after it as well."""
    model, switches = model_of(), SWITCHES if kind == "fit_switching" else {}
    variables = {variable.name.split(":")[0]: variable for variable in model.trainable_variables}
    shapes, momenta = (
        {name: variable.shape for name, variable in variables.items()},
        dict.fromkeys(variables, 0.0),
    )

    def train_step(exchanges, step):
        grads = []
        for rank in range(len(exchanges)):
            x, y = batch_of(step, rank)
            with tf.GradientTape() as tape:
                loss = LOSS(y, model(x))
            grads.append(
                {
                    name: grad.numpy().flatten()
                    for name, grad in tape.gradient(loss, variables).items()
                }
            )
        result = run_step(exchanges, grads)[0]
        # Whether momentum is the optimizer's.
        own = not exchanges[0].tensors.compressor.traits.corrects_momentum
        for name, variable in variables.items():
            moved = -0.05 * result[name].reshape(variable.shape)
            momenta[name] = np.float32(0.9) * momenta[name] + (moved if own else 0)
            variable.assign_add(momenta[name] if own else momenta[name] + moved)
        if step + 1 in switches:
            switch(exchanges, switches[step + 1], shapes)

    replay(history, STEPS, bound(SPECS[kind]), shapes, train_step)
    return model
