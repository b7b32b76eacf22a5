"""Gradients that were computed on the CPU, in a model that is on a device; test_ddp_devices.py asks
for it."""

import os

import torch
import torch.distributed as dist
from checks import registry
from torch.nn.parallel import DistributedDataParallel as DDP

from horovod_compress import ddp, kernels

from .told import Holder, told

CASES, case = registry()
# Those whose results on devices are the host's to the last bit, or of powersgd to rounding.
SPECS = (
    "none",
    "fp16",
    "topk:chunk=64,k=4,values=2bit",
    "dgc:ratio=0.05",
    "dgc:ratio=0.05,warmup_steps=4,masking=false,values=fp16",
    "variance:alpha=1.0",
    "maxnorm:bits=4",
    "multiscale:bits=2+6",
    "powersgd",
)


def sgd(model):
    """Whose steps are exact: of powers of two."""
    return torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


@case()
def what_told_gradients_make_is_written():
    """Asked for by name. Writes, for each rank, parameters and states after five steps."""
    where, made = os.environ.get("DDP_DEVICE", "cpu"), {}
    for spec in SPECS:
        model = DDP(Holder().to(where), bucket_cap_mb=0.01)
        optimizer = sgd(model)
        compression = ddp.compress(model, optimizer, spec)
        if "GATHERS_ON_DEVICE" in os.environ:
            # As over NCCL.
            compression._session.exchange.transport.gathers_on_device = True
        for step in range(5):
            optimizer.zero_grad()
            its = told(dist.get_rank(), step)
            model({name: gradient.to(where) for name, gradient in its.items()}).backward()
            optimizer.step()
        states = compression.state_dict()["tensors"]
        parameters = {name: param.detach().cpu() for name, param in model.named_parameters()}
        # Of one rank nothing is compressed.
        if spec.startswith("dgc") and dist.get_world_size() > 1:
            arrays = compression._session.exchange.arrays()["held.matrix"].values()
            found = {kernels.of(array).__name__.rpartition(".")[2] for array in arrays}
            assert found == {os.environ.get("EXPECTED_KERNELS", kernels.backend)}, found
        made[spec] = parameters, states
    torch.save(made, f"{os.environ['MADE']}.{dist.get_rank()}")
