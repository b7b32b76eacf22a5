"""UpdateOptimizer over torch.distributed."""

import functools
from typing import Any, Callable, List, Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..compressors.advice import ADAM
from ..session.callers import callers
from ..session.updates import Nesterov, check_ranks_of_part
from ..torch_common.adam import AdamWOfRanks
from ..torch_common.optimizer_around import check_inner
from ..torch_common.parameters import NamedParameters
from ..torch_common.search import objects_of
from ..torch_common.shards import is_shard
from ..torch_common.updates import SharedParameter, UpdatingOptimizer
from .checks import check_replicas
from .compression import GroupCompression
from .ranks import GroupRanks, group_of


class AdamW(AdamWOfRanks):
    __doc__ = AdamWOfRanks.__doc__

    _known_as = "ddp.AdamW"
    _size = staticmethod(dist.get_world_size)


class UpdateOptimizer(UpdatingOptimizer):
    """Makes an optimizer a compressed one.

    Each rank takes its own step with its own gradients. What the step adds to the parameters is
    compressed with error feedback and exchanged, and all ranks add the mean. So the optimizer's
    momentum, second moments, weight decay and learning rate are inside what is sent.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = ddp.UpdateOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression="adacomp:bin_length=64,dense=fp16",
        )

    It takes the place of DistributedDataParallel: the model is the plain one, and begins with the
    same parameters on all ranks, as from the same seed. Of a model that `fully_shard` has cut over
    the ranks of a host, ranks with the same shard exchange, those of `process_group`.

    Args:
        optimizer: any torch optimizer but L-BFGS and those that exchange already
            (ZeroRedundancyOptimizer, PostLocalSGDOptimizer, one of Horovod's, an UpdateOptimizer),
            with real floating-point parameters. Its parameter groups are this one's, so schedulers
            may have either, and so are its methods.
        named_parameters: (name, parameter) pairs, as model.named_parameters(); default: numbered
            by parameter group.
        compression: a spec, as for `horovod_compress.get_compressor`; default: what is advised for
            Adam. dgc selects as topk does.
        every: how many local steps come before each exchange (H of DiLoCo, arXiv 2311.08105).
        outer: what is done with the mean update; default: it is added. `ddp.Nesterov()` is
            DiLoCo's.
        process_group: the ranks that exchange, a group or a mesh of one dimension; default: all.

    Raises:
        TypeError: `optimizer` is no optimizer of torch, or `outer` no Nesterov.
        ValueError: bad options, or an optimizer or parameters that cannot be served; at the first
            step, DistributedDataParallel or a compression averages their gradients already.
        MismatchError: at the first step, on all ranks: they were started differently, or begin with
            different parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        named_parameters: Optional[NamedParameters] = None,
        compression: Any = ADAM.spec,
        every: int = 1,
        outer: Optional[Nesterov] = None,
        process_group: Any = None,
    ) -> None:
        process_group = group_of(process_group, "process_group")
        check_inner(optimizer, "UpdateOptimizer")
        params = [param for group in optimizer.param_groups for param in group["params"]]
        check_replicas(params, process_group, "process_group")
        size = dist.get_world_size(process_group)
        of_part = isinstance(optimizer, AdamW) and size < dist.get_world_size()
        for group in optimizer.param_groups if of_part else ():
            check_ranks_of_part(group["ranks"], size, "ddp.AdamW with this process group")
        self._begin_with(
            optimizer,
            named_parameters,
            every,
            outer,
            functools.partial(GroupRanks, process_group),
            compression,
            "broadcast the parameters of rank 0 (torch.distributed.broadcast)",
        )

    # torch declares it once for each kind of closure.
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """A step of the optimizer on this rank, and after every so many of them the exchange, which
        waits for all ranks."""
        # torch.distributed.checkpoint has an optimizer make its state, at a rate of 0.
        if not self.state and "_init_optim_state" in (its.f_code.co_name for its in callers()):
            return super().step(closure)
        return self._take_step(closure)

    def _swap(self, swapped: List[SharedParameter]) -> None:
        super()._swap(swapped)
        if any(is_shard(each.param) for each in swapped):
            from torch.distributed.fsdp import FSDPModule

            # Else a forward pass might begin with what an earlier one has gathered.
            for module in objects_of(FSDPModule):
                module.reshard()

    def _go_on_from_all(self) -> None:
        super()._go_on_from_all()
        found = objects_of(DistributedDataParallel, GroupCompression)
        for each in found:
            if isinstance(each, GroupCompression):
                # None where its making has failed.
                steps = vars(each).get("_steps")
                params = [slot.param for slot in steps.slots] if steps else []
            else:
                params = each.parameters()
            if self._known.intersection(map(id, params)):
                raise ValueError(
                    f"{type(each).__name__} averages the gradients of these parameters already: "
                    "give UpdateOptimizer those of a model without it, or use ddp.compress, or "
                    "fsdp.compress, and leave UpdateOptimizer out"
                )
