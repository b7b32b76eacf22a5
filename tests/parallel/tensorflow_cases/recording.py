"""Records of model.fit, and of loops of one's own, on real ranks."""

import alike
import horovod.tensorflow.keras as hvd
import numpy as np
import pytest
from checks import registry
from tensorflow import keras

import horovod_compress.tensorflow as hvdc

from .training import exchanged, fit, flat, model_of, told

CASES, case = registry()


@case(2)
def records_of_fit_add_up_to_its_totals():
    found = []
    for recorded in (True, False):
        model, optimizer, records = model_of(), keras.optimizers.SGD(0.05, momentum=0.9), []
        compression = hvdc.Compression.dgc(optimizer, ratio=0.05)
        callbacks = (
            [hvdc.RecordSteps(compression, records.append, every=3, by_tensor=True)]
            if recorded
            else []
        )
        fit(
            model,
            hvd.DistributedOptimizer(optimizer, compression=compression),
            5,
            callbacks,
            epochs=2,
        )
        found.append((records, compression.stats(), flat(model)))
    (records, stats, parameters), (_, plain, same) = found
    assert (parameters == same).all()
    assert [(r["step"], r["steps"], r["rank"]) for r in records] == [
        (0, 1, hvd.rank()),
        (3, 3, hvd.rank()),
        (6, 3, hvd.rank()),
        (9, 3, hvd.rank()),
    ]
    for key in ("bytes_sent", "bytes_received", "dense_bytes", "elements_sent"):
        assert sum(r[key] for r in records) == stats[key] == plain[key]
    assert records[-1]["residual_norm"] == pytest.approx(stats["residual_norm"])
    assert all(
        r["gradient_norm"] > 0 and r["encode_seconds"] > 0 and r["decode_seconds"] > 0
        for r in records
    )
    assert len(records[0]["tensors"]) == len(model.trainable_variables)


@case(2)
def records_of_a_loop():
    compression, records = hvdc.Compression.topk(), []
    step, recorder = exchanged(compression), compression.record(records.append, 2, by_tensor=True)
    for i in range(5):
        step(told(i))
        recorder.step_ended()
    assert [r["step"] for r in records] == [0, 2, 4]
    # This rank's own; of what Horovod reduces directly it is the mean's.
    for name in ("matrix", "wide"):
        norm = np.linalg.norm(alike.gradients(hvd.rank(), 4)[name].astype("float64"))
        assert records[2]["tensors"][name]["gradient_norm"] == pytest.approx(norm)
