"""Records of a training on real ranks."""

import os
import tempfile

import horovod.torch as hvd
import torch
from checks import raises, registry

import horovod_compress.torch as hvdc
from horovod_compress.engine import recording

from .training import batches, flat, model_of, sgd, train, wrap

CASES, case = registry()


@case(2)
def records_of_a_training_add_up_to_its_totals():
    """Over a switch and a restart too; and they change nothing."""
    paths = [None]
    if hvd.rank() == 0:
        paths = [tempfile.mkdtemp()]
    folder = hvd.broadcast_object(paths, name="folder")[0]
    found, parameters = [], []
    for recorded in (True, False):
        state = None
        for _ in range(2):
            model = model_of()
            optimizer = sgd(model)
            compression = hvdc.Compression.dgc(
                optimizer, named_parameters=model.named_parameters(), ratio=0.01
            )
            if recorded:
                compression.record(os.path.join(folder, "run.jsonl"), every=3, by_tensor=True)
            wrapped = wrap(model, optimizer, compression)
            if state is not None:
                model.load_state_dict(state[0])
                wrapped.load_state_dict(state[1])
                compression.load_state_dict(state[2])
            train(model, wrapped, batches(6))
            compression.switch("dgc:ratio=0.02")
            train(model, wrapped, batches(4, seed=1))
            compression.switch("dgc:ratio=0.01")
            state = model.state_dict(), wrapped.state_dict(), compression.state_dict()
            found.append(compression.stats())
        parameters.append(flat(model))
    assert torch.equal(*parameters)
    hvd.barrier()
    records = recording.read(os.path.join(folder, "run.jsonl"))
    assert [(r["step"], r["rank"], r["size"], r["spec"]["ratio"]) for r in records] == [
        (0, 0, 2, 0.01),
        (3, 0, 2, 0.01),
        (6, 0, 2, 0.02),
        (9, 0, 2, 0.02),
        (12, 0, 2, 0.01),
        (15, 0, 2, 0.01),
        (18, 0, 2, 0.02),
    ]
    if hvd.rank() == 0:
        assert sum(r["dense_bytes"] for r in records[:4]) == found[0]["dense_bytes"]
        # The first one has what ranks have compared, and in all three steps are counted.
        counts = 3 * 4
        of_tensors = sum(t["bytes_sent"] for t in records[1]["tensors"].values())
        assert records[1]["bytes_sent"] == of_tensors + counts
    assert set(records[0]["tensors"]) == {
        name for name, p in model.named_parameters() if p.requires_grad
    }
    for record in records:
        assert (
            record["gradient_norm"] > 0
            and record["residual_norm"] > 0
            and record["encode_seconds"] > 0
            and record["exchange_seconds"] > 0
        )


@case(2)
def records_go_where_they_are_told():
    model = model_of()
    optimizer, records, scalars = sgd(model), [], {}
    compression = hvdc.Compression.topk(
        optimizer, named_parameters=model.named_parameters(), ratio=0.01
    )
    wrapped = wrap(model, optimizer, compression)
    compression.record(records.append, every=2)
    train(model, wrapped, batches(5))

    class Writer:
        def add_scalar(self, tag, value, step):
            scalars.setdefault(tag, []).append(step)

    compression.record(Writer(), every=2)
    train(model, wrapped, batches(5))
    compression.stats()
    assert [r["rank"] for r in records] == [hvd.rank()] * 3 and [r["step"] for r in records] == [
        0,
        2,
        4,
    ]
    assert scalars["compression/residual_norm"] == scalars["compression/bytes_sent"] == [6, 8]
    with raises(TypeError, "records go to a path"):
        compression.record(5)
