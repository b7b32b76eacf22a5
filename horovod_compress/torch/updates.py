"""UpdateOptimizer on Horovod, and its state where ranks come and go."""

import copy
import functools
from typing import Any, Callable, Dict, List, Optional

import horovod.torch as hvd
import numpy as np
import torch

from ..compressors.advice import ADAM
from ..engine.debt import DEBT
from ..protocol.handshake import gather
from ..session.elastic import Kept
from ..session.notices import warn_once
from ..session.updates import Nesterov, check_ranks_of_set
from ..torch_common.adam import AdamWOfRanks
from ..torch_common.parameters import NamedParameters
from ..torch_common.updates import UpdatingOptimizer
from .horovod_internals import let_broadcast_begin
from .transport import TorchRanks

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
        optimizer: any torch optimizer but L-BFGS and those that exchange already
            (ZeroRedundancyOptimizer, PostLocalSGDOptimizer, one of Horovod's, an UpdateOptimizer),
            with real floating-point parameters. Its parameter groups are this one's, so schedulers
            may have either, and so are its methods: call them on either. Where one changes
            parameters outside of step(), as train() and eval() of schedule-free optimizers do, all
            ranks call it, and parameters become their mean over ranks, bit-identical.
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
        TypeError: `optimizer` is no optimizer of torch, or `outer` no Nesterov.
        ValueError: bad options, or an optimizer or parameters that cannot be served.
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


class KeptUpdates:
    """As of `Kept`, with the optimizer's own state and what ranks share: what an UpdateOptimizer's
    ranks keep where others come and go, and where one of them alone has loaded a state."""

    def __init__(self, optimizer: UpdateOptimizer) -> None:
        self._optimizer, self._session = optimizer, optimizer._session
        self._compression = Kept(optimizer._session)

    def _of_all(self, number: int) -> List[int]:
        """The numbers of all ranks, which all call it, also where they do not know each other
        yet."""
        return gather(self._session.ranks.transport, "hvdc.elastic.number", number)

    def entry(self, into: Optional[Dict[str, Any]] = None, begun: bool = False) -> Dict[str, Any]:
        """As of `Kept`. A round that has begun, on this rank or, with `begun`, on another, is kept
        as one that has not: with what local steps have added among what the next exchange is to
        send."""
        optimizer = self._optimizer
        local_steps, parameters = optimizer.local_steps, optimizer._parameters
        kept = self._compression.entry(into["compression"] if into else None)
        for each in parameters if begun or local_steps else ():
            arrays = kept["tensors"][each.name]
            arrays[DEBT] = arrays.get(DEBT, 0) + (
                each.load(each.param.detach() - each.shared)[1]
                if local_steps
                else np.zeros(each.param.numel(), np.float32)
            )
        return {
            "compression": kept,
            "optimizer": copy.deepcopy(optimizer._optimizer.state_dict()),
            "shared": {
                each.name: (each.shared if local_steps else each.param).detach().clone()
                for each in parameters
            },
            "momentum": {name: its.clone() for name, its in optimizer._momenta().items()},
        }

    @torch.no_grad()
    def go_back_to(self, state: Dict[str, Any]) -> None:
        optimizer = self._optimizer
        self._compression.go_back_to(state["compression"])
        # Which would go on in the tensors that it is given.
        optimizer._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        for each in optimizer._parameters:
            each.shared.copy_(state["shared"][each.name])
        for name, momentum in optimizer._momenta().items():
            momentum.copy_(state["momentum"][name])
        optimizer._rollback_round()
        optimizer._shared_is_kept = True

    @torch.no_grad()
    def sync(self) -> None:
        """All ranks go on from what rank 0 shares. Ranks that stay keep their optimizer's own
        state, and those that have just begun take rank 0's."""
        optimizer = self._optimizer
        # What the elastic state itself does with the model brings a rank's own parameters.
        if optimizer.local_steps or optimizer._shared_is_kept:
            optimizer._rollback_round()
        steps = self._of_all(self._session.exchange.steps_taken())
        self._compression.sync()
        if len(set(steps)) > 1:
            state = hvd.broadcast_object(
                optimizer._optimizer.state_dict(), root_rank=0, name="hvdc.elastic.optimizer"
            )
            if steps[hvd.rank()] != steps[0]:
                optimizer._optimizer.load_state_dict(state)
        shared = [(each.name, each.param) for each in optimizer._parameters]
        momenta = [(f"{name}.momentum", its) for name, its in optimizer._momenta().items()]
        hvd.broadcast_parameters([*shared, *momenta], root_rank=0)

    @torch.no_grad()
    def even_out(self, saved: Dict[str, Any]) -> Dict[str, Any]:
        """As of `Kept`. A round that has begun ends here."""
        if any(self._of_all(self._optimizer.local_steps)):
            self.go_back_to(self.entry(begun=True))
        return {**saved, "compression": self._compression.even_out(saved["compression"])}
