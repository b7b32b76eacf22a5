"""The ranks of torch.distributed, as compressions need them."""

import functools
import os
from typing import Any, Callable, List, Optional, Tuple

import torch
import torch.distributed as dist

from ..adapters.binding import Binding
from ..compressors.base import Compressor
from ..protocol.handshake import gather
from ..protocol.machine import Placement
from ..transport.base import Transport
from ..transport.distributed import DistributedTransport
from ..transport.loopback import Loopback

_TOLD = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class RanksBinding(Binding):
    """A compression bound to the ranks of a process group. group: None for all ranks."""

    # Where there is more than one rank.
    _ranks: DistributedTransport

    def __init__(self, group: Optional[dist.ProcessGroup]) -> None:
        Binding.__init__(self, dist.get_world_size(group) > 1)
        if self._active:
            self._ranks = DistributedTransport(_group_beside(group))
            self._places = _places(self._ranks)

    def _rank_and_size(self) -> Tuple[int, int]:
        return (self._ranks.rank, self._ranks.size) if self._active else (0, 1)

    def _transport_of(self, compressor: Compressor) -> Transport:
        if compressor.policy.transport == "mpi":
            raise ValueError(
                "transport=mpi is for Horovod's ranks: leave it out, and payloads travel by "
                "torch.distributed"
            )
        return self._ranks if self._active else Loopback.group(1)[0]

    def _placement(self) -> Placement:
        rank, refused = self._ranks.rank, None
        if self._ranks.size < dist.get_world_size():
            refused = "needs all ranks of a machine: leave process_group out, or hosts"
        elif not all(self._places):
            refused = (
                f"needs {', '.join(_TOLD)} in the environment of every rank, as torchrun sets "
                "them: start with that, or leave hosts out"
            )
        if refused:
            return Placement(rank, 0, 0, 1, True, refused)
        machine, local, size = self._places[rank]
        even = len({each[2] for each in self._places}) == 1
        return Placement(rank, machine, local, size, even)

    def _mean(self, tensor: torch.Tensor, name: str = "") -> Callable[[], Any]:
        """Starts the mean over ranks, in the tensor's own memory. Returns a function that waits for
        it. Names are for transports that need them."""
        size = self._ranks.size
        # As DDP does it. Small numbers of float16 would lose digits.
        if tensor.dtype != torch.float16:
            return self._ranks.reduce(tensor.mul_(1.0 / size))
        wait = self._ranks.reduce(tensor)

        # Several gradients may wait for one bucket.
        @functools.lru_cache(maxsize=None)
        def divided() -> None:
            wait()
            tensor.div_(size)

        return divided


def _places(ranks: DistributedTransport) -> List[Any]:
    """By rank, what its launcher has told it: the number of its machine, which of the ranks there
    it is, and how many those are; [] for one that was not told."""
    told = [int(os.environ[name]) for name in _TOLD if name in os.environ]
    return gather(ranks, "hvdc.places", told if len(told) == len(_TOLD) else [])


def _group_beside(group: Optional[dist.ProcessGroup]) -> dist.ProcessGroup:
    """A new group of the same ranks: in the one that is there the order of collectives is the
    user's, or DDP's. What is in host memory goes by Gloo."""
    its: Any = dist.group.WORLD if group is None else group
    with_nccl = "nccl" in dist.get_backend_config(its)
    options = its._get_backend(its._device_types[0]).options
    everybody = dist.get_world_size(its) == dist.get_world_size()
    if not everybody:
        _check_names(its)
    return dist.new_group(
        dist.get_process_group_ranks(its),
        # Else ranks would wait half an hour for one that has died, whatever the user has said.
        timeout=options._timeout,
        backend="cpu:gloo,cuda:nccl" if with_nccl else "gloo",
        use_local_synchronization=not everybody,
    )


def _check_names(group: dist.ProcessGroup) -> None:
    """Raises ValueError, on all ranks of a group, where they are in different numbers of groups.
    PyTorch makes the name of a new one of these from that number, and they would wait for each
    other under different names."""
    numbers: List[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(numbers, len(dist.distributed_c10d._world.pg_names), group=group)
    if len(set(numbers)) > 1:
        raise ValueError(
            f"the ranks of this process group are in {numbers} groups each, and PyTorch cannot "
            "make another one of them then: make the compression before other groups, or have all "
            "of its ranks be in as many"
        )
