"""Training on the kernels of a device, which test_devices.py asks for on some ranks or all; see
KERNELS_ON_RANK."""

import os

import horovod.torch as hvd
import torch
from checks import registry

import horovod_compress.torch as hvdc
from horovod_compress import kernels

from .training import assert_replicas_identical, batches, flat, model_of, sgd, train, wrap

CASES, case = registry()
SPECS = (
    "dgc:ratio=0.01",
    "dgc:ratio=0.05,warmup_steps=4,clip_norm=0.1,masking=false,values=fp16",
    "topk:chunk=64,k=4,values=2bit",
    "maxnorm:bits=4",
    "maxnorm:bits=2,ratio=0.1,dense=fp16",
    "dgc:momentum=0.9,dense=int8",
    "multiscale:bits=2+6",
    "adacomp",
    "variance:alpha=1.0",
)


@case()
def what_training_makes_is_written():
    """Asked for by name. Writes, for each rank, parameters and states after six steps, with a
    resume after three."""

    def start(spec):
        model = model_of()
        optimizer = sgd(model, nesterov=spec == SPECS[0], weight_decay=0.01)
        compression = hvdc.Compression.from_spec(
            spec, optimizer, named_parameters=model.named_parameters()
        )
        return model, compression, wrap(model, optimizer, compression)

    made = {}
    for spec in SPECS:
        before = start(spec)
        train(*before[::2], batches(3))
        model, compression, optimizer = after = start(spec)
        for each, its in zip(after, before):
            each.load_state_dict(its.state_dict())
        train(model, optimizer, batches(3, seed=1))
        assert_replicas_identical(model)
        arrays = compression._session.exchange.arrays()["shared.weight"].values()
        wanted = (
            "device" if os.environ.get("HOROVOD_COMPRESS_KERNELS") == "device" else kernels.backend
        )
        assert spec.startswith(("max", "multi")) or {
            kernels.of(array).__name__.rpartition(".")[2] for array in arrays
        } == {wanted}
        made[spec] = (
            flat(model),
            compression.state_dict()["tensors"],
            compression.state_dict(portable=True)["tensors"],
        )
    torch.save(made, f"{os.environ['MADE']}.{hvd.rank()}")
