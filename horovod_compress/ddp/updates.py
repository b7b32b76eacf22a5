"""UpdateOptimizer over torch.distributed."""

import functools
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..compressors.advice import ADAM
from ..session.updates import Nesterov, check_ranks_of_part
from ..torch_common.adam import AdamWOfRanks
from ..torch_common.parameters import NamedParameters
from ..torch_common.search import objects_of
from ..torch_common.updates import UpdatingOptimizer
from .ranks import GroupRanks


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
    same parameters on all ranks, as from the same seed.

    Args:
        optimizer: any torch optimizer but L-BFGS, with real floating-point parameters. Its
            parameter groups are this one's, so schedulers may have either, and so are its methods.
        named_parameters: (name, parameter) pairs, as model.named_parameters(); default: numbered
            by parameter group.
        compression: a spec, as for `horovod_compress.get_compressor`; default: what is advised for
            Adam. dgc selects as topk does.
        every: how many local steps come before each exchange (H of DiLoCo, arXiv 2311.08105).
        outer: what is done with the mean update; default: it is added. `ddp.Nesterov()` is
            DiLoCo's.
        process_group: the ranks that exchange; default: all.

    Raises:
        ValueError: bad options.
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
        process_group: Optional[dist.ProcessGroup] = None,
    ) -> None:
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
        return self._take_step(closure)

    def _go_on_from_all(self) -> None:
        super()._go_on_from_all()
        reduced = {
            id(param)
            for model in objects_of(DistributedDataParallel)
            for param in model.parameters()
        }
        if reduced & self._known:
            raise ValueError(
                "DistributedDataParallel averages the gradients of these parameters already: give "
                "UpdateOptimizer the plain model's, and train that, or use ddp.compress"
            )
