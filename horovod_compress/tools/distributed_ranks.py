"""The ranks of a job that torchrun has started, for `cluster`."""

import os
from typing import Any, Callable, Dict, Iterable, Iterator, List, Sequence, Tuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .. import ddp
from .cluster import Named, Ranks, parameter


class _Holder(torch.nn.Module):
    """Parameters whose gradients are what they are told to be."""

    def __init__(self, params: Dict[str, torch.nn.Parameter]) -> None:
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
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.installed = {}
        local_sizes = self.gathered(int(os.environ["LOCAL_WORLD_SIZE"]))
        self.local_size = local_sizes[0] if len(set(local_sizes)) == 1 else 1

    def gathered(self, value: Any) -> List[Any]:
        found = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def slowest(self, seconds: Sequence[float]) -> List[float]:
        mine = torch.tensor(seconds, dtype=torch.float64, device="cpu")
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.tolist()

    def barrier(self) -> None:
        dist.barrier()

    def start(self, verb: str, tensor: torch.Tensor, name: str) -> Callable[[], Any]:
        if verb == "allreduce":
            return dist.all_reduce(tensor, async_op=True).wait
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        if verb == "allgather":
            return dist.all_gather(parts, tensor, async_op=True).wait
        return dist.all_to_all_single(torch.empty_like(tensor), tensor, async_op=True).wait

    def exchanged(self, spec: Any, steps: Iterable[Named]) -> Iterator[Named]:
        steps = list(steps)
        params = {name: parameter(array.shape) for name, array in steps[0].items()}
        model = DistributedDataParallel(_Holder(params))
        optimizer = torch.optim.Adam(model.parameters())
        spec = {key: value for key, value in spec.items() if key != "transport"}
        ddp.compress(model, optimizer, spec)
        for step in steps:
            optimizer.zero_grad()
            losses = [
                (param * torch.from_numpy(grad)).sum()
                for param, grad in zip(model(), step.values())
            ]
            torch.stack(losses).sum().backward()
            yield {name: param.grad.numpy() for name, param in params.items()}
            optimizer.step()

    def training(self, params: List[Any]) -> Tuple[Callable[..., Any], Any]:
        named = {str(i): param for i, param in enumerate(params)}
        model = DistributedDataParallel(_Holder(named))
        return model, torch.optim.SGD(model.parameters(), lr=0.0)

    def leave(self) -> None:
        dist.destroy_process_group()
