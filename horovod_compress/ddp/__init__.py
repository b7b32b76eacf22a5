"""Compression for PyTorch's DistributedDataParallel, without Horovod.

from torch.nn.parallel import DistributedDataParallel as DDP
from horovod_compress import ddp

model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
compression = ddp.compress(model, optimizer, "dgc:ratio=0.001,warmup_steps=1000")
"""

from ..session.updates import Nesterov
from ..torch_distributed.updates import AdamW, UpdateOptimizer
from .compression import DDPCompression
from .factories import compress
from .unbound import HookState, comm_hook

__all__ = [
    "AdamW",
    "DDPCompression",
    "HookState",
    "Nesterov",
    "UpdateOptimizer",
    "comm_hook",
    "compress",
]
