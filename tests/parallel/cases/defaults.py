"""torch's default dtype and device, which users change, change nothing."""

import contextlib

import horovod.torch as hvd
import torch
from checks import registry
from torch import nn

import horovod_compress.torch as hvdc

from .training import assert_replicas_identical, batches, flat, model_of, sgd, train, wrap

CASES, case = registry()
DEFAULTS = [(torch.bfloat16, "cpu"), (torch.float64, "meta")]


@contextlib.contextmanager
def defaults(dtype, device):
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def assert_alike(what, trained):
    """trained(dtype, device) is a model that was trained under these defaults."""
    expected = flat(trained(torch.float32, "cpu"))
    for dtype, device in DEFAULTS:
        model = trained(dtype, device)
        assert_replicas_identical(model)
        assert torch.equal(flat(model), expected), (what, dtype, device)


@case(2)
def torchs_defaults_change_no_gradients():
    specs = [
        "topk:ratio=0.1",
        "topk:ratio=0.1,exchange=split",
        "topk:ratio=0.1,hosts=true",
        "maxnorm",
        "powersgd",
        "globalrandk",
    ]
    for spec in [f"{spec}{',' if ':' in spec else ':'}min_numel=0" for spec in specs] + [
        "variance:moments=per_sample",
        "fp16",
    ]:

        def trained(dtype, device, spec=spec):
            model = model_of()
            model.norm = nn.GroupNorm(2, 8)
            optimizer, data = sgd(model, momentum=0), list(batches(4))
            with defaults(dtype, device):
                compression = hvdc.Compression.from_spec(
                    spec, optimizer, named_parameters=model.named_parameters()
                )
                wrapped = wrap(model, optimizer, compression)
                train(model, wrapped, data[:2])
                with hvdc.uneven(wrapped):
                    train(model, wrapped, data[2 : 4 - hvd.rank()])
                states = [compression.state_dict(), compression.state_dict(portable=True)]
                compression.load_state_dict(states[0])
                compression.switch("topk:ratio=0.2")
                train(model, wrapped, data[:1])
            return model

        assert_alike(spec, trained)


@case(2)
def torchs_defaults_change_no_updates():
    def trained(dtype, device):
        model, data = model_of(), list(batches(6))
        with defaults(dtype, device):
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = hvdc.AdamW(model.parameters())
            optimizer = hvdc.UpdateOptimizer(
                optimizer,
                named_parameters=model.named_parameters(),
                compression="topk:ratio=0.1",
                every=2,
                outer=hvdc.Nesterov(),
            )
            train(model, optimizer, data)
            optimizer.average_state()
            optimizer.load_state_dict(optimizer.state_dict())
            train(model, optimizer, data[:2])
        return model

    assert_alike("updates", trained)
