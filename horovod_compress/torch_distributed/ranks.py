"""The ranks of torch.distributed, as compressions need them."""

import dataclasses
import functools
import itertools
import os
import weakref
from typing import Any, Callable, Iterator, List, Optional, Tuple

import numpy as np
import torch
import torch.distributed as dist

from ..compressors.base import Compressor
from ..protocol.handshake import gather
from ..protocol.machine import Machine, Placement
from ..session.ranks import Ranks
from ..transport.base import Transport
from ..transport.loopback import Loopback
from .transport import DistributedTransport

_TOLD = ("GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def group_of(given: Any, argument: str) -> Optional[dist.ProcessGroup]:
    """The process group that a user has given as such, or as a DeviceMesh of one dimension.

    Args:
        given: None for all ranks.
        argument: its name.

    Raises:
        ValueError: a mesh of several dimensions.
    """
    if getattr(given, "ndim", 1) != 1:
        raise ValueError(
            f"{argument} must be a process group, or a mesh of one dimension, as "
            f"mesh['replicate'], not {given}"
        )
    return given.get_group() if hasattr(given, "get_group") else given


class GroupRanks(Ranks):
    """The ranks of a process group. group: None for all ranks.

    Attributes:
        beside: the transport of these ranks, where there is more than one.
    """

    refused_alone = (
        "on one rank nothing is exchanged, so what ranks have not sent yet cannot be applied: "
        "train on two ranks or more"
    )
    beside: "RanksBeside"

    def __init__(self, group: Optional[dist.ProcessGroup]) -> None:
        super().__init__(dist.get_world_size(group) > 1)
        if self.active:
            self.beside = RanksBeside(group)
            self.gathers_on_device = self.beside.gathers_on_device

    def _places(self) -> List[Any]:
        """By rank, what its launcher has told it: the number of its machine, which of the ranks
        there it is, and how many those are; [] for one that was not told. All ranks call it."""
        told = [int(os.environ[name]) for name in _TOLD if name in os.environ]
        return gather(self.beside, "hvdc.places", told if len(told) == len(_TOLD) else [])

    def rank_and_size(self) -> Tuple[int, int]:
        return (self.beside.rank, self.beside.size) if self.active else (0, 1)

    def transport_of(self, compressor: Compressor) -> Transport:
        if compressor.policy.transport == "mpi":
            raise ValueError(
                "transport=mpi is for Horovod's ranks: leave it out, and payloads travel by "
                "torch.distributed"
            )
        return self.beside if self.active else Loopback.group(1)[0]

    def machine_of(self, compressor: Compressor) -> Optional[Machine]:
        """As of `Ranks`. Where ranks are takes a collective to know."""
        return super().machine_of(compressor) if compressor.policy.hosts else None

    def placement(self) -> Placement:
        rank, places, refused = self.beside.rank, self._places(), None
        if self.beside.size < dist.get_world_size():
            refused = (
                "needs all ranks of a machine, and this process_group has some: leave hosts out"
            )
        elif not all(places):
            refused = (
                f"needs {', '.join(_TOLD)} in the environment of every rank, as torchrun sets "
                "them: start with that, or leave hosts out"
            )
        if refused:
            return Placement(rank, 0, 0, 1, True, refused)
        machine, local, size = places[rank]
        even = len({each[2] for each in places}) == 1
        return Placement(rank, machine, local, size, even)

    def mean(self, tensor: torch.Tensor, name: str = "") -> Callable[[], Any]:
        """Starts the mean over ranks, in the tensor's own memory. Returns a function that waits for
        it. Names are for transports that need them."""
        size = self.beside.size
        # As DDP does it. Small numbers of float16 would lose digits.
        if tensor.dtype != torch.float16:
            return self.beside.reduce(tensor.mul_(1.0 / size))
        wait = self.beside.reduce(tensor)

        # Several gradients may wait for one bucket.
        @functools.lru_cache(maxsize=None)
        def divided() -> None:
            wait()
            tensor.div_(size)

        return divided


class RanksBeside(DistributedTransport):
    """The ranks of a process group, in another one of the same ranks: in the first the order of
    collectives is the user's, or DDP's. They meet there at the first collective, so that only
    there all ranks have to come. group: None for all ranks."""

    def __init__(self, group: Optional[dist.ProcessGroup]) -> None:
        super().__init__(group)
        self._beside = group
        del self.group

    @functools.cached_property
    def _shared(self) -> "_Shared":
        shared = _shared_beside(self._beside or dist.group.WORLD)
        shared.users.add(self)
        return shared

    @functools.cached_property
    def group(self) -> Any:  # type: ignore[override]
        return self._shared.group()

    # Else ranks might take messages of one compression for those of another just like it.
    @functools.cached_property
    def _number(self) -> int:
        return next(self._shared.numbers)

    def allgather(self, name: str, payload: np.ndarray) -> Callable[[], np.ndarray]:
        return super().allgather(f"{self._number}.{name}", payload)

    def give_up(self) -> None:
        """Has later compressions meet elsewhere: ranks may have started different numbers of
        collectives here."""
        self._shared.given_up = True


@dataclasses.dataclass(eq=False)
class _Shared:
    """A group that compressions share, and the user's that it is beside. PyTorch keeps both until
    they are destroyed. given_up: whether no others join its users."""

    beside: "weakref.ref[dist.ProcessGroup]"
    group: "weakref.ref[dist.ProcessGroup]"
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)
    users: "weakref.WeakSet[RanksBeside]" = dataclasses.field(default_factory=weakref.WeakSet)
    given_up: bool = False


_shared: List[_Shared] = []
# Whether PyTorch names all groups by how many this rank has made, and not only those of all ranks.
COUNTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)


def _shared_beside(group: Any) -> _Shared:
    """The group beside the user's. All ranks come here at the same place."""
    world = dist.distributed_c10d._world
    there = world.pg_names
    for each in list(_shared):
        if each.beside() not in there or each.given_up and not each.users:
            _shared.remove(each)
            if each.group() in there:
                dist.destroy_process_group(each.group())
    its = [each for each in _shared if each.beside() is group and not each.given_up]
    found = [each for each in its if each.group() in there]
    said: List[Any] = [None] * dist.get_world_size(group)
    number = world.group_count if COUNTS else len(there)
    dist.all_gather_object(said, (len(found), number), group=group)
    if all(number for number, _ in said):
        return found[0]
    for each in its:
        each.given_up = True
    made = _new_group(group, [number for _, number in said])
    _shared.append(_Shared(weakref.ref(group), weakref.ref(made)))
    return _shared[-1]


def _new_group(group: Any, numbers: List[int]) -> dist.ProcessGroup:
    """A new group of the same ranks. What is in host memory goes by Gloo. numbers: of groups that
    each rank is in, or has made."""
    with_nccl = "nccl" in dist.get_backend_config(group)
    options = group._get_backend(group._device_types[0]).options
    everybody = dist.get_world_size(group) == dist.get_world_size()
    # PyTorch makes the name of the group from that number, and they would wait for each other under
    # different names.
    if (COUNTS or not everybody) and len(set(numbers)) > 1:
        raise ValueError(
            f"the ranks of this process group are in {numbers} groups each, and PyTorch cannot "
            "make another one of them then: begin to train with the compression before other "
            "groups are made, or have all of its ranks be in as many"
        )
    return dist.new_group(
        dist.get_process_group_ranks(group),
        # Else ranks would wait half an hour for one that has died, whatever the user has said.
        timeout=options._timeout,
        backend="cpu:gloo,cuda:nccl" if with_nccl else "gloo",
        use_local_synchronization=not everybody,
    )
