"""The ranks of a job that torchrun has started, for `cluster`."""

import os
from typing import Any, Callable, Iterable, List, Tuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import ddp
from ..torch_distributed.transport import DistributedTransport
from .cluster import Parameters, Ranks


class _Holder(torch.nn.Module):
    """Parameters whose gradients are what they are told to be."""

    def __init__(self, params: Parameters) -> None:
        super().__init__()
        for name, param in params.items():
            self.register_parameter(name, param)

    def forward(self) -> List[torch.Tensor]:
        return [param * 1 for param in self.parameters()]


class DistributedRanks(Ranks):
    """torchrun's ranks, on Gloo."""

    launcher = "torch.distributed on Gloo"
    transports = ["torch.distributed"]

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        super().__init__(DistributedTransport(dist.group.WORLD))
        self.installed = {}
        local_sizes = self.gathered(int(os.environ["LOCAL_WORLD_SIZE"]))
        self.local_size = local_sizes[0] if len(set(local_sizes)) == 1 else 1

    def barrier(self) -> None:
        dist.barrier()

    def start(self, verb: str, tensor: torch.Tensor, name: str) -> Callable[[], Any]:
        if verb == "allreduce":
            return dist.all_reduce(tensor, async_op=True).wait
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        if verb == "allgather":
            return dist.all_gather(parts, tensor, async_op=True).wait
        return dist.all_to_all_single(torch.empty_like(tensor), tensor, async_op=True).wait

    def training(
        self, params: Parameters, optimizer: torch.optim.Optimizer, spec: Any = None
    ) -> Tuple[Callable[[], Iterable[torch.Tensor]], Any]:
        model = DistributedDataParallel(_Holder(params))
        if spec is not None:
            options = {key: value for key, value in spec.items() if key != "transport"}
            ddp.compress(model, optimizer, options)
        return model, optimizer

    def leave(self) -> None:
        dist.destroy_process_group()
