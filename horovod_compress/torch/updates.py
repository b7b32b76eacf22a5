"""UpdateOptimizer on Horovod."""

import functools
from typing import Any, Callable, Optional

import horovod.torch as hvd
import torch

from ..compressors.advice import ADAM
from ..session.notices import warn_once
from ..session.updates import Nesterov, check_ranks_of_set
from ..torch_common.adam import AdamWOfRanks
from ..torch_common.parameters import NamedParameters
from ..torch_common.updates import UpdatingOptimizer
from .elastic_updates import KeptUpdates
from .horovod_internals import let_broadcast_begin
from .ranks import TorchRanks

_NOT_NEEDED = (
    "an UpdateOptimizer's state is each rank's own, and hvd.broadcast_optimizer_state gives all "
    "ranks that of one: delete the line hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
)

_ONE_STATE = (
    "rank 0 has loaded a state of its UpdateOptimizer, and other ranks have not: all go on from "
    "rank 0's, its optimizer's state too, without what the others had not sent. Load on every rank "
    "what that rank has saved, or a portable state, and delete the line "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
)


class AdamW(AdamWOfRanks):
    __doc__ = AdamWOfRanks.__doc__

    _known_as = "hvdc.AdamW"
    _size = staticmethod(hvd.size)


class UpdateOptimizer(UpdatingOptimizer):
    """Makes an optimizer a compressed one.

    Each rank takes its own step with its own gradients. What the step adds to the parameters is
    compressed with error feedback and exchanged, and all ranks add the mean. So the optimizer's
    momentum, second moments, weight decay and learning rate are inside what is sent, and nothing is
    taken over from it.

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = hvdc.UpdateOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression="adacomp:bin_length=64,dense=fp16",
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    It takes the place of hvd.DistributedOptimizer: Horovod reduces no gradients. Parameters are
    bit-identical on all ranks after each exchange; the optimizer's own state is each rank's.

    A copy of the parameters is kept, which an optimizer needs that looks at them. A rank whose
    GradScaler has found infinite gradients skips its own step and takes part with an update of
    zero; each rank's loss scale is its own. Where an update is not finite on some rank, no rank's
    parameters move, and what was to be sent waits for the next exchange, where a residual is kept
    of it; an exchange that fails leaves the shared parameters.

    Args:
        optimizer: any torch optimizer but L-BFGS, with real floating-point parameters. Its
            parameter groups are this one's, so schedulers may have either, and so are its methods:
            call them on either. Where one changes parameters outside of step(), as train() and
            eval() of schedule-free optimizers do, all ranks call it, and parameters become their
            mean over ranks, bit-identical.
        named_parameters: (name, parameter) pairs, as model.named_parameters(); default: numbered
            by parameter group.
        compression: a spec, as for `horovod_compress.get_compressor`, or
            hvdc.Compression.adacomp(…); default: what is advised for Adam. dgc selects as topk
            does here.
        every: how many local steps come before each exchange (H of DiLoCo, arXiv 2311.08105). In
            between ranks' parameters differ.
        outer: what is done with the mean update; default: it is added. `hvdc.Nesterov()` is
            DiLoCo's.
        process_set: the ranks that exchange; default: all.

    Raises:
        ValueError: bad options.
        MismatchError: at the first step, on all ranks: they were started differently, or begin with
            different parameters.
    """

    _broadcast_in_vain = _NOT_NEEDED

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        named_parameters: Optional[NamedParameters] = None,
        compression: Any = ADAM.spec,
        every: int = 1,
        outer: Optional[Nesterov] = None,
        process_set: Any = None,
    ) -> None:
        for group in optimizer.param_groups if isinstance(optimizer, AdamW) else ():
            check_ranks_of_set(group["ranks"], process_set)
        self._begin_with(
            optimizer,
            named_parameters,
            every,
            outer,
            functools.partial(TorchRanks, process_set),
            compression,
            "call hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
        )
        let_broadcast_begin(self)

    # torch declares it once for each kind of closure.
    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:  # type: ignore[override]
        """A step of the optimizer on this rank, and after every so many of them the exchange, which
        waits for all ranks."""
        return self._take_step(closure)

    def _exchange(self) -> None:
        # In an elastic job: ranks have left, and those that stay are not asked to synchronize.
        if self._session.ranks.rank_and_size() != self._session.ranks.known:
            self._session.resize()
        super()._exchange()

    def _go_on_from_all(self) -> None:
        """Gives all ranks the state that rank 0 alone has loaded, as scripts for Horovod do that
        resume."""
        steps = self.compression.steps_of_all()
        if len(set(steps)) == 1:
            return
        ranks: Any = self._session.ranks
        of_all_ranks = ranks.process_set.process_set_id == 0
        if not of_all_ranks or any(each not in (0, steps[0]) for each in steps):
            super()._go_on_from_all()
        KeptUpdates(self).sync()
        if self._session.exchange.now.rank == 0:
            warn_once(_ONE_STATE)
