"""hosts=true in graphs on real ranks: what the same ranks give in one process, and a user's
training."""

import alike
import horovod.tensorflow.keras as hvd
import numpy as np
from checks import registry
from tensorflow import keras

import horovod_compress.tensorflow as hvdc
from horovod_compress import simulate

from .training import assert_replicas_identical, exchanged, fit, model_of, told

CASES, case = registry()


@case(2, 3, 4)
def hosts_give_what_they_give_in_one_process():
    """In graphs and, on two ranks, eagerly. A small tensor, and one with fewer rows than a host has
    ranks, stay on one level."""
    steps = [
        [alike.gradients(rank, step) for rank in range(hvd.size())] for step in range(alike.STEPS)
    ]
    for spec in (
        "topk:ratio=0.05",
        "dgc:ratio=0.05,momentum=0.9",
        "adacomp",
        "variance",
        "efsignsgd",
        "natural",
    ):
        spec = f"{spec}{',' if ':' in spec else ':'}min_numel=100,hosts=true"
        expected = simulate(spec, steps, local_size=hvd.local_size())
        for in_graph in (True, False) if hvd.size() == 2 else (True,):
            compression = hvdc.Compression.from_spec(spec)
            step = exchanged(compression, in_graph=in_graph)
            for i in range(alike.STEPS):
                for name, gradient in step(told(i)).items():
                    np.testing.assert_allclose(
                        gradient.numpy(),
                        expected.mean[i][name],
                        rtol=1e-5,
                        atol=1e-5,
                        err_msg=f"{spec} {i} {name}",
                    )


@case(2, 3, 4)
def hosts_train_with_identical_replicas():
    """With fit, SGD's momentum taken over, resumed, and switched to one level and back."""
    for spec in ("dgc:ratio=0.01,hosts=true", "adacomp:hosts=true,min_numel=64"):
        model, optimizer = model_of(), keras.optimizers.SGD(0.05, momentum=0.9)
        compression = hvdc.Compression.from_spec(spec, optimizer)
        wrapped = hvd.DistributedOptimizer(optimizer, compression=compression)
        losses = fit(model, wrapped, 40, epochs=2)
        assert losses[1] < losses[0], spec
        saved = compression.state_dict()
        compression.load_state_dict(saved)
        compression.load_state_dict(compression.state_dict(portable=True))
        for other in (spec.replace("hosts=true", "hosts=false"), spec):
            compression.switch(other)
            fit(model, wrapped, 3)
            assert_replicas_identical(model)
