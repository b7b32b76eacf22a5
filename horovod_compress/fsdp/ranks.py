"""The ranks that keep the same shard."""

from typing import Any, List, Optional, Sequence

import torch
import torch.distributed as dist

from ..compressors.base import Compressor
from ..torch_common import shards
from ..torch_distributed.ranks import GroupRanks
from ..transport.base import Transport


class ReplicaRanks(GroupRanks):
    """The ranks of a process group, that keep the same shard of some parameters. group: None for
    all ranks."""

    def __init__(self, group: Optional[dist.ProcessGroup], params: Sequence[torch.Tensor]) -> None:
        super().__init__(group)
        meshes = shards.meshes_of(params)
        # The groups of ranks that have the other shards, a dimension of a mesh each.
        self._across = [its for mesh in meshes for its in mesh.get_all_groups() if its.size() > 1]

    def gathered(self, name: str, value: Any) -> List[Any]:
        """As of `Ranks`, from the ranks of all shards, which go on alike."""
        values = super().gathered(name, value)
        for group in self._across:
            found: List[Any] = [None] * group.size()
            dist.all_gather_object(found, values, group=group)
            values = [each for its in found for each in its]
        return values

    def transport_of(self, compressor: Compressor) -> Transport:
        if compressor.policy.clip_norm is not None and self._across:
            raise ValueError(
                f"{compressor.id}: clip_norm would be of one shard's gradients: leave it out, and "
                "call torch.nn.utils.clip_grad_norm_, with momentum=0 where momentum would be "
                "taken over"
            )
        return super().transport_of(compressor)
