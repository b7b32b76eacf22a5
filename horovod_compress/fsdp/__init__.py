"""Compression between the replicas of models that PyTorch's fully_shard (FSDP2) has cut, without
Horovod.

from torch.distributed.fsdp import fully_shard
from horovod_compress import fsdp

mesh = init_device_mesh("cuda", (hosts, gpus), mesh_dim_names=("replicate", "shard"))
fully_shard(model, mesh=mesh["shard"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
spec = "dgc:ratio=0.001,warmup_steps=1000"
compression = fsdp.compress(model, optimizer, spec, replicate_group=mesh["replicate"])
"""

from ..session.updates import Nesterov
from ..torch_distributed.updates import AdamW, UpdateOptimizer
from .compression import FSDPCompression
from .factories import compress

__all__ = [
    "AdamW",
    "FSDPCompression",
    "Nesterov",
    "UpdateOptimizer",
    "compress",
]
